# SPDX-License-Identifier: Apache-2.0
"""Roofline rows of the rollout benchmark: what the matrix products of a checkpoint's layers should cost. A MODEL.

    tokens/s = tokens of a step / (layers * (qkv + o + experts or dense MLP, with activation quantizers))
    step       prefill: min(batch * prompt, max_batched_tokens) tokens; decode: batch tokens

Counts from quads.bench.roofline, shapes from config.json. Modes on units the chip lacks have no row.
Differs from an engine in all that is left out: attention, routers, norms, head, sampling, launches between products. So
these are upper bounds, and their ratios overstate what an engine gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quads.bench.rollout_plan import SIZES, Shape, mode_of
from quads.bench.roofline import CHIPS, Chip, Gemm, estimate, quantizer_seconds, touched_experts
from quads.config import Arm, ConfigError
from quads.files import read_checkpoint_config

__all__ = ["CHIPS", "gemms", "rows"]


def gemms(config: dict[str, Any], tokens: int) -> list[Gemm]:
    """Products of one decoder layer at `tokens` rows, formats still to be set."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or width // heads
    kv = config.get("num_key_value_heads") or heads
    found = [Gemm(tokens, (heads + 2 * kv) * head, width), Gemm(tokens, width, heads * head)]
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    inner = config.get("moe_intermediate_size") if experts else config["intermediate_size"]
    inner = inner or config["intermediate_size"]
    choices = config["num_experts_per_tok"] if experts else 1
    touched = touched_experts(tokens, experts, choices) if experts else 1.0
    return [
        *found,
        Gemm(choices * tokens, 2 * inner, width, touched),
        Gemm(choices * tokens, width, inner, touched),
    ]


def _step_seconds(chip: Chip, config: dict[str, Any], tokens: int, weight: str, activation: str, rac: float) -> float:
    unit = "bf16" if activation == "bf16" else activation
    total = 0.0
    for g in gemms(config, tokens):
        g = replace(g, weight=weight, activation=activation, unit=unit)
        total += estimate(chip, g, rac).seconds
        if activation != "bf16":
            total += quantizer_seconds(chip, g.rows, g.k, activation, rac)
    layers: int = config["num_hidden_layers"]
    return layers * total


def rows(
    model: Path, chip_name: str, modes: Sequence[str], wanted: Sequence[Shape], most: int, arms: Sequence[Arm]
) -> list[dict[str, Any]]:
    """Rows with backend "roofline"; `most`: tokens of one prefill step. Raises ConfigError, ResultFileError."""
    chip, found = CHIPS[chip_name], []
    config = read_checkpoint_config(model, SIZES)
    try:
        gemms(config, 1)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{model}/config.json lacks a size that the roofline needs ({error}); leave --roofline away"
        ) from None
    for name in dict.fromkeys(modes):
        mode, _ = mode_of(name, arms)
        if mode.activation not in chip.matrix:
            continue
        rac = mode.rac.k if mode.rac else 0.0
        for shape in wanted:
            lengths = {"batch": shape.batch, "prompt_tokens": shape.prompt, "response_tokens": shape.response}
            for phase, tokens in (("prefill", min(shape.batch * shape.prompt, most)), ("decode", shape.batch)):
                speed = tokens / _step_seconds(chip, config, tokens, mode.weight, mode.activation, rac)
                found.append({"mode": name, "backend": "roofline", "phase": phase, **lengths, "tokens_per_s": speed})
    return found
