"""A real run (verl trains, vLLM generates) that is made to collapse, decomposed on the way, stopped, and evaluated.

The learning rate is a hundred times the toy's: the reward is gone after a step or two, and a detector without median
and patience sees it at the first step it may judge (the fifth).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quads.config import load_arm, load_experiment, resolve_run
from quads.diagnostics.collapse import judge
from quads.diagnostics.during_layers import TOKENS
from quads.files import read_jsonl, read_result
from quads.integrations.verl.checkpoints import is_complete

pytestmark = [pytest.mark.stack, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = """
name: tiny
title: A run that collapses
arms: [quads]
data: {train_prompts: 96, eval_prompts: 16, calibration_prompts: 16}
warmup: {clean_steps: 60, noisy_steps: 2}
grpo: {steps: 8, save_every: 3, lr: 0.05, stop_on_collapse: true}
evaluation: {samples_per_problem: 2, bootstrap: 100, benchmarks: {names: []}}
diagnostics:
  training_every: 2
  collapse: {window: 1, baseline: 1, patience: 1, noise: 0.0, drop: 0.9, recover: 0.95}
"""


def stage(folder: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def train(folder: Path) -> str:
    places = ("--data", "data", "--model", "model", "--checkpoints", "checkpoints", "--out", "out")
    return stage(folder, "quads.train", "--experiment", "configs/tiny.yaml", "--arm", "quads", "--seed", "0", *places)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any], str]]:
    """Folder, result.json and the stage's messages of the run."""
    folder = tmp_path_factory.mktemp("collapse")
    shutil.copytree(ROOT / "configs/arms", folder / "configs/arms")
    (folder / "configs/tiny.yaml").write_text(EXPERIMENT)
    stage(folder, "quads.prepare", "--experiment", "configs/tiny.yaml", "--out", "data")
    stage(folder, "quads.warmup", "--experiment", "configs/tiny.yaml", "--data", "data", "--out", "model")
    said = train(folder)
    yield folder, read_result(folder / "out/result.json", "training result"), said
    shutil.rmtree(folder, ignore_errors=True)


def test_the_run_ends_with_the_step_that_collapses(stopped: tuple[Path, dict[str, Any], str]) -> None:
    folder, result, said = stopped
    step = result["collapse"]["alarm_step"]
    assert result["collapse"]["verdict"] == "collapsed" and 5 <= step < result["planned_steps"] == 8
    assert result["steps"] == step and result["stopped"] == f"collapsed at step {step}"
    assert said.count(f"quads collapsed at step {step}:") == 1
    history = read_jsonl(folder / "out/history.jsonl")
    assert [row["step"] for row in history] == list(range(step + 1))
    assert history[-1]["eval_accuracy"] is not None
    run = resolve_run(load_experiment("tiny", folder / "configs"), load_arm("quads", folder / "configs"), 0)
    assert judge(history, run.collapse).first("collapsed") == step
    assert is_complete(folder / f"checkpoints/global_step_{step}") and str(step) in Path(result["checkpoint"]).parts[-3]
    assert result["delta_weight"]["different"] == 0


def test_decomposition_of_the_steps_own_rollouts(stopped: tuple[Path, dict[str, Any], str]) -> None:
    folder, result, _ = stopped
    assert result["decomposition"] == "decomposition.jsonl"
    rows = read_jsonl(folder / "out/decomposition.jsonl")
    assert [row["step"] for row in rows] == [s for s in (1, 2, 4, 6, 8) if s <= result["steps"]]
    history = {row["step"]: row for row in read_jsonl(folder / "out/history.jsonl")}
    for row in rows:
        # total = E - P = -d: the history's gap and k1, computed by the loss in another forward of the same weights
        assert row["total_mean_abs"] == pytest.approx(history[row["step"]]["gap_mean"], abs=1e-5)
        assert row["total_mean"] == pytest.approx(history[row["step"]]["k1"], abs=1e-5)
        parts = sum(row[f"{term}_mean"] for term in ("delta_weight", "delta_act", "delta_num"))
        assert parts == pytest.approx(row["total_mean"], abs=1e-12)
        assert all(row[f"delta_weight_{how}"] == 0 for how in ("mean", "mean_abs", "p99_abs", "max_abs"))
        assert row["seconds"] > 0
    assert rows[0]["delta_act_mean_abs"] > 0 and rows[0]["delta_num_mean_abs"] > 0


def test_decomposition_by_layer_of_the_same_steps(stopped: tuple[Path, dict[str, Any], str]) -> None:
    folder, result, _ = stopped
    assert result["decomposition_layers"] == "decomposition_layers.jsonl"
    rows = read_jsonl(folder / "out/decomposition_layers.jsonl")
    steps = [row["step"] for row in read_jsonl(folder / "out/decomposition.jsonl")]
    depth = json.loads((folder / "model/config.json").read_text())["num_hidden_layers"]
    keys = [f"model.layers.{i}{part}" for i in range(depth) for part in (".self_attn.out", ".mlp.out", "")]
    assert [(row["step"], row["layer"]) for row in rows] == [(step, key) for step in steps for key in keys]
    for row in rows:
        assert 0 < row["tokens"] <= TOKENS
        assert row["delta_weight_mean"] == row["delta_weight_max"] == 0  # QUADS: P and Q are one forward
        assert 0 < row["delta_act_mean"] <= row["delta_act_max"]
        assert (row["total_mean"], row["total_max"]) == (row["delta_act_mean"], row["delta_act_max"])


def test_the_stopped_run_can_be_evaluated(stopped: tuple[Path, dict[str, Any], str]) -> None:
    folder, result, _ = stopped
    words = ("--experiment", "configs/tiny.yaml", "--arm", "quads", "--seed", "0", "--data", "data")
    places = ("--benchmarks", "benchmarks", "--train", "out", "--out", "eval")
    stage(folder, "quads.make_benchmarks", "--experiment", "configs/tiny.yaml", "--out", "benchmarks")
    stage(folder, "quads.evaluate", *words, *places)
    evaluated = read_result(folder / "eval/result.json", "evaluation result", ("engines",))
    assert evaluated["run_id"] == result["run_id"] and set(evaluated["engines"]) == {"own", "bf16"}


def test_running_again_trains_no_further(stopped: tuple[Path, dict[str, Any], str]) -> None:
    """As after a kill between the last step and result.json."""
    folder, result, _ = stopped
    (folder / "out/result.json").unlink()
    train(folder)
    again = read_result(folder / "out/result.json", "training result")
    assert again["steps"] == result["steps"] and again["stopped"] == result["stopped"]
    assert again["resumed_from"] == result["steps"] and again["collapse"] == result["collapse"]
    assert "nothing to train" in (folder / "out/train.log").read_text()
    steps = [json.loads(line)["step"] for line in (folder / "out/decomposition.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))
    layers = [(row["step"], row["layer"]) for row in read_jsonl(folder / "out/decomposition_layers.jsonl")]
    assert len(layers) == len(set(layers)) and {step for step, _ in layers} == set(steps)
