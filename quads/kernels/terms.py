# SPDX-License-Identifier: Apache-2.0
"""NVFP4 activations as operands of the exact GEMMs: both passes as q*s in bf16, natural block order, one read of x.

    terms   x [T, K] -> Terms(first bf16 [T, K], second bf16 [T, K] or None, rcp fp32 [T, 1])
            first = q1 s1, second = q2 s2 where the mask selects and zero elsewhere, rcp = 1 / gs of the token

Bit-equal to `quads.kernels.rac_gemm.terms` (plain torch), hence first + second = quads.numerics.quantize_activation.qs.
A program holds whole rows. The static mask is read by the kernel, element by element, from the tensor it is given: a
mask that is overwritten in place reaches a captured CUDA graph, and nothing on the host depends on which blocks it
selects or on how many. Token masks choose blocks as `rac_quantize` does.

Differs from `rac_quantize.pack_rac`: values instead of packed codes; no list of blocks, which would need the host; so
every block pays for a second pass, and the mask only decides what of it is kept. Non-finite rows give NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.kernels.activation import given_scale, quantize_rows_at
from quads.kernels.backend import without_kernel
from quads.kernels.blocks import activation_scale, global_scale, load_block, round_half, store_half
from quads.kernels.encode import LAUNCH
from quads.kernels.host import power_of_two, prepared
from quads.kernels.rac_gemm import Terms
from quads.kernels.rac_quantize import _residual_amax, _residuals, _row_amax, _score, _spread, _top
from quads.numerics.formats import BLOCK
from quads.numerics.rac import RacSpec, residual_mask, units_selected

# Blocks of a program and blocks a lane holds, those of the token kernel of `rac_quantize`.
TILE, LANES = 128, 2


@triton.jit
def _store(ptr, block, v, s, x, mask, NB: tl.constexpr):
    """bf16 blocks of v * s with the signs of x; v and x are tuples of four [NB, 4] parts, s [NB]."""
    f = s[:, None]
    store_half(ptr, block, 0, v[0] * f, v[1] * f, x[0], x[1], mask, NB, True)
    store_half(ptr, block, 1, v[2] * f, v[3] * f, x[2], x[3], mask, NB, True)


@triton.jit
def _keep(mask_ptr, column, half: tl.constexpr, inside):
    """Mask bytes of half a block as two bool [NB, 4]: even and odd elements."""
    pair = mask_ptr.to(tl.pointer_type(tl.int16)) + column[:, None] * 8 + half * 4 + tl.arange(0, 4)[None, :]
    word = tl.load(pair, mask=inside[:, None], other=0).to(tl.int32)
    return (word & 0xFF) != 0, (word & 0xFF00) != 0


@triton.jit
def _selected(
    r, mask_ptr, column, inside, selected,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STATIC: tl.constexpr, ABSOLUTE: tl.constexpr,
):  # fmt: skip
    """The residual r (four quarters [ROWS * WIDTH, 4]) where the mask or each row's own scores keep it, else 0."""
    if STATIC:
        k0, k1 = _keep(mask_ptr, column, 0, inside)
        k2, k3 = _keep(mask_ptr, column, 1, inside)
    else:
        key = tl.where(inside, _score(r, ABSOLUTE), -1)
        chosen = _top(tl.reshape(key, (ROWS, WIDTH)), selected, ROWS)
        k0 = (tl.reshape(chosen, (ROWS * WIDTH,)) != 0)[:, None]
        k1, k2, k3 = k0, k0, k0
    r0, r1 = tl.where(k0, r[0], 0.0), tl.where(k1, r[1], 0.0)
    r2, r3 = tl.where(k2, r[2], 0.0), tl.where(k3, r[3], 0.0)
    return r0, r1, r2, r3


@triton.jit
def _kernel(
    x_ptr, first_ptr, second_ptr, mask_ptr, rcp_ptr, gs_ptr, rows, groups, selected,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STATIC: tl.constexpr, ABSOLUTE: tl.constexpr, BF16: tl.constexpr,
    GIVEN: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows of WIDTH >= groups blocks; GIVEN: their global scales are read from gs_ptr."""
    NB: tl.constexpr = ROWS * WIDTH
    lane = tl.arange(0, NB)
    row = tl.program_id(0) * ROWS + lane // WIDTH
    column = lane % WIDTH
    inside = (row < rows) & (column < groups)
    block = row.to(tl.int64) * groups + column
    lo0, hi0, lo1, hi1, amax = load_block(x_ptr, block, inside, NB, BF16, False, "evict_first")
    x = (lo0, hi0, lo1, hi1)
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if GIVEN:
        row_gs = tl.load(gs_ptr + own, mask=own < rows, other=1.0)
    else:
        row_gs = global_scale(_row_amax(amax, ROWS, WIDTH).to(tl.float32, bitcast=True))
    row_rcp = tl.div_rn(1.0, row_gs)
    tl.store(rcp_ptr + own, row_rcp, mask=own < rows)
    gs, rcp = _spread(row_gs, ROWS, WIDTH), _spread(row_rcp, ROWS, WIDTH)
    _, s, t, m = activation_scale(amax, gs, rcp)
    v0, v1 = round_half(lo0, hi0, m)
    v2, v3 = round_half(lo1, hi1, m)
    _store(first_ptr, block, (v0, v1, v2, v3), s, x, inside, NB)
    r = _residuals(x, (v0, v1, v2, v3), t)
    r = _selected(r, mask_ptr, column, inside, selected, ROWS, WIDTH, STATIC, ABSOLUTE)
    _, s, _, m = activation_scale(_residual_amax(r), gs, rcp)
    v0, v1 = round_half(r[0], r[1], m)
    v2, v3 = round_half(r[2], r[3], m)
    _store(second_ptr, block, (v0, v1, v2, v3), s, r, inside, NB)


@torch.no_grad()
def terms(x: Tensor, rac: RacSpec | None = None, static_mask: Tensor | None = None, gs: Tensor | None = None) -> Terms:
    """NVFP4 terms of x [T, K], any strides; T may be 0. No wait for the GPU.

    static_mask: bool [K] on x's device, any selection, read when the kernel runs. gs: fp32 [T, 1] when x holds a part
    of the channels of whole tokens, whose scale it is (default: x's own). Raises ValueError for what
    `backend.without_kernel` names, a missing or misshaped static mask, K % 16 != 0, a dtype without kernel, a CPU
    tensor.
    """
    reason = without_kernel(rac)
    if reason:
        raise ValueError(f"no kernel for this compensation: {reason}; use rac_gemm.terms (torch)")
    if rac is None:
        a = quantize_rows_at(x, gs)
        return Terms(a.qs, None, a.rcp)
    flat = prepared(x, "terms")
    rows, groups = x.shape[0], x.shape[1] // BLOCK
    static = rac.mask == "static"
    mask = residual_mask(x, rac, static_mask).contiguous().view(torch.uint8) if static else flat
    first, second = (torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) for _ in range(2))
    rcp = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    scales = rcp if gs is None else given_scale(x, gs).expand(rows).contiguous()
    width = power_of_two(groups)
    per = max(1, TILE // width)
    if rows:
        _kernel[(triton.cdiv(rows, per),)](
            flat, first, second, mask, rcp, scales, rows, groups, units_selected(groups, rac.k), ROWS=per,
            WIDTH=width, STATIC=static, ABSOLUTE=rac.score == "abs", BF16=flat.dtype == torch.bfloat16,
            GIVEN=gs is not None,
            num_warps=max(1, min(8, per * width // (32 * LANES))), **LAUNCH,
        )  # fmt: skip
    return Terms(first, second, rcp)
