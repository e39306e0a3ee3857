# SPDX-License-Identifier: Apache-2.0
"""Quantization of the matrices that one engine module fuses, called by trainer and engine alike.

    w_NK = [w_1; w_2; ...] along the rows (q,k,v or gate,up), rows n_1 + n_2 + ... = N
    scale_group "fused": one NVFP4 global scale from amax over all rows (what one fused FP4 GEMM needs)
    scale_group "shard": one per part

N rows, K inner dimension, E experts (leading, optional). The scale factor comes back expanded to one fp32 value per
row [..., N, 1], so that its shape does not depend on the format or on the grouping: an engine can refresh it in place.
Differs from calling the numerics directly only in the grouping; the values are numerics' `quantize_weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quads.numerics.qdq import WeightQ, quantize_weight, weight_amax

SCALE_GROUPS = ("fused", "shard")


def group_amax(
    parts: Sequence[torch.Tensor], amax: Callable[[torch.Tensor], torch.Tensor] = weight_amax
) -> torch.Tensor:
    """fp32 [..., 1, 1]: amax over several matrices [..., n_i, K] after their rounding to bf16."""
    return torch.stack([amax(w) for w in parts]).amax(0)


def quantize_rows(w: torch.Tensor, fmt: str, widths: Sequence[int], scale_group: str, name: str) -> WeightQ:
    """w [..., N, K] of any float dtype, sum(widths) == N -> WeightQ(qs [..., N, K], rcp fp32 [..., N, 1]).

    Raises ValueError naming `name` when K is no multiple of 16 (nvfp4) or when w holds a non-finite value.
    """
    if sum(widths) != w.shape[-2]:
        raise ValueError(f"{name}: parts of {list(widths)} rows do not add up to {w.shape[-2]}; fix the logical widths")
    parts = w.split(list(widths), dim=-2)
    try:
        amax = group_amax(parts) if scale_group == "fused" else None
        quantized = [quantize_weight(part, fmt, amax) for part in parts]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    rcp = [q.rcp.float().expand(*part.shape[:-1], 1) for q, part in zip(quantized, parts, strict=True)]
    return WeightQ(torch.cat([q.qs for q in quantized], dim=-2), torch.cat(rcp, dim=-2).contiguous())
