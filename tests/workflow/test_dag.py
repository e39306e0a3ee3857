"""The DAG: every experiment plans what its YAML says, the same under Slurm, and bad YAML stops it in one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from workflow_box import Box

from quads.config import load_experiments

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = load_experiments(ROOT / "configs")
# Each is a decision, with its reason.
ACCEPTED_LINTS = {
    # One environment for every rule, made before Snakemake starts (envs/install.sh).
    "Specify a conda environment or container for each rule.",
}


def expected_jobs(arms: int, seeds: int) -> dict[str, int]:
    runs = arms * seeds
    once = {"prepare": 1, "make_benchmarks": 1, "warmup": 1, "track_init": 1, "report_arms": 1}
    return {**once, "train": runs, "evaluate": runs, "track_run": runs}


@pytest.mark.parametrize("more", [False, True], ids=["arms", "all"])
@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_plan_of_every_experiment(box: Box, name: str, more: bool) -> None:
    experiment = EXPERIMENTS[name]
    arms = experiment.arms + (experiment.more_arms if more else ())
    assert box.count(f"{name}_all" if more else name) == expected_jobs(len(arms), len(experiment.seeds))


def test_plain_snakemake_is_toy(box: Box) -> None:
    assert box.plan() == box.plan("toy")


@pytest.mark.parametrize("target", ["toy", "smoke_all"])
def test_slurm_plans_the_same(box: Box, target: str) -> None:
    assert box.plan("--profile", "slurm", target) == box.plan(target)


def test_slurm_asks_for_what_the_config_says(box: Box) -> None:
    """The default profile wins over --profile: its limits must not cap what Slurm is asked for."""
    box.edit("smoke.yaml", runtime={"device": "cuda", "gpus_per_node": 4, "threads": 16, "memory_gib": 64})
    plan = box.run("-n", "--profile", "slurm", "smoke")
    (resources, *_) = [
        line for line in (plan.stdout + plan.stderr).splitlines() if "resources:" in line and "cpus_per_task" in line
    ]
    for part in ("mem_mb=65536", "cpus_per_task=16", "gpu=4"):
        assert part in resources


def test_tracking_off_leaves_out_mlflow(box: Box) -> None:
    box.edit("smoke.yaml", tracking={"enabled": False})
    assert {"track_init", "track_run"}.isdisjoint(box.count("smoke"))


@pytest.mark.parametrize(
    ("file", "change", "expected"),
    [
        ("smoke.yaml", {"stepz": 1}, "configs/smoke.yaml: 1 problem(s)\n  stepz: unknown key 'stepz'; known: arms,"),
        ("smoke.yaml", {"arms": ["quadz"]}, "unknown arm 'quadz'; known: bf16, fp8,"),
        ("arms/quads.yaml", {"rollout": {"weight": "int4"}}, "rollout.weight: Input should be 'bf16', 'fp8' or"),
        ("smoke.yaml", {"runtime": {"nodes": 2}}, "runtime.nodes=2: the rules run one node"),
    ],
    ids=["key", "arm", "mode", "nodes"],
)
def test_bad_config_is_one_message(box: Box, file: str, change: dict[str, object], expected: str) -> None:
    box.edit(file, **change)
    done = box.run("-n", check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert expected in said
    assert "Traceback" not in said and "common.smk" not in said


def test_unknown_target_names_it(box: Box) -> None:
    done = box.run("-n", "results/toy/train/quads-seed0-0000000000/result.json", check=False)
    assert done.returncode == 1 and "quads-seed0-0000000000" in done.stdout + done.stderr


def test_lint(box: Box) -> None:
    done = box.run("--lint", check=False)
    said = done.stdout + done.stderr
    assert "Lints for rule train" in said, said
    titles = set(re.findall(r"^    \* (.+):$", said, re.MULTILINE))
    assert titles == ACCEPTED_LINTS, titles ^ ACCEPTED_LINTS


def test_profiles_default_holds_nothing_that_breaks_slurm() -> None:
    keys = set(yaml.safe_load((ROOT / "profiles/default/profile.yaml").read_text()))
    assert keys.isdisjoint({"executor", "jobs", "default-resources", "set-resources", "retries", "keep-going"})
