"""What the tests of the rollout benchmark share: a configuration of a tiny checkpoint, the toy with another runtime."""

from __future__ import annotations

from pathlib import Path

from quads.config import Arm, Experiment, Runtime, load_arms, load_experiment

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 43,
    "max_position_embeddings": 64,
}


def toy(**runtime: object) -> tuple[Experiment, list[Arm]]:
    """The toy with another runtime, and all its arms."""
    experiment = load_experiment("toy", ROOT / "configs")
    changed = {"runtime": Runtime(**runtime)} if runtime else {}
    return experiment.model_copy(update=changed), load_arms(experiment, ROOT / "configs", more=True)
