# SPDX-License-Identifier: Apache-2.0
"""RAC, residual activation compensation: which part of the quantization residual gets a second NVFP4 pass.

    r = x - Q(x)     score_c = sum over tokens of r_tc^2 (or |r_tc|)     mask = top ceil(k n) of n units
    y = Q(x) Wq^T + Q(mask * r) Wq^T

Shapes: T tokens, K channels (columns of x, the GEMM's reduction dim). A unit is one channel or one block of 16
channels (the block scale's own unit: stored weight bytes can be gathered without requantizing). The mask is static
(calibrated, the same for every token), from the batch at hand, or each token's own.

Source: the paper's residual compensation; it leaves open the granularity, score and when the mask is taken: `RacSpec`.
Differs from outlier selection: the residual lives in the *neighbours* of an outlier, so units are ranked by residual,
not by |x|. A batch mask makes a token's result depend on the rows that happen to share its batch. Scores are float64,
and ties go to the lowest index, so that trainer and engine choose the same units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quads.numerics.formats import BLOCK


@dataclass(frozen=True)
class RacSpec:
    """k: share of units compensated, 0..1; the other fields as in the module docstring."""

    k: float
    granularity: Literal["block16", "channel"] = "block16"
    mask: Literal["static", "batch", "token"] = "static"
    score: Literal["sumsq", "abs"] = "sumsq"

    def __post_init__(self) -> None:
        if not 0.0 <= self.k <= 1.0:
            raise ValueError(f"RacSpec.k must lie in [0, 1], got {self.k}")
        for field, known in (
            ("granularity", ("block16", "channel")),
            ("mask", ("static", "batch", "token")),
            ("score", ("sumsq", "abs")),
        ):
            if getattr(self, field) not in known:
                raise ValueError(f"RacSpec.{field} {getattr(self, field)!r} is unknown; known: {', '.join(known)}")


def _element_scores(residual: Tensor, score: str) -> Tensor:
    r = residual.to(torch.float64)
    return r.square() if score == "sumsq" else r.abs()


def channel_scores(residual: Tensor, score: Literal["sumsq", "abs"] = "sumsq") -> Tensor:
    """float64 [K]: score of every channel, summed over all leading dims of residual [..., K]; batches add up."""
    return _element_scores(residual, score).flatten(0, -2).sum(0)


def units_selected(n: int, k: float) -> int:
    """ceil(k n), forgiving the last bits of k (ceil(0.1 * 30) must be 3, not 4)."""
    return math.ceil(round(k * n, 9))


def select(scores: Tensor, spec: RacSpec) -> Tensor:
    """bool [..., K]: the top ceil(k n) units by score, ties to the lowest index; scores [..., K] per channel.

    Raises ValueError when the granularity is block16 and K is not a multiple of 16.
    """
    channels = scores.shape[-1]
    if spec.granularity == "block16":
        if channels % BLOCK:
            raise ValueError(f"RAC by blocks needs K % {BLOCK} == 0, got scores of shape {tuple(scores.shape)}")
        scores = scores.unflatten(-1, (-1, BLOCK)).sum(-1)
    count = units_selected(scores.shape[-1], spec.k)
    # A stable descending sort keeps equal scores in index order; topk promises no order among ties.
    chosen = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :count]
    mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter_(-1, chosen, True)
    return mask.repeat_interleave(BLOCK, -1) if spec.granularity == "block16" else mask


def residual_mask(residual: Tensor, spec: RacSpec, static_mask: Tensor | None = None) -> Tensor:
    """bool [K] (static, batch) or [..., K] (token): which elements of residual [..., K] get the second pass.

    Raises ValueError when the spec is static and static_mask is missing or is not bool [K].
    """
    if spec.mask == "token":
        return select(_element_scores(residual, spec.score), spec)
    if spec.mask == "batch":
        return select(channel_scores(residual, spec.score), spec)
    if static_mask is None:
        raise ValueError("RacSpec.mask is static but no static_mask was given; calibrate first, or use batch or token")
    if static_mask.dtype != torch.bool or static_mask.shape != residual.shape[-1:]:
        raise ValueError(
            f"static RAC mask must be bool [{residual.shape[-1]}], got {static_mask.dtype} {tuple(static_mask.shape)}"
        )
    return static_mask
