"""What runs again after a change, and what never does. Every box here has finished `smoke` with real metadata."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from workflow_box import Box

from quads.files import ResultFileError, read_result, rebuild_command

NEW_RUN = {"train": 1, "evaluate": 1, "track_run": 1, "report_arms": 1}


def change_text(box: Box, file: str, old: str, new: str) -> None:
    path = box.folder / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_finished_has_nothing_to_do(finished: Box) -> None:
    assert finished.count("smoke") == {}


def test_run_shows_the_table_and_logs(finished: Box) -> None:
    assert (finished.folder / "results/smoke/report/table.md").is_file()
    logs = sorted(p.name for p in (finished.folder / "results/logs/smoke/train").iterdir())
    assert len(logs) == 2 and all(log.endswith(".log") for log in logs)
    benchmarks = list((finished.folder / "results/benchmarks/smoke").rglob("*.tsv"))
    assert len(benchmarks) == 2 + 2 + 2 + 1


def test_new_arm_runs_alone(finished: Box) -> None:
    finished.edit("smoke.yaml", arms=["bf16", "quads", "qat_only"])
    assert finished.count("smoke") == NEW_RUN
    assert all("qat_only" in output for rule, output in finished.plan("smoke") if rule != "report_arms")


def test_new_seed_runs_alone(finished: Box) -> None:
    finished.edit("smoke.yaml", seeds=[0, 1])
    assert finished.count("smoke") == {"train": 2, "evaluate": 2, "track_run": 2, "report_arms": 1}
    assert all("seed1" in output for rule, output in finished.plan("smoke") if rule != "report_arms")


def test_new_experiment_with_the_same_data_and_model(finished: Box) -> None:
    """Sorts before smoke, so that shared data and models are now described by another file."""
    text = (finished.folder / "configs/smoke.yaml").read_text()
    (finished.folder / "configs/alpha.yaml").write_text(text.replace("name: smoke", "name: alpha"))
    assert finished.count("smoke") == {}
    assert "prepare" not in finished.count("alpha") and "warmup" not in finished.count("alpha")


def test_changed_arm_retrains_alone(finished: Box) -> None:
    finished.edit("arms/quads.yaml", rollout={"weight": "nvfp4", "activation": "nvfp4", "rac": {"k": 0.25}})
    assert finished.count("smoke") == NEW_RUN


def test_evaluation_setting_evaluates_only(finished: Box) -> None:
    finished.edit("smoke.yaml", evaluation={"samples_per_problem": 3})
    assert finished.count("smoke") == {"evaluate": 2, "track_run": 2, "report_arms": 1}


def test_benchmark_setting_makes_them_and_evaluates_only(finished: Box) -> None:
    finished.edit("smoke.yaml", evaluation={"benchmarks": {"problems": 5}})
    assert finished.count("smoke") == {"make_benchmarks": 1, "evaluate": 2, "track_run": 2, "report_arms": 1}


def test_benchmark_code_edit_retrains_nothing(finished: Box) -> None:
    path = finished.folder / "quads/data/toy_benchmarks.py"
    path.write_text(path.read_text() + "\nNEW = 1\n")
    assert {"train", "prepare", "warmup"}.isdisjoint(finished.count("smoke"))


def test_comment_in_yaml_reruns_nothing(finished: Box) -> None:
    for file in ("configs/smoke.yaml", "configs/arms/quads.yaml"):
        path = finished.folder / file
        path.write_text("# a remark\n" + path.read_text() + "\n# another\n")
    assert finished.count("smoke") == {}


def test_cosmetic_code_edit_reruns_nothing(finished: Box) -> None:
    for file in ("quads/numerics/rac.py", "quads/train.py", "quads/layers/surgery.py"):
        path = finished.folder / file
        path.write_text("# a remark\n\n" + path.read_text().replace('"""', '"""Reworded. ', 1) + "\n\n# the end\n")
    change_text(finished, "workflow/rules/train.smk", "quads.train --experiment", "quads.train  --experiment")
    assert finished.count("smoke") == {}


def test_code_outside_training_reruns_nothing(finished: Box) -> None:
    for file in ("quads/lifeline.py", "quads/files.py"):
        path = finished.folder / file
        path.write_text(path.read_text() + "\nNEW = 1\n")
    assert finished.count("smoke") == {}


def test_numerics_edit_retrains_and_evaluates(finished: Box) -> None:
    path = finished.folder / "quads/numerics/rac.py"
    path.write_text(path.read_text() + "\nNEW = 1\n")
    assert finished.count("smoke") == {"train": 2, "evaluate": 2, "track_run": 2, "report_arms": 1}


def test_paper_edit_only_reports(finished: Box) -> None:
    path = finished.folder / "quads/paper/__init__.py"
    path.write_text(path.read_text() + "\nNEW = 1\n")
    assert finished.count("smoke") == {"report_arms": 1}


def test_rebuild_command_of_an_error_message(finished: Box) -> None:
    """The command in ResultFileError rebuilds that file and nothing else; what depends on it follows."""
    result = next((finished.folder / "results/smoke/train").glob("quads-*")) / "result.json"
    path = result.relative_to(finished.folder)
    result.write_text('{"cut o')
    with pytest.raises(ResultFileError) as caught:
        read_result(result, "training result")
    words = rebuild_command(path).split()
    assert words[0] == "snakemake" and "not valid JSON" in str(caught.value)
    assert finished.plan(*words[1:]) == {("train", str(path)): 1}
    finished.run(*words[1:])
    assert read_result(result, "training result", ["arm"])["arm"] == "quads"


def test_failed_training_keeps_checkpoints_and_finished_arms(box: Box) -> None:
    (box.folder / "fail-quads").touch()
    done = box.run("smoke", check=False)
    assert done.returncode == 1
    assert "stopped half-way" in done.stdout + done.stderr, "the failed job's log must be shown"
    (checkpoints,) = (box.folder / "results/smoke/checkpoints").glob("quads-*")
    assert (checkpoints / "attempts.jsonl").is_file()
    assert not list((box.folder / "results/smoke/train").glob("quads-*/result.json"))

    (box.folder / "fail-quads").unlink()
    before = box.executed()
    box.run("smoke")
    repeated = box.executed()[len(before) :]
    assert [c for c in repeated if c.startswith("train")] == (
        ["train quads 0"] if "train bf16 0" in before else ["train bf16 0", "train quads 0"]
    )
    assert len((checkpoints / "attempts.jsonl").read_text().splitlines()) == 2
    # Snakemake deletes a declared log before each attempt; what lies beside the declared output stays.
    (history,) = (box.folder / "results/smoke/train").glob("quads-*/history.jsonl")
    assert history.read_text() == "half\n"


def test_two_trainings_fit_one_machine(finished: Box) -> None:
    """5 GiB each of 10: two at a time; 6 GiB each: one at a time. Read from the limits, as the scheduler does."""
    profile = yaml.safe_load((finished.folder / "profiles/default/profile.yaml").read_text())
    limits = dict(word.split("=") for word in profile["resources"])
    plan = finished.run("-n", "--forcerun", "train", "--", "smoke").stdout
    asked = {int(word.split("=")[1]) for word in plan.replace(",", " ").split() if word.startswith("job_gib=")}
    assert asked and max(asked) * 2 <= int(limits["job_gib"])
    assert int(profile["cores"]) >= 2
    assert Path(finished.folder / "slurm").resolve().name == "slurm"


BENCH = """
import sys
from pathlib import Path
out = Path(sys.argv[sys.argv.index("--out") + 1])
for suffix in (".md", ".details.jsonl", ".json"):
    out.with_suffix(suffix).write_text("{}")
Path("calls.txt").open("a").write(" ".join(sys.argv[1:]) + chr(10))
"""


def test_the_throughput_is_of_the_experiments_backend_and_measured_again_for_another(finished: Box) -> None:
    (finished.folder / "quads/bench/rollout.py").write_text(BENCH)
    runtime = {"device": "cuda", "rollout_backend": "triton"}
    finished.edit("smoke.yaml", runtime=runtime)
    finished.run("bench_smoke")
    call = finished.executed()[-1]
    # The stage takes what the experiment says; a word here would come before it.
    assert "--experiment configs/smoke.yaml" in call and "--backend" not in call and "--graphs" not in call
    finished.edit("smoke.yaml", runtime=runtime | {"memory_gib": 2})
    assert finished.count("bench_smoke") == {}
    for other in ({"rollout_backend": "native"}, {"rollout_graphs": True}):
        finished.edit("smoke.yaml", runtime=runtime | other)
        assert finished.count("bench_smoke") == {"bench_rollout": 1}
