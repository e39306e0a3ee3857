# SPDX-License-Identifier: Apache-2.0
"""Quantization of the matrices that one engine module fuses, called by trainer and engine alike.

    w_NK = [w_1; w_2; ...] along the rows (q,k,v or gate,up), rows n_1 + n_2 + ... = N
    scale_group "fused": one NVFP4 global scale from amax over all rows (what one fused FP4 GEMM needs)
    scale_group "shard": one per part

N rows, K inner dimension, E experts (leading, optional). A shard of a weight that is spread over ranks takes the amax
of the whole weight, hence equals that slice of the quantized whole, bit for bit. The scale factor comes back expanded
to one fp32 value per row [..., N, 1], so that its shape does not depend on the format or on the grouping: an engine can
refresh it in place.
Differs from calling the numerics directly only in the grouping; the values are numerics' `quantize_weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quads.numerics.packed import Packed, pack_weight
from quads.numerics.qdq import WeightQ, quantize_weight, weight_amax, weight_row_amax

Maximum = Callable[[torch.Tensor], torch.Tensor]
SCALE_GROUPS = ("fused", "shard")


def group_amax(
    parts: Sequence[torch.Tensor], amax: Callable[[torch.Tensor], torch.Tensor] = weight_amax
) -> torch.Tensor:
    """fp32 [..., 1, 1]: amax over several matrices [..., n_i, K] after their rounding to bf16."""
    return torch.stack([amax(w) for w in parts]).amax(0)


def quantize_rows(
    w: torch.Tensor,
    fmt: str,
    widths: Sequence[int],
    scale_group: str,
    name: str,
    everywhere: Maximum | None = None,
    inner: bool = False,
) -> WeightQ:
    """w [..., N, K] of any float dtype, sum(widths) == N -> WeightQ(qs [..., N, K], rcp fp32 [..., N, 1]).

    everywhere: w is one shard of a larger weight, split along the rows or, with `inner`, along K; the function returns
    the elementwise maximum of a tensor over all shards (a collective, called the same number of times by every rank).
    Raises ValueError naming `name` when K is no multiple of 16 (nvfp4) or when w holds a non-finite value, on every
    rank when it sits in another shard.
    """
    parts = _parts(w, widths, name)
    try:
        amax = _amax(parts, fmt, scale_group, everywhere)
        rows = everywhere(weight_row_amax(w)) if everywhere and inner and fmt == "fp8" else None
        row_amax = [None] * len(parts) if rows is None else rows.split(list(widths), dim=-2)
        quantized = [quantize_weight(*args) for args in zip(parts, [fmt] * len(parts), amax, row_amax, strict=True)]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    rcp = [q.rcp.float().expand(*part.shape[:-1], 1) for q, part in zip(quantized, parts, strict=True)]
    return WeightQ(torch.cat([q.qs for q in quantized], dim=-2), torch.cat(rcp, dim=-2).contiguous())


def _amax(
    parts: Sequence[torch.Tensor], fmt: str, scale_group: str, everywhere: Maximum | None
) -> list[torch.Tensor | None]:
    """Amax given to every part; None where a part's own is meant."""
    if fmt != "nvfp4" or (scale_group != "fused" and everywhere is None):
        return [None] * len(parts)
    each = torch.stack([weight_amax(part) for part in parts])
    if everywhere is not None:
        each = everywhere(each)
    return [each.amax(0)] * len(parts) if scale_group == "fused" else list(each)


def pack_rows(w: torch.Tensor, widths: Sequence[int], scale_group: str, name: str) -> Packed:
    """The same NVFP4 weight in bytes: codes uint8 [..., N, K/2], row-major scales uint8 [..., N, K/16], gs fp32
    [..., N, 1]. Decoded it is `quantize_rows(w, "nvfp4", ...)`, bit for bit; errors as there.
    """
    parts = _parts(w, widths, name)
    try:
        amax = group_amax(parts) if scale_group == "fused" else None
        packed = [pack_weight(part, amax) for part in parts]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    gs = [p.gs.expand(*part.shape[:-1], 1) for p, part in zip(packed, parts, strict=True)]
    codes, scales = (torch.cat([p[i] for p in packed], dim=-2) for i in (0, 1))
    return Packed(codes, scales, torch.cat(gs, dim=-2).contiguous())


def _parts(w: torch.Tensor, widths: Sequence[int], name: str) -> tuple[torch.Tensor, ...]:
    if sum(widths) != w.shape[-2]:
        raise ValueError(f"{name}: parts of {list(widths)} rows do not add up to {w.shape[-2]}; fix the logical widths")
    return w.split(list(widths), dim=-2)
