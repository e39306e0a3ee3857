# SPDX-License-Identifier: Apache-2.0
"""RAC in the GEMM: y = (a W^T + r W_S^T) ar wr, with r the second NVFP4 pass of the residual on the masked blocks S.

    form A   one GEMM of K (1 + k): [a | r] [W | W_S]^T            weights of S stored twice
    form A1  the same with W stored once: masked blocks first, the kernel reads the first columns of W again
    form B   two GEMMs: a W^T, then += r W_S^T in fp32             W_S stored twice, no concatenation
    form D   one kernel: each W tile is loaded once; on masked tiles a second MMA       nothing stored twice

Shapes: a bf16 [T, K], r bf16 [T, KS], ar fp32 [T, 1], W = q*s bf16 [N, K]; S = KS/16 blocks of 16 columns, k = KS/K.
Both terms are exact in bf16, their sum q1 s1 + q2 s2 is not (23 bits): a RAC activation can never be one bf16 operand.
Forms A and B work for any mask. Form D wants the masked blocks first: `masked_first` is a permutation of the blocks of
K, applied to W once per weight update and to a and r by whoever writes them; sums over K do not care about the order.
Grouped: form A and D with rows sorted by expert and any loads. Definition and tests: quads.numerics.qdq.
Differs from adding dequantized operands: no rounding happens before the product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quads.kernels import gemm
from quads.kernels.gemm import CachedWeight, Groups, Tile
from quads.kernels.packed import PackedTile, PackedWeight, packed, reorder
from quads.numerics import nvfp4
from quads.numerics.formats import BLOCK
from quads.numerics.nvfp4 import global_scale
from quads.numerics.qdq import activation_residual
from quads.numerics.rac import RacSpec, residual_mask


class Terms(NamedTuple):
    """A quantized activation as GEMM operands: first and second bf16 [T, K] (second None without RAC, zero off the
    mask); rcp fp32 [T, 1]."""

    first: Tensor
    second: Tensor | None
    rcp: Tensor


@torch.no_grad()
def terms(x: Tensor, rac: RacSpec | None = None, static_mask: Tensor | None = None) -> Terms:
    """x [T, K] of any float dtype -> its NVFP4 terms; first + second is `quantize_activation(x, ...).qs`, bit for bit.

    Plain torch. Errors as `quantize_activation`.
    """
    gs = global_scale(x.float().abs().amax(-1, keepdim=True))
    first = nvfp4.to_qs(nvfp4.quantize(x, gs)).to(torch.bfloat16)
    if rac is None:
        return Terms(first, None, gs.reciprocal())
    residual = activation_residual(x)
    mask = residual_mask(residual, rac, static_mask)
    residual = residual.masked_fill(~mask, 0.0)
    second = nvfp4.to_qs(nvfp4.quantize(residual, gs)).to(torch.bfloat16)
    return Terms(first, second, gs.reciprocal())


def selected_blocks(mask: Tensor) -> Tensor:
    """int64: blocks of 16 with any masked channel; mask bool [K]. Reads the mask on the host (once per update)."""
    return mask.view(-1, BLOCK).any(-1).nonzero().squeeze(-1)


def masked_first(mask: Tensor) -> Tensor:
    """int64 [K/16]: order of the blocks with the masked ones first, each part ascending; mask bool [K]."""
    return torch.sort((~mask.view(-1, BLOCK).any(-1)).to(torch.int8), stable=True).indices


def take_blocks(x: Tensor, blocks: Tensor) -> Tensor:
    """[..., K] -> [..., 16 * len(blocks)], contiguous."""
    return x.unflatten(-1, (-1, BLOCK))[..., blocks, :].flatten(-2).contiguous()


def augment(w: CachedWeight, blocks: Tensor) -> CachedWeight:
    """Form A, once per weight update: [W | W_S] with qs [..., N, K + KS]; (1 + k) times the cache's memory."""
    return CachedWeight(torch.cat([w.qs, take_blocks(w.qs, blocks)], -1).contiguous(), w.rcp)


def concatenate(t: Terms, blocks: Tensor) -> Tensor:
    """Form A, every call: [a | r] bf16 [T, K + KS]. A fused quantizer writes this layout directly."""
    return torch.cat([t.first, take_blocks(_second(t), blocks)], -1)


def form_a(t: Terms, augmented: CachedWeight, blocks: Tensor, out_dtype: torch.dtype, **options) -> Tensor:
    """y [T, N]; options of `gemm.linear` (method, tile, bias)."""
    return gemm.linear(concatenate(t, blocks), t.rcp, augmented, out_dtype, **options)


def form_a_grouped(
    t: Terms, augmented: CachedWeight, blocks: Tensor, offsets: Tensor, out_dtype: torch.dtype, **options
) -> Tensor:
    """y [R, N] with augmented.qs [E, N, K + KS], rows sorted by expert; options of `gemm.grouped`."""
    return gemm.grouped(concatenate(t, blocks), t.rcp, augmented, offsets, out_dtype, **options)


def form_a_once(t: Terms, w: CachedWeight, out_dtype: torch.dtype, tile: Tile | None = None) -> Tensor:
    """Form A1: y [T, N] from ordered terms and an ordered weight (`order_terms`, `order_weight`); K % tile.k == 0."""
    qs = torch.cat([t.first, _second(t)], -1)
    return gemm.launch(qs, None, t.rcp, w, out_dtype, None, tile or (gemm.SMALL if gemm.INTERPRET else gemm.DENSE))


def form_b(
    t: Terms, w: CachedWeight, w_S: Tensor, blocks: Tensor, out_dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """y [T, N]: cuBLAS twice with fp32 output, then the epilogue; w_S bf16 [N, KS] = take_blocks(w.qs, blocks)."""
    r = take_blocks(_second(t), blocks)
    gemm.check_operands(t.first, t.rcp, w, experts=False)
    if t.first.is_cuda:
        y = torch.mm(t.first, w.qs.mT, out_dtype=torch.float32)
        y = torch.addmm(y, r, w_S.mT, out_dtype=torch.float32)
    else:
        y = t.first.float() @ w.qs.float().mT + r.float() @ w_S.float().mT
    return gemm.scale_rows(y, t.rcp, w, out_dtype, None if bias is None else bias.float())


def order_weight(w: CachedWeight, order: Tensor) -> CachedWeight:
    """Form D, once per weight update: the blocks of K in `order`; no additional memory once the source is dropped."""
    return CachedWeight(take_blocks(w.qs, order), w.rcp)


def order_terms(t: Terms, order: Tensor, masked: int) -> Terms:
    """Blocks in `order`; second cut to its first `masked` blocks. A fused quantizer writes this layout directly."""
    second = take_blocks(_second(t), order[:masked])
    return Terms(reorder(t.first, order), second, t.rcp)


def form_d(
    t: Terms, w: CachedWeight, out_dtype: torch.dtype, bias: Tensor | None = None, tile: Tile | None = None
) -> Tensor:
    """y [T, N] from ordered terms and an ordered weight: t.second [T, KS] belongs to the first KS columns."""
    gemm.check_operands(t.first, t.rcp, w, experts=False)
    tile = tile or (gemm.SMALL if gemm.INTERPRET else gemm.DENSE)
    return gemm.launch(t.first, _second(t), t.rcp, w, out_dtype, bias, tile)


def form_d_grouped(
    t: Terms,
    w: CachedWeight,
    offsets: Tensor,
    out_dtype: torch.dtype,
    tile: Tile | None = None,
    groups: Groups | None = None,
) -> Tensor:
    """y [R, N]: as form_d, w.qs [E, N, K], rows sorted by expert, offsets int32 [E + 1]."""
    gemm.check_operands(t.first, t.rcp, w, experts=True)
    tile = tile or (gemm.SMALL if gemm.INTERPRET else gemm.GROUPED_RAC)
    groups = groups or gemm.group_rows(offsets, t.first.shape[0], tile.m)
    return gemm.launch(t.first, _second(t), t.rcp, w, out_dtype, None, tile, groups)


def form_d_packed(
    t: Terms,
    w: PackedWeight,
    masked_blocks: int,
    out_dtype: torch.dtype,
    offsets: Tensor | None = None,
    tile: PackedTile | None = None,
) -> Tensor:
    """y [T, N]: packed weight with order `masked_first`, terms in natural order; both planes in one operand."""
    planes = torch.stack([reorder(t.first, w.order), reorder(_second(t), w.order)])
    return packed(planes, t.rcp, w, out_dtype, offsets, masked_blocks, tile)


def _second(t: Terms) -> Tensor:
    if t.second is None:
        raise ValueError("these activation terms have no residual; call terms() with a RacSpec, or gemm.linear without")
    return t.second
