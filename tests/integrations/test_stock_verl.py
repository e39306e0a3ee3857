"""verl's own entry point with nothing of ours but overrides: `python -m verl.trainer.main_ppo ...` trains a QUADS arm.

The overrides under OURS are those of docs/own_run.md. Trainer, workers, agent loop and launcher are verl's. Without an
accelerator two things more are ours, and only because verl has no CPU platform: VERL_PLATFORM and its module.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from quads.config import load_arm, load_experiment, resolve_run
from quads.integrations.verl.overrides import RunPaths, hydra_value, verl_overrides
from quads.integrations.verl.session import SESSION, environment
from quads.rollout.mode import RolloutMode

pytestmark = [pytest.mark.stack, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = """
name: tiny
title: Two steps of verl's own trainer
arms: [quads]
data: {train_prompts: 24, eval_prompts: 8, calibration_prompts: 8, operations: 3}
warmup: {clean_steps: 5, noisy_steps: 0}
grpo: {steps: 2, samples_per_prompt: 4, max_response_tokens: 5}
runtime: {agent_loop: verl, micro_batch_sequences: 48}
"""
# Keys of the project's own launcher that a stock run does not have.
NOT_STOCK = re.compile(
    r"\+?(trainer\.v1\.|actor_rollout_ref\.quads|actor_rollout_ref\.rollout\.agent\.agent_loop_manager_class"
    r"|actor_rollout_ref\.model\.external_lib|.*engine_kwargs\.vllm\.(quantization|hf_overrides|worker_extension_cls)"
    r"|reward\.custom_reward_function)"
)
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return float(len(solution_str) % 2)
"""


def stage(folder: Path, *words: str) -> None:
    done = subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def ours(folder: Path) -> list[str]:
    """What a user of verl adds."""
    rac = {"k": 0.5, "granularity": "block16", "mask": "static", "score": "sumsq"}
    arm = load_arm("quads", ROOT / "configs")
    mode = RolloutMode.from_arm(arm.model_dump())
    quantization = mode.to_quantization_config(rac_masks="sync", receipt=str(folder / "receipt.json"))
    engine = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
    extension = "quads.integrations.verl.extension.QuadsWorkerExtension"
    quads = {"weight": "nvfp4", "rac": rac, "calibration": str(folder / "data/calibration.parquet")}
    quads |= {"masks": str(folder / "masks.safetensors"), "surgery_report": str(folder / "surgery.json")}
    (folder / "quads.json").write_text(json.dumps(quads))
    values = {
        "actor_rollout_ref.model.external_lib": "quads.integrations.verl.engine",
        "+actor_rollout_ref.model.override_config.quads": folder / "quads.json",
        f"{engine}.quantization": "quads",
        f"{engine}.hf_overrides": {"quantization_config": quantization},
        f"{engine}.worker_extension_cls": extension,
    }
    return [f"{key}={hydra_value(value)}" for key, value in values.items()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Folder and log of a run."""
    folder = tmp_path_factory.mktemp("stock")
    (folder / "configs").mkdir()
    (folder / "configs/arms").symlink_to(ROOT / "configs/arms")
    (folder / "configs/tiny.yaml").write_text(EXPERIMENT)
    stage(folder, "quads.prepare", "--experiment", "configs/tiny.yaml", "--out", "data")
    stage(folder, "quads.warmup", "--experiment", "configs/tiny.yaml", "--data", "data", "--out", "model")
    (folder / "reward.py").write_text(REWARD)
    run = resolve_run(load_experiment("tiny", folder / "configs"), load_arm("quads", ROOT / "configs"), 0)
    ray = folder.parent / "r"
    paths = RunPaths(folder / "data", folder / "model", folder / "checkpoints", folder, ray)
    stock = [o for o in verl_overrides(run, paths) if not NOT_STOCK.match(o)]
    stock += [f"reward.custom_reward_function.path={folder / 'reward.py'}", "trainer.val_before_train=false"]
    stock += ["trainer.v1.trainer_mode=sync", "trainer.save_freq=-1", "trainer.test_freq=-1"]
    variables = {**os.environ, **environment(run, ray, folder / "metrics.jsonl"), "PYTHONPATH": str(ROOT)}
    del variables[SESSION]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *stock, *ours(folder)]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=900)
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-6000:]
    return folder, log


def test_it_trained_both_steps(trained: tuple[Path, str]) -> None:
    folder, _ = trained
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "actor/pg_loss" in row.get("data", row)]
    assert steps == [1, 2]


def test_the_trainer_was_operated_on(trained: tuple[Path, str]) -> None:
    report = json.loads((trained[0] / "surgery.json").read_text())
    quantized = [m for m in report["rows"] if m["status"] == "quantized"]
    assert len(quantized) == 2 * 5  # q, k, v, o and the experts of each of two layers
    assert {m["weight"] for m in quantized} == {"nvfp4"}


def test_the_engine_served_w4a4_with_the_masks_of_each_sync(trained: tuple[Path, str]) -> None:
    receipt = json.loads((trained[0] / "receipt.json").read_text())
    assert receipt["mode"] == "w4a4+rac"
    with safe_open(trained[0] / "masks.safetensors", "pt") as masks:
        names = set(masks.keys())
    assert names == set(receipt["masks"])
    # the initial sync and one after each step
    assert {m["loads"] for m in receipt["masks"].values()} == {receipt["reloads"]} and receipt["reloads"] >= 2
