"""The DAG: every experiment plans what its YAML says, the same under Slurm, and bad YAML stops it in one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from workflow_box import Box

from quads.config import Experiment, load_experiments
from quads.data.benchmarks import names

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = load_experiments(ROOT / "configs")
# Each is a decision, with its reason.
ACCEPTED_LINTS = {
    # One environment for every rule, made before Snakemake starts (envs/install.sh).
    "Specify a conda environment or container for each rule.",
}


def expected_jobs(experiment: Experiment, arms: int) -> dict[str, int]:
    """Jobs of a whole experiment, from its YAML alone."""
    runs, sets = arms * len(experiment.seeds), len(experiment.data.sets)
    jobs = {"prepare": 1, "make_benchmarks": 1, "warmup": 1, "report_arms": 1, "evaluate": runs}
    jobs["train" if experiment.runtime.nodes == 1 else "train_nodes"] = runs
    if experiment.tracking.enabled:
        jobs |= {"track_init": 1, "track_run": runs}
    if sets:
        # every training set is compared with every test set
        jobs |= {"decontaminate": sets, "fetch_set": sets + len(names("test"))}
    return jobs


@pytest.mark.parametrize("more", [False, True], ids=["arms", "all"])
@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_plan_of_every_experiment(box: Box, name: str, more: bool) -> None:
    experiment = EXPERIMENTS[name]
    arms = experiment.arms + (experiment.more_arms if more else ())
    assert box.count(f"{name}_all" if more else name) == expected_jobs(experiment, len(arms))


def test_a_dry_run_of_the_paper_prints_gpu_hours(box: Box) -> None:
    said = box.run("-n", "--profile", "slurm", "paper").stderr
    assert "Estimate for paper: 32 GPUs a training job (4 nodes x 8)" in said and "Rates: measured on H200" in said


def test_plain_snakemake_is_toy(box: Box) -> None:
    assert box.plan() == box.plan("toy")


@pytest.mark.parametrize("target", ["toy", "smoke_all"])
def test_slurm_plans_the_same(box: Box, target: str) -> None:
    assert box.plan("--profile", "slurm", target) == box.plan(target)


def test_slurm_asks_for_what_the_config_says(box: Box) -> None:
    """The default profile wins over --profile: its limits must not cap what Slurm is asked for."""
    four = {"device": "cuda", "gpus_per_node": 4, "agent_loop": "verl"}
    box.edit("smoke.yaml", runtime={**four, "threads": 16, "memory_gib": 64})
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
        ("smoke.yaml", {"runtime": {"nodes": 2}}, "runtime.agent_loop=inline serves one engine replica"),
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
