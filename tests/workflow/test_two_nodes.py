"""Real verl and vLLM on two virtual nodes of a real Slurm: one FSDP2 trainer over both, one engine replica on each."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from single_machine import SingleMachine
from test_ray_cluster import ray_processes, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.stack, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = """
name: tiny
title: Two nodes
arms: [quads]
data: {train_prompts: 24, eval_prompts: 8, calibration_prompts: 8, operations: 3}
warmup: {clean_steps: 5, noisy_steps: 0}
grpo: {steps: 2, save_every: 1, samples_per_prompt: 4, max_response_tokens: 5}
runtime: {nodes: 2, agent_loop: verl, micro_batch_sequences: 24}
diagnostics: {training_every: 0}
"""


def stage(folder: Path, *words: str) -> None:
    done = subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_one_training_over_two_nodes(slurm: SingleMachine, tmp_path: Path) -> None:
    before = ray_processes()
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/arms").symlink_to(ROOT / "configs/arms")
    (tmp_path / "configs/tiny.yaml").write_text(EXPERIMENT)
    stage(tmp_path, "quads.prepare", "--experiment", "configs/tiny.yaml", "--out", "data")
    stage(tmp_path, "quads.warmup", "--experiment", "configs/tiny.yaml", "--data", "data", "--out", "model")
    places = ("--data", "data", "--model", "model", "--checkpoints", "checkpoints", "--out", "out")
    train = (sys.executable, "-m", "quads.train", "--experiment", "configs/tiny.yaml", "--arm", "quads", "--seed", "0")
    cluster = (sys.executable, "-m", "quads.cluster", "--gpus-per-node", "1", "--cpus-per-node", "8")
    cluster = (*cluster, "--object-store", "200000000", "--logs", "ray", "--", *train, *places)
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\nexport PYTHONPATH={ROOT}\ncd {tmp_path}\nexec {shlex.join(cluster)}\n")
    words = ("sbatch", "--parsable", "--nodes=2", "--exclusive", f"--output={tmp_path}/out.txt", str(script))
    job = slurm.run(*words).stdout.strip()
    ended = wait_for(slurm, job, seconds=700)
    said = (tmp_path / "out.txt").read_text()
    assert ended == "0:0", said[-6000:]
    assert "2 nodes" in said
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert result["steps"] == 2 and result["delta_weight"]["different"] == 0
    assert result["receipt"]["mode"] == "w4a4+rac"
    # both ranks of the trainer wrote their shard
    shards = {p.name for p in (tmp_path / "checkpoints/global_step_2/actor").glob("model_world_size_2_rank_*.pt")}
    assert shards == {"model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"}
    assert ray_processes() <= before
