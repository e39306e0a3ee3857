"""Runs side by side: finding them, what differs, the numbers, and when a test is refused."""

import json
import shutil

import numpy as np
import pytest
from made_up_results import STEPS, made_up_arms, made_up_experiment, write_run

from quads import compare as stage
from quads.comparison.differences import UNKNOWN, differing, provenance, settings
from quads.comparison.page import build, render
from quads.comparison.runs import find_runs, load_run
from quads.comparison.tests import HELD_OUT, LAST, paired_tests, tail
from quads.config import ConfigError, Grpo
from quads.evaluation.compare import holm

BF16, NAIVE, QUADS = 0, 1, 3


@pytest.fixture
def results(tmp_path):
    experiment = made_up_experiment()
    for index in (BF16, NAIVE, QUADS):
        write_run(tmp_path, experiment, made_up_arms()[index], 0)
    return tmp_path


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def evaluation(run):
    (path,) = run.folder.parent.parent.glob(f"eval/{run.name}-*/result.json")
    return path


def test_a_run_is_found_by_id_prefix_experiment_and_folder(results):
    (folder,) = results.glob("made_up/train/quads-*")
    for name in (folder.name, "quads", "made_up/quads", f"made_up/{folder.name}", str(folder)):
        first, second = find_runs([name, "bf16"], results)
        assert (first.name, second.result["run"]["arm"]["name"]) == (folder.name, "bf16")
    assert first.label == f"made_up/{folder.name}" and len(first.steps) == STEPS and first.marker is None


def test_names_that_fit_no_run_or_several(results):
    with pytest.raises(ConfigError, match=r"unknown run 'qads'.*known under .*made_up/bf16-.*made_up/quads-"):
        find_runs(["qads", "bf16"], results)
    write_run(results, made_up_experiment(seeds=(0, 1)), made_up_arms()[QUADS], 1)
    with pytest.raises(ConfigError, match=r"run 'quads' is ambiguous: made_up/quads-seed0-\w+, made_up/quads-seed1-"):
        find_runs(["quads", "bf16"], results)
    with pytest.raises(ConfigError, match="two runs or more, got 1"):
        find_runs(["bf16"], results)
    with pytest.raises(ConfigError, match="named twice: bf16-seed0-"):
        find_runs(["bf16", "bf16-seed0"], results)
    with pytest.raises(ConfigError, match=r"no finished run under .*nowhere"):
        find_runs(["a", "b"], results / "nowhere")


def test_a_misspelt_id_gets_a_hint(results):
    (folder,) = results.glob("made_up/train/quads-*")
    with pytest.raises(ConfigError, match=f"did you mean '(made_up/)?{folder.name}'"):
        find_runs([folder.name.replace("quads", "quad"), "bf16"], results)


def test_only_what_differs_is_shown(results):
    runs = find_runs(["bf16", "quads"], results)
    found = settings(runs)
    assert found["arm.rollout.weight"] == ["bf16", "nvfp4"] and found["arm.rollout.rac.k"] == [UNKNOWN, "0.5"]
    assert not any(key.startswith(("grpo.", "data.", "model.", "seed")) for key in found)
    assert differing([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}]) == {"b": ["2", "3"]}
    assert provenance(runs) == {}
    edit(
        runs[1].folder / "result.json",
        lambda r: r.update(commit="1" * 40, versions={"torch": "2"}, hardware={"gpus": []}),
    )
    found = provenance(find_runs(["bf16", "quads"], results))
    assert found == {
        "commit": ["0" * 40, "1" * 40],
        "versions.torch": [UNKNOWN, "2"],
        "hardware.gpus": [UNKNOWN, "[]"],
    }


def test_the_end_of_a_curve(results):
    (run, _) = find_runs(["quads", "bf16"], results)
    values = np.array([s["gap_mean"] for s in run.steps[-LAST:]])
    found = tail(run, "gap_mean")
    assert (found.mean, found.sd) == pytest.approx((values.mean(), values.std(ddof=1)))
    assert (found.low, found.high, found.steps) == (values.min(), values.max(), LAST)
    assert found.of == LAST
    assert tail(run, "no such curve") is None and tail(run, "gap_mean", last=1).sd is None


def history(run, change):
    """Rewrite the history: change(row) -> row."""
    path = run.folder / "history.jsonl"
    rows = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if row is not None))


def test_steps_without_a_number_are_counted(results):
    """A run that diverged: null gaps in its last seven steps, no gradient norm at all."""
    a, b = find_runs(["bf16", "quads"], results)
    history(b, lambda r: r | {"grad_norm": None} | ({"gap_mean": None} if r["step"] > STEPS - 7 else {}))
    record = build([a, load_run(b.folder)])
    _, gap = record["curves"]["gap_mean"]
    values = [s["gap_mean"] for s in b.steps[-LAST:-7]]
    assert (gap["steps"], gap["of"], gap["mean"]) == (3, 10, pytest.approx(np.mean(values)))
    row = {line.split("|")[1].strip(): line for line in render(record).splitlines() if line.startswith("| `")}
    assert "(3 of 10 finite)" in row["`gap_mean`"].split("|")[3] and "finite" not in row["`gap_mean`"].split("|")[2]
    assert row["`grad_norm`"].split("|")[3].strip() == "- (0 of 10 finite)"


def test_the_title_says_how_many_steps_there_are(results):
    a, b = find_runs(["bf16", "quads"], results)
    history(b, lambda r: r if r["step"] <= 3 else None)
    assert "## Last steps (A 10, B 3): mean" in render(build([a, load_run(b.folder)]))
    history(a, lambda r: r if r["step"] <= 3 else None)
    assert "## Last 3 steps: mean" in render(build([load_run(a.folder), load_run(b.folder)]))


def test_problems_without_a_hash_are_not_verified(results):
    runs = find_runs(["bf16", "quads"], results)
    hashes = {"chain": "h", "chain_depth2": "d", "chain_code": "c"}
    for run in runs:
        edit(evaluation(run), lambda e: e.update(questions=hashes))
    record = build([load_run(r.folder) for r in runs])
    assert all(t["problems_verified"] for t in record["tests"]) and "erified" not in render(record)
    edit(evaluation(runs[1]), lambda e: e.update(questions={"chain": "h"}))
    record = build([load_run(r.folder) for r in runs])
    assert {t["benchmark"] for t in record["tests"] if not t["problems_verified"]} == {"chain_depth2", "chain_code"}
    assert "| chain_code | 100 (not verified) |" in render(record) and "Not verified: " in render(record)


def test_two_folders_with_one_name_are_told_apart(results, tmp_path):
    """The same run trained in two places; each with its own MLflow run."""
    other = tmp_path / "elsewhere" / "made_up"
    shutil.copytree(results / "made_up", other)
    (first,) = results.glob("made_up/train/quads-*")
    second = other / "train" / first.name
    for index, home in enumerate((results / "made_up", other)):
        marker = {"uri": "sqlite:///x", "experiment_id": "7", "mlflow_run_id": str(index) * 32}
        path = home / "mlflow" / f"{first.name}-abc.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(marker))
    record = build(find_runs([str(first), str(second), "bf16"], results))
    names = [f"made_up/{first.name} (A)", f"made_up/{first.name} (B)"]
    assert [r["run"] for r in record["runs"]][:2] == names
    page = render(record)
    assert "| B - A |" in page and "| C - A |" in page and "| B - B |" not in page
    assert f"| A | `{'0' * 32}` |" in page and f"| B | `{'1' * 32}` |" in page and "| C | not imported |" in page


@pytest.mark.parametrize(
    ("run", "lacks"),
    [({}, "run.arm.name, run.seed"), ({"arm": {"name": "quads"}}, "run.seed"), (None, "run.arm.name, run.seed")],
)
def test_a_result_that_does_not_say_what_was_trained(results, caplog, run, lacks):
    (folder,) = results.glob("made_up/train/quads-*")
    edit(folder / "result.json", lambda r: r.update(run=run))
    assert stage.main(["bf16", "quads", "--results", str(results)]) == 1
    assert f"lacks {lacks}, so" in caplog.text and "Rebuild it with" in caplog.text


def test_paired_tests_against_an_enumeration(results):
    """A made-up pair whose differences can be enumerated: 4 problems up, 1 down, the rest equal."""
    a, b = find_runs(["bf16", "quads"], results)
    up, down = [0, 1, 2, 3], [4]

    def change(content):
        for entry in (content["engines"]["own"], *content["engines"]["own"]["benchmarks"].values()):
            ours = list(a.evaluations[next(iter(a.evaluations))]["engines"]["own"]["per_problem"])
            for i in up:
                ours[i] = 1.0
            for i in down:
                ours[i] = 0.0
            entry["per_problem"] = ours

    def lower(content):
        for entry in (content["engines"]["own"], *content["engines"]["own"]["benchmarks"].values()):
            for i in up:
                entry["per_problem"][i] = 0.0

    edit(evaluation(a), lower)
    a = load_run(a.folder)
    edit(evaluation(b), change)
    tests, reasons = paired_tests([a, load_run(b.folder)])
    assert reasons == []
    own = {t["benchmark"]: t for t in tests if t["engine"] == "own"}
    assert set(own) == {HELD_OUT, "chain_depth2", "chain_code"}
    found = own["chain_depth2"]
    assert found["difference"] == pytest.approx(3 / 100) and found["exact"]
    # |sum of five signs| >= 3: both extremes, and one sign of five against the others
    assert found["p"] == pytest.approx((2 + 2 * 5) / 32)
    assert found["low"] < found["difference"] < found["high"]
    adjusted = holm({str(i): t["p"] for i, t in enumerate(tests)})
    assert [t["p_holm"] for t in tests] == list(adjusted.values())


def test_equal_results_are_not_different(results):
    runs = find_runs(["bf16", "quads", "nvfp4_naive"], results)
    same = [t for t in paired_tests([runs[0], runs[0]])[0]]
    assert {(t["difference"], t["p"]) for t in same} == {(0.0, 1.0)}


def test_a_run_without_evaluation_says_what_to_run(results):
    runs = find_runs(["bf16", "quads"], results)
    evaluation(runs[1]).unlink()
    tests, reasons = paired_tests(find_runs(["bf16", "quads"], results))
    assert tests == []
    assert len(reasons) == 1 and reasons[0].startswith(f"{runs[1].label} has no evaluation: `snakemake made_up`")
    assert "--arm quads --seed 0" in reasons[0]


def test_other_problems_are_refused_with_the_reason(results):
    runs = find_runs(["bf16", "quads"], results)
    for run, digest in zip(runs, ("aa", "bb"), strict=True):
        edit(
            evaluation(run),
            lambda e, d=digest: e.update(questions={"chain": "same", "chain_depth2": d, "chain_code": "same"}),
        )
    tests, reasons = paired_tests([load_run(r.folder) for r in runs])
    assert {t["benchmark"] for t in tests} == {HELD_OUT, "chain_code"}
    assert len(reasons) == 2 and all("chain_depth2: the problems are not the same" in r for r in reasons)


def test_another_number_of_problems_is_refused(results):
    runs = find_runs(["bf16", "quads"], results)

    def shorten(content):
        for key in ("per_problem", "graded_per_problem"):
            content["engines"]["own"]["benchmarks"]["chain_code"][key].pop()

    edit(evaluation(runs[1]), shorten)
    _, reasons = paired_tests([load_run(r.folder) for r in runs])
    assert len(reasons) == 1 and "engine own, chain_code: 100 and 99 problems" in reasons[0]


def test_evaluations_with_other_settings_are_not_mixed(results):
    runs = find_runs(["bf16", "quads"], results)
    folder = evaluation(runs[1]).parent
    folder.rename(folder.with_name(f"{runs[1].name}-0123456789"))
    tests, reasons = paired_tests([load_run(r.folder) for r in runs])
    assert tests == [] and len(reasons) == 1 and "no evaluation with the same settings" in reasons[0]


def test_experiments_may_differ(tmp_path):
    experiment = made_up_experiment()
    write_run(tmp_path, experiment, made_up_arms()[QUADS], 0)
    longer = experiment.model_copy(update={"name": "other", "grpo": Grpo(steps=STEPS, lr=1e-3)})
    write_run(tmp_path, longer, made_up_arms()[QUADS], 0)
    record = build(find_runs(["made_up/quads", "other/quads"], tmp_path))
    assert record["settings"] == {"grpo.lr": ["0.0005", "0.001"]}


def test_mlflow_is_linked_where_it_is_known(results):
    runs = find_runs(["bf16", "quads"], results)
    for index, run in enumerate(runs):
        marker = {"tracking": True, "uri": "sqlite:///x", "experiment_id": "7", "mlflow_run_id": str(index) * 32}
        path = results / "made_up" / "mlflow" / f"{run.name}-abc.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(marker | {"model": "quads-made_up-x", "version": 3}))
    record = build(find_runs(["bf16", "quads"], results))
    assert record["mlflow"]["compare"] == f'/#/compare-runs?runs=["{"0" * 32}","{"1" * 32}"]&experiments=["7"]'
    page = render(record)
    assert "quads-made_up-x, version 3" in page and "make ui" in page


def test_the_verdict_of_the_result_wins_and_is_computed_where_there_is_none(results):
    runs = find_runs(["bf16", "quads"], results)
    verdict = {"verdict": "collapsed", "alarm_step": 9, "gap_alarm_step": None, "alarms": [], "settings": {}}
    edit(runs[1].folder / "result.json", lambda r: r.update(collapse=verdict, stopped="collapsed at step 9"))
    record = build(find_runs(["bf16", "quads"], results))
    assert [r["collapse"]["verdict"] for r in record["runs"]] == ["healthy", "collapsed"]
    page = render(record)
    assert "collapsed (alarm at step 9)" in page and "(collapsed at step 9)" in page


def test_the_stage_writes_page_record_and_figure(results, tmp_path, capsys):
    out = tmp_path / "out"
    assert stage.main(["bf16", "quads", "nvfp4_naive", "--results", str(results), "--out", str(out)]) == 0
    page = capsys.readouterr().out
    assert page.startswith("# made_up/bf16-") and "![" not in page
    for section in ("Settings that differ", "Last 10 steps", "Weights and collapse", "Paired tests", "MLflow"):
        assert f"## {section}" in page
    assert {p.name for p in out.iterdir()} == {"compare.json", "compare.md", "compare.svg", "compare.png"}
    record = json.loads((out / "compare.json").read_text())
    assert len(record["runs"]) == 3 and len(record["tests"]) == 2 * 2 * 3
    assert "compare.svg" in (out / "compare.md").read_text()
    assert (out / "compare.svg").read_text().count("<path") > 30


def test_the_stage_explains_an_unknown_run(results, caplog):
    assert stage.main(["bf16", "nobody", "--results", str(results)]) == 1
    assert "unknown run 'nobody'" in caplog.text
