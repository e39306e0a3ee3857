# SPDX-License-Identifier: Apache-2.0
"""Static RAC masks from the trainer's own activations.

    score_c = sum over tokens of (x - Q(x))_tc^2 (or |.|) at every quantized input      mask = select(score)

x is the layer input the trainer sees (its activation format does not matter: the residual is always that of the NVFP4
activation quantizer), tokens are the positions where attention_mask is 1. Scores accumulate in float64, so that the
mask does not depend on how a batch is split. With several ranks each passes its own rows and the scores are summed.
Keys are engine module names: `...self_attn.qkv_proj`, `...self_attn.o_proj`, `...mlp.experts.w13`, `...mlp.experts.w2`.
Differs from ranking |x|: the residual of an outlier lives in its block neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quads.layers.names import RAC_MASK_PREFIX
from quads.layers.surgery import observing, quads_layers
from quads.numerics.qdq import activation_residual
from quads.numerics.rac import RacSpec, channel_scores, select

__all__ = ["RAC_MASK_PREFIX", "calibrate"]


class _Scores:
    """Accumulates float64 [K] per key over the rows of real tokens."""

    def __init__(self, valid_T: torch.Tensor, score: str):
        self.valid_T, self.score = valid_T, score
        self.sums: dict[str, torch.Tensor] = {}

    def __call__(self, key: str, x: torch.Tensor, token: torch.Tensor | None) -> None:
        valid = self.valid_T if token is None else self.valid_T[token]
        if len(valid) != len(x):
            raise ValueError(f"{key}: {len(x)} rows for {len(valid)} tokens; calibrate with the unpacked forward")
        try:
            scores = channel_scores(activation_residual(x[valid]), self.score)
        except ValueError as error:
            raise ValueError(f"calibration, input of {key}: {error}") from error
        self.sums[key] = self.sums[key] + scores if key in self.sums else scores


@torch.no_grad()
def calibrate(
    model: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, spec: RacSpec, batch: int = 64
) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask int [B, T] -> bool [K] on the CPU by engine key; model after apply_surgery.

    Leaves parameters, gradients, train/eval flags and random state as they were. Every rank must call it when the model
    is sharded; all ranks get the same masks. Raises ValueError when the model has no swapped layer or gets no token.
    """
    if input_ids.shape != attention_mask.shape:
        raise ValueError(f"input_ids {tuple(input_ids.shape)} and attention_mask {tuple(attention_mask.shape)} differ")
    if not bool(attention_mask.any()):
        raise ValueError("calibration got no token: attention_mask is zero everywhere")
    device = next(model.parameters()).device
    total: dict[str, torch.Tensor] = {}
    with _evaluating(model):
        for ids, mask in zip(input_ids.split(batch), attention_mask.split(batch), strict=True):
            scores = _Scores(mask.reshape(-1).bool().to(device), spec.score)
            with _observing(model, scores):
                model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)
            for key, value in scores.sums.items():
                total[key] = total[key] + value if key in total else value
    return {key: select(_sum_over_ranks(value), spec).cpu() for key, value in total.items()}


def _sum_over_ranks(scores: torch.Tensor) -> torch.Tensor:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(scores)
    return scores


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


@contextmanager
def _observing(model: torch.nn.Module, observer: _Scores) -> Iterator[None]:
    layers = [module for _, module in quads_layers(model)]
    if not layers:
        raise ValueError("calibration needs a model after apply_surgery: no swapped layer found")
    with observing(layers, observer):
        yield
