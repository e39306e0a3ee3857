"""The detector's verdict in the table of arms, and the decomposition during training, from SYNTHETIC result files."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest
from made_up_results import made_up_arms, made_up_experiment, write_run

from quads import report
from quads.config import Collapse
from quads.diagnostics.during import COLUMNS
from quads.files import ResultFileError
from quads.paper.assemble import Report
from quads.paper.claims import judge_claims
from quads.paper.decomposition_figure import TERMS, gap_parts_figure, parts_records
from quads.paper.render import main_grid
from quads.paper.sources import load_sources
from quads.paper.tables import build_rows, few_steps, record

SENSITIVE = Collapse(window=1, baseline=2, patience=2, noise=0.0, drop=0.8, recover=0.9)


@pytest.fixture
def results(tmp_path):
    """Four arms, two seeds; nvfp4_naive falls from 0.45 to 0.20, its seed 1 stopped at step 8; quads was decomposed."""
    experiment = made_up_experiment(seeds=(0, 1))
    for arm in made_up_arms():
        for seed in experiment.seeds:
            train, _ = write_run(tmp_path, experiment, arm, seed)
            if arm.name == "nvfp4_naive" and seed == 1:
                cut(train, 8)
            if arm.name == "quads":
                decomposed(train, seed)
    return tmp_path, experiment, made_up_arms()


def edit(train, **values):
    path = train / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def cut(train, step):
    lines = (train / "history.jsonl").read_text().splitlines()[: step + 1]
    (train / "history.jsonl").write_text("\n".join(lines) + "\n")
    edit(train, steps=step, planned_steps=12, stopped=f"collapsed at step {step}")


def decomposed(train, seed):
    rows = [{"step": s, **{c: 0.1 * s + seed for c in COLUMNS}} for s in (1, 6, 12)]
    (train / "decomposition.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    edit(train, decomposition="decomposition.jsonl")


def test_a_seed_that_falls_is_named_where_the_detector_passes_it(tmp_path):
    experiment, arms = made_up_experiment(seeds=(0, 1)), made_up_arms()[:1]
    write_run(tmp_path, experiment, arms[0], 0)
    write_run(tmp_path, experiment, arms[0], 1, numbers=(0.55, 0.25, 0.001))
    sources, blind = load_sources(tmp_path, experiment, arms), Collapse(drop=0.05, recover=0.1)
    (row,) = build_rows(sources, experiment.evaluation, blind)
    assert row.training == "healthy; seed 1 ends below its start"
    (row,) = build_rows(sources, experiment.evaluation, SENSITIVE)
    assert "ends below" not in row.training and "seed 1: collapsed" in row.training


def test_nothing_is_said_of_runs_of_a_few_steps(results):
    """Two of twelve steps, where three are the fewest: no arm is healthy, no claim about collapse is judged."""
    root, experiment, arms = results
    diagnostics = experiment.diagnostics.model_copy(update={"collapse": SENSITIVE})
    experiment = experiment.model_copy(update={"diagnostics": diagnostics})
    whole = load_sources(root, experiment, arms)
    short = [replace(s, steps=s.steps[:2]) for s in whole]
    rows = build_rows(short, experiment.evaluation, SENSITIVE)
    said = {row.arm.name: row.training.partition(";")[0] for row in rows}
    assert {said[name] for name in ("bf16", "qat_only", "quads")} == {"too few steps to judge"}
    assert few_steps(rows, SENSITIVE).startswith("These runs trained 2 steps")
    one = [short[0], *whole[1:]]
    assert few_steps(build_rows(one, experiment.evaluation, SENSITIVE), SENSITIVE) == ""
    x = report.read_inputs(experiment, short, root, diagnose=root / "none", throughput=root / "none")
    report.build(x, root / "out")
    for name in ("table.md", "index.html"):
        assert "These runs trained 2 steps" in (root / "out" / name).read_text()
    words = {j.claim.text: j.verdict for j in judge_claims(short, experiment) if j.claim.measure == "collapsed"}
    holds = words["QUADS does not collapse"]
    assert str(holds).startswith("inconclusive: 0 of 2 seeds collapsed, after 2 steps; the detector needs 3")


def test_verdict_and_steps_are_in_the_table(results):
    sources = load_sources(*results)
    rows = {r.arm.name: r for r in build_rows(sources, results[1].evaluation, SENSITIVE)}
    assert rows["bf16"].training == "healthy" and rows["bf16"].steps == (12, 12)
    # 0.45 - 0.25 t / 12 is below 0.8 x its highest median of two steps (0.419) from step 6 on
    assert rows["nvfp4_naive"].training == "seed 0: collapsed at step 7; seed 1: collapsed at step 7, stopped"
    assert rows["nvfp4_naive"].steps == (12, 8)
    assert record(rows["nvfp4_naive"])["training"] == rows["nvfp4_naive"].training
    header, body = main_grid(list(rows.values()))
    assert [line[header.index("training")] for line in body][:2] == ["healthy", rows["nvfp4_naive"].training]


def test_seeds_that_collapse_at_different_steps_share_one_phrase(results):
    sources = [s for s in load_sources(*results) if s.arm.name == "nvfp4_naive"]
    first = sources[0]
    later = [{**s, "step": i} for i, s in enumerate([first.steps[0]] * 3 + list(first.steps), 1)]
    both = [first, replace(first, steps=tuple(later))]
    assert build_rows(both, results[1].evaluation, SENSITIVE)[0].training == "collapsed at steps 7, 10"


def test_decomposition_becomes_a_figure_and_a_csv(results):
    root, experiment, _ = results
    sources = load_sources(*results)
    figure = gap_parts_figure(sources, "made up")
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(TERMS)
    thick = [line for line in figure.axes[0].lines if line.get_label() == "quads"]
    assert thick[0].get_ydata() == pytest.approx([0.1 + 0.5, 0.6 + 0.5, 1.2 + 0.5])  # mean of seeds 0 and 1
    assert len(parts_records(sources)) == 6
    inputs = report.read_inputs(experiment, sources, root, diagnose=root / "none", throughput=root / "none")
    made = Report(inputs)
    rows = list(csv.DictReader(io.StringIO(made.texts()["gap_parts.csv"])))
    assert [r["step"] for r in rows] == ["1", "6", "12"] * 2 and rows[0]["run_id"].startswith("quads-seed0")
    assert any(plot.place == "gap_parts" for plot in made.plots())


def test_no_decomposition_no_figure_and_a_missing_file_is_named(results):
    root, experiment, arms = results
    assert gap_parts_figure([s for s in load_sources(*results) if s.arm.name == "bf16"], "t") is None
    next(root.glob("made_up/train/quads-seed0-*/decomposition.jsonl")).unlink()
    with pytest.raises(ResultFileError, match=r"decomposition\.jsonl: missing"):
        load_sources(root, experiment, arms)
