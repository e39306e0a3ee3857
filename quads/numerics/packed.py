# SPDX-License-Identifier: Apache-2.0
"""Packed NVFP4 operands as engines store them: two codes a byte, E4M3 scales linear or swizzled, global scales.

    weight       w [..., N, K]  ->  codes [..., N, K/2], scales [..., N, K/16], gs [..., 1, 1]   profile verl_export
    activation   x [..., K]     ->  codes [..., K/2],    scales [..., K/16],    gs [..., 1]      profile vllm_cuda
    RAC          x [T, K]       ->  the same for x and for the compensated blocks of x - Q(x), which share gs

Layouts of scales: "linear" row-major, "128x4" the tiled order of `swizzle`, padded. Layouts of the RAC pass: "compact"
stores only the R compensated blocks, in ascending order, codes [T, 8 R] and scales [T, R]; "in_place" stores all of
them with zero codes and scales off the mask, codes [T, K/2] and scales [T, K/16].

Source: composition of `nvfp4`, `swizzle` and `rac`. Differs from `qdq`: bytes for a GEMM that reads FP4, not values.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quads.numerics.formats import BLOCK
from quads.numerics.nvfp4 import NVFP4, check_k, dequantize, global_scale, pack, quantize
from quads.numerics.qdq import weight_amax
from quads.numerics.rac import RacSpec, residual_mask
from quads.numerics.swizzle import swizzle

ScaleLayout = Literal["linear", "128x4"]
RacLayout = Literal["compact", "in_place"]


class Packed(NamedTuple):
    """codes uint8 [..., K/2], scales uint8 [..., K/16] (or their swizzled, padded shape), gs fp32 in divisor form."""

    codes: Tensor
    scales: Tensor
    gs: Tensor


class PackedRac(NamedTuple):
    """Both passes and blocks int32 [R] (static) or [T, R] (token): which 16-blocks the second holds, ascending."""

    first: Packed
    second: Packed
    blocks: Tensor


def check_layout(layout: str, known: tuple[str, ...]) -> None:
    """Raises ValueError naming the known layouts."""
    if layout not in known:
        raise ValueError(f"unknown layout {layout!r}; known: {', '.join(known)}")


def _packed(nv: NVFP4, layout: ScaleLayout = "linear") -> Packed:
    return Packed(pack(nv.codes), swizzle(nv.scales) if layout == "128x4" else nv.scales, nv.gs)


@torch.no_grad()
def pack_weight(w: Tensor, amax: Tensor | None = None, layout: ScaleLayout = "linear") -> Packed:
    """Quantize a weight [..., N, K], rounded to bf16 first; amax as in `qdq.quantize_weight`, one per leading index.

    Raises ValueError for K % 16 != 0, a non-finite weight or an unknown layout.
    """
    check_layout(layout, ("linear", "128x4"))
    gs = global_scale(weight_amax(w) if amax is None else amax).expand(*w.shape[:-2], 1, 1)
    return _packed(quantize(w.to(torch.bfloat16), gs, "verl_export"), layout)


@torch.no_grad()
def pack_activation(x: Tensor, gs: Tensor | None = None, layout: ScaleLayout = "linear") -> Packed:
    """Quantize x [..., K] with the given divisor gs (fp32, one value or [..., 1]) or, without it, one per token.

    Raises ValueError for K % 16 != 0, a non-finite x or gs, or an unknown layout.
    """
    check_layout(layout, ("linear", "128x4"))
    check_k(x.shape)
    if gs is None:
        gs = global_scale(x.abs().amax(-1, keepdim=True).to(torch.float32))
    return _packed(quantize(x, gs.to(torch.float32).expand(*x.shape[:-1], 1)), layout)


def rac_blocks(mask: Tensor) -> Tensor:
    """int32 [..., R]: ascending indices of the 16-blocks that a mask bool [..., K] selects (equally many per row).

    Raises ValueError when the mask cuts a block.
    """
    units = mask.unflatten(-1, (-1, BLOCK))
    if not torch.equal(units.any(-1), units.all(-1)):
        raise ValueError("packed RAC works on whole 16-blocks, got a mask that cuts one; use granularity block16")
    chosen = units.any(-1)
    return chosen.nonzero()[..., -1].to(torch.int32).view(*chosen.shape[:-1], -1)


@torch.no_grad()
def pack_rac(
    x: Tensor,
    rac: RacSpec,
    static_mask: Tensor | None = None,
    gs: Tensor | None = None,
    layout: RacLayout = "compact",
) -> PackedRac:
    """Both passes of x [T, K] with 16-block compensation; gs as in `pack_activation`, shared by the second pass.

    static_mask: bool [K] of whole blocks when rac.mask is static. Raises ValueError as `pack_activation`, and for a
    channel granularity.
    """
    check_layout(layout, ("compact", "in_place"))
    if rac.granularity != "block16":
        raise ValueError(f"packed RAC compensates whole 16-blocks, got granularity {rac.granularity!r}; use the layers")
    check_k(x.shape)
    if gs is None:
        gs = global_scale(x.abs().amax(-1, keepdim=True).to(torch.float32))
    first = quantize(x, gs.to(torch.float32).expand(*x.shape[:-1], 1))
    residual = x.to(torch.float32) - dequantize(first)
    mask = residual_mask(residual, rac, static_mask)
    second = quantize(torch.where(mask, residual, 0.0), first.gs)
    blocks = rac_blocks(mask)
    if layout == "compact":
        rows = blocks.long().expand(*x.shape[:-1], blocks.shape[-1])
        codes = second.codes.unflatten(-1, (-1, BLOCK)).gather(-2, rows.unsqueeze(-1).expand(*rows.shape, BLOCK))
        second = NVFP4(codes.flatten(-2), second.scales.gather(-1, rows), second.gs)
    return PackedRac(_packed(first), _packed(second), blocks)
