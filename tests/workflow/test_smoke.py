"""The shortest real run, end to end: verl trains two arms with vLLM rollouts, vLLM evaluates, MLflow has the runs.

Runs in a folder of its own, so that results in the checkout cannot make it "nothing to be done".
"""

from __future__ import annotations

import csv
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quads.config import load_experiment
from quads.files import read_jsonl, read_result

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The results folder of `snakemake smoke` with the real stages."""
    folder = tmp_path_factory.mktemp("smoke")
    for name in ("Snakefile", "workflow", "profiles", "configs"):
        (folder / name).symlink_to(ROOT / name)
    begin = time.monotonic()
    with open(folder / "out.txt", "w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "snakemake", "smoke"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
        )
    text = (folder / "out.txt").read_text()
    assert done.returncode == 0, f"after {time.monotonic() - begin:.0f} s:\n{text[-6000:]}"
    sys.stderr.write(f"smoke took {time.monotonic() - begin:.0f} s\n")
    yield folder / "results"
    shutil.rmtree(folder / "results", ignore_errors=True)


@pytest.mark.slow
@pytest.mark.stack
def test_every_arm_trained_all_steps(smoke: Path) -> None:
    experiment = load_experiment("smoke", ROOT / "configs")
    results = [read_result(p, "training result") for p in sorted(smoke.glob("smoke/train/*/result.json"))]
    assert [r["run"]["arm"]["name"] for r in results] == sorted(experiment.arms)
    for path in smoke.glob("smoke/train/*/history.jsonl"):
        steps = [row["step"] for row in read_jsonl(path) if row["step"] > 0]
        assert steps == list(range(1, experiment.grpo.steps + 1))


@pytest.mark.slow
@pytest.mark.stack
def test_trainer_and_engine_hold_the_same_weights(smoke: Path) -> None:
    for path in smoke.glob("smoke/train/*/result.json"):
        delta = read_result(path, "training result", ["delta_weight"])["delta_weight"]
        assert delta["elements"] > 0 and delta["different"] == 0 and delta["max_abs"] == 0


@pytest.mark.slow
@pytest.mark.stack
def test_table_has_every_arm_with_intervals(smoke: Path) -> None:
    with open(smoke / "smoke/report/table.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    for path in smoke.glob("smoke/eval/*/result.json"):
        for engine in read_result(path, "evaluation result", ["engines"])["engines"].values():
            assert 0 <= engine["ci_low"] <= engine["pass_at_1"] <= engine["ci_high"] <= 1
    for figure in ("reward.svg", "gap.svg", "reward.png", "gap.png"):
        assert (smoke / "smoke/report" / figure).stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.stack
def test_mlflow_has_the_runs(smoke: Path) -> None:
    with sqlite3.connect(smoke / "mlflow.db") as store:
        arms = {row[0] for row in store.execute("select value from tags where key = 'quads.arm'")}
    assert {"bf16", "quads"} <= arms


@pytest.mark.slow
@pytest.mark.stack
def test_again_has_nothing_to_do(smoke: Path) -> None:
    again = subprocess.run(
        [sys.executable, "-m", "snakemake", "-n", "smoke"],
        cwd=smoke.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0 and "Nothing to be done" in again.stdout + again.stderr, again.stdout
