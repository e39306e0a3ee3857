"""Figures and the report stage from synthetic results."""

import json
import re
import xml.etree.ElementTree as ET

import numpy as np
from made_up_results import MADE_UP, made_up_arms, made_up_experiment, write_run
from matplotlib.colors import to_rgb

from quads import report
from quads.comparison.figures import curves_figure
from quads.comparison.runs import find_runs
from quads.paper import figures
from quads.paper.sources import load_sources
from quads.paper.tables import build_rows


def test_smoothing_is_a_centred_mean_that_shrinks_at_the_ends():
    got = figures.smooth(np.array([0.0, 3.0, 6.0, 3.0, np.nan]), width=3)
    assert got.tolist() == [1.5, 3.0, 4.0, 4.5, 3.0]


def test_arms_differ_in_colour_style_and_marker():
    assert len(set(figures.COLOURS)) == len(set(figures.STYLES)) == len(set(figures.MARKERS)) == 9
    luminance = [np.dot(to_rgb(c), (0.2126, 0.7152, 0.0722)) for c in figures.COLOURS[:4]]
    assert min(abs(a - b) for i, a in enumerate(luminance) for b in luminance[:i]) > 0.05


def look(line):
    return line.get_color(), line.get_linestyle(), line.get_marker(), line.get_linewidth(), line.get_markersize()


def test_a_run_looks_the_same_in_report_and_comparison(made_up):
    """Thin as recorded, thick smoothed; colour, style and marker by the place of the arm or run."""
    sources = load_sources(*made_up)
    runs = find_runs([source.run_id for source in sources], made_up[0])
    (report_axes,) = figures.reward_figure(sources, "made up").axes
    compared = curves_figure(runs).axes
    for axes in (report_axes, compared[0]):
        thin, thick = axes.lines[::2], axes.lines[1::2]
        assert len(thin) == len(thick) == len(sources)
        for place, (source, a, b) in enumerate(zip(sources, thin, thick, strict=True)):
            assert a.get_color() == b.get_color() == figures.COLOURS[place] and a.get_linewidth() < b.get_linewidth()
            assert b.get_marker() == figures.MARKERS[place] and b.get_markevery() == 1
            assert np.array_equal(a.get_ydata(), source.curve("reward"))
            assert np.array_equal(b.get_ydata(), figures.smooth(source.curve("reward")))
    assert [look(line) for line in report_axes.lines] == [look(line) for line in compared[0].lines]
    for line, source in zip(compared[2].lines, sources, strict=True):  # gaps have no thin line
        assert np.array_equal(line.get_ydata(), source.curve("gap_max"))


def test_gap_is_logarithmic_and_arms_keep_their_order(made_up):
    sources = load_sources(*made_up)
    (axes,) = figures.gap_figure(sources, "made up").axes
    assert axes.get_yscale() == "log"
    assert [t.get_text() for t in axes.get_legend().get_texts()] == list(MADE_UP)
    for source, largest, mean in zip(sources, axes.lines[::2], axes.lines[1::2], strict=True):
        assert np.array_equal(largest.get_ydata(), source.curve("gap_max"))
        assert np.array_equal(mean.get_ydata(), source.curve("gap_mean"))
    rows = build_rows(sources, made_up[1].evaluation)
    (accuracy,) = figures.accuracy_figure(rows, "made up", 0.95).axes
    assert [t.get_text() for t in accuracy.get_yticklabels()] == list(MADE_UP)


def test_report_writes_everything_and_lists_its_sources(inputs, tmp_path):
    out = tmp_path / "report"
    report.build(inputs(), out)
    summary = json.loads((out / "report.json").read_text())
    found = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file() and p.name != "report.json")
    assert sorted(summary["files"]) == found and "index.html" in found
    assert summary["order_of_mean_gaps"] == ["nvfp4_naive", "qat_only", "quads", "bf16"]
    assert len(summary["sources"]) == 4 and all(len(s["files"]) == 3 for s in summary["sources"])
    beside = [f"figures/{name}" for name in ("ablation", "table3", "layers", "throughput")]
    for stem in ("reward", "gap", "accuracy", *beside):
        ET.parse(out / f"{stem}.svg")
        assert (out / f"{stem}.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_is_the_same_bytes_again(inputs, tmp_path):
    for name in ("a", "b"):
        report.build(inputs(), tmp_path / name)
    # the page holds paths relative to its folder, which are as long for both
    for path in sorted(p for p in (tmp_path / "a").rglob("*") if p.is_file()):
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes(), path.name


def test_the_same_sources_give_the_same_bytes(made_up, tmp_path):
    sources = load_sources(*made_up)
    a, b = (figures.save(figures.reward_figure(sources, "made up"), tmp_path / name) for name in ("a", "b"))
    assert [p.read_bytes() for p in a] == [p.read_bytes() for p in b]


def test_the_stage_says_which_run_is_missing(tmp_path, caplog):
    (tmp_path / "arms").mkdir()
    (tmp_path / "arms" / "bf16.yaml").write_text("name: bf16\ntitle: BF16\n")
    (tmp_path / "tiny.yaml").write_text("name: tiny\ntitle: Tiny\narms: [bf16]\n")
    args = ["--experiment", str(tmp_path / "tiny.yaml"), "--results", str(tmp_path), "--out", str(tmp_path / "out")]
    assert report.main(args) == 1
    assert re.search(r"training result .*bf16-seed0-.*missing.*another folder \(it is not below results/", caplog.text)
    assert not (tmp_path / "out").exists()


def test_each_of_several_seeds_has_its_tick(made_up, tmp_path):
    def ticks(rows):
        (axes,) = figures.accuracy_figure(rows, "made up", 0.95).axes
        lines = [line for line in axes.lines if line.get_label() == "end, own engine: each seed"]
        return [tuple(point) for line in lines for point in line.get_xydata()]

    assert ticks(build_rows(load_sources(*made_up), made_up[1].evaluation)) == []
    experiment, arms = made_up_experiment(seeds=(0, 1)), made_up_arms()[:1]
    write_run(tmp_path / "two", experiment, arms[0], 0)
    write_run(tmp_path / "two", experiment, arms[0], 1, numbers=(0.5, 0.7, 0.001))
    rows = build_rows(load_sources(tmp_path / "two", experiment, arms), experiment.evaluation)
    assert np.allclose(ticks(rows), [(90.5, 0), (70.5, 0)])
