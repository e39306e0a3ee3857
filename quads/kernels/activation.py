# SPDX-License-Identifier: Apache-2.0
"""NVFP4 activations on the GPU: quantize, quantize-dequantize and packing, one global scale per token or a given one.

    quantize_activation        x [..., K] -> ActivationQ(qs bf16 [..., K], rcp fp32 [..., 1])
    fake_quantize_activation   -> dequantized, dtype of x
    pack_activation            -> Packed(codes, scales linear or 128x4, gs)

Bit-equal to the functions of the same names in `quads.numerics`, profile vllm_cuda with exact reciprocals. One read of
x: with a scale per token a program holds whole rows in registers, takes their maxima and quantizes them.

Differs from the definition: qs is stored as bf16 (exact), a row that is not finite gets a NaN scale instead of an
error, and `rac` is refused here: the sum of both passes needs fp32; `rac.pack_rac` keeps them apart.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.kernels.blocks import (
    activation_scale,
    global_scale,
    load_block,
    pack_half,
    round_half,
    store_codes,
    store_half,
    swizzled,
)
from quads.kernels.encode import LAUNCH
from quads.kernels.host import matrices, power_of_two, prepared, require_nvfp4
from quads.numerics import nvfp4
from quads.numerics.packed import Packed, ScaleLayout, check_layout
from quads.numerics.qdq import ActivationQ, Format
from quads.numerics.rac import RacSpec
from quads.numerics.swizzle import swizzled_shape

_FAKE, _QS, _PACK = 0, 1, 2
# Blocks per program and warps, chosen on an H200 (docs/kernels.md).
TILE, WARPS = 128, 4


@triton.jit
def row_scale(amax, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Block amax [ROWS * COLUMNS] -> gs per row fp32 [ROWS] and the same spread to the blocks."""
    gs = global_scale(tl.max(tl.reshape(amax, (ROWS, COLUMNS)).to(tl.int32, bitcast=True), axis=1).to(
        tl.float32, bitcast=True))  # fmt: skip
    spread = tl.reshape(tl.broadcast_to(gs[:, None], (ROWS, COLUMNS)), (ROWS * COLUMNS,))
    return gs, spread


@triton.jit
def _kernel(
    x_ptr, out_ptr, scale_ptr, gs_ptr, gs_stride, rows, groups, matrix_rows, scale_tiles, scale_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKEN: tl.constexpr, MODE: tl.constexpr, BF16: tl.constexpr,
    BF16_OUT: tl.constexpr, SWIZZLE: tl.constexpr,
):  # fmt: skip
    """A tile of ROWS rows x COLUMNS blocks; TOKEN: the columns span a row, gs is computed and written to gs_ptr."""
    NB: tl.constexpr = ROWS * COLUMNS
    lane = tl.arange(0, NB)
    row = tl.program_id(0) * ROWS + lane // COLUMNS
    column = tl.program_id(1) * COLUMNS + lane % COLUMNS
    mask = (row < rows) & (column < groups)
    block = row.to(tl.int64) * groups + column
    lo0, hi0, lo1, hi1, amax = load_block(x_ptr, block, mask, NB, BF16, False, "evict_first")
    if TOKEN:
        row_gs, gs = row_scale(amax, ROWS, COLUMNS)
        own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        tl.store(gs_ptr + own, row_gs, mask=own < rows)
    else:
        if ROWS == 1:
            gs = tl.load(gs_ptr + tl.program_id(0) * gs_stride)
        else:
            gs = tl.load(gs_ptr + row * gs_stride, mask=mask, other=1.0)
    rcp = tl.div_rn(1.0, gs)
    byte, s, _, m = activation_scale(amax, gs, rcp)
    v0, v1 = round_half(lo0, hi0, m)
    v2, v3 = round_half(lo1, hi1, m)
    if MODE == 2:
        store_codes(out_ptr, block, pack_half(v0, v1, lo0, hi0, NB), pack_half(v2, v3, lo1, hi1, NB), mask)
        place = block
        if SWIZZLE:
            matrix = row // matrix_rows
            place = matrix.to(tl.int64) * scale_stride + swizzled(row - matrix * matrix_rows, column, scale_tiles)
        tl.store(scale_ptr + place, byte.to(tl.uint8), mask=mask)
    else:
        f = s[:, None]
        v0, v1, v2, v3 = v0 * f, v1 * f, v2 * f, v3 * f
        if MODE == 0:
            if TOKEN or ROWS > 1:
                f = rcp[:, None]
            else:
                f = rcp
            v0, v1, v2, v3 = v0 * f, v1 * f, v2 * f, v3 * f
        store_half(out_ptr, block, 0, v0, v1, lo0, hi0, mask, NB, BF16_OUT)
        store_half(out_ptr, block, 1, v2, v3, lo1, hi1, mask, NB, BF16_OUT)


def _run(
    x: Tensor, out: Tensor, scales: Tensor | None, gs: Tensor | None, mode: int, swizzle: bool,
    tile: int | None = None, warps: int | None = None,
) -> Tensor:  # fmt: skip
    """Launch for any mode; returns gs, fp32 [rows] (per token) or what was given."""
    flat = prepared(x, "activation quantizer")
    leading, matrix_rows, groups = matrices(flat, "activation quantizer")
    rows = leading * matrix_rows
    padded_rows, padded_groups = swizzled_shape(matrix_rows, groups)
    tile, warps = tile or TILE, warps or WARPS
    token, stride = gs is None, 0
    shape = (rows, groups)
    if gs is None:
        gs = torch.empty(rows, dtype=torch.float32, device=x.device)
        columns = power_of_two(groups)
    elif gs.numel() == 1 and not swizzle and rows * groups < 2**31 - 2**20:
        shape, columns = (1, rows * groups), tile  # one value and no row structure in the output: a single long row
    else:
        stride, columns = int(gs.numel() > 1), min(tile, power_of_two(groups))
    if columns >= 1024 and warps < 8:
        warps = 8
    rows_tile = max(1, tile // columns)
    if rows:
        _kernel[(triton.cdiv(shape[0], rows_tile), triton.cdiv(shape[1], columns))](
            flat, out, out if scales is None else scales, gs, stride, *shape, matrix_rows, padded_groups // 4,
            padded_rows * padded_groups, ROWS=rows_tile, COLUMNS=columns, TOKEN=token, MODE=mode,
            BF16=flat.dtype == torch.bfloat16, BF16_OUT=out.dtype == torch.bfloat16, SWIZZLE=swizzle,
            num_warps=warps, **LAUNCH,
        )  # fmt: skip
    return gs


def given_scale(x: Tensor, gs: Tensor) -> Tensor:
    """A given global scale as contiguous fp32, one value or one per row of x."""
    gs = gs.to(device=x.device, dtype=torch.float32)
    return gs.reshape(1) if gs.numel() == 1 else gs.expand(*x.shape[:-1], 1).reshape(-1).contiguous()


def _refuse_rac(rac: RacSpec | None, static_mask: Tensor | None, what: str) -> None:
    if rac is not None or static_mask is not None:
        raise ValueError(f"{what}: no kernel adds both passes in fp32; use pack_rac, or the reference backend")


@torch.no_grad()
def quantize_activation(
    x: Tensor,
    fmt: Format,
    rac: RacSpec | None = None,
    static_mask: Tensor | None = None,
    amax: Tensor | None = None,
) -> ActivationQ:
    """ActivationQ(qs bf16 [..., K], exact; rcp fp32 [..., 1]), one scale per token.

    amax: as in the definition, but rows that exceed it saturate; a given one waits for the device. Raises ValueError
    for another format than nvfp4, for rac, K % 16 != 0, an infinite amax, a dtype without kernel, a CPU tensor.
    """
    require_nvfp4(fmt, "quantize_activation")
    _refuse_rac(rac, static_mask, "quantize_activation")
    return quantize_rows_at(x, None if amax is None else nvfp4.global_scale(amax))


@torch.no_grad()
def quantize_rows_at(x: Tensor, gs: Tensor | None) -> ActivationQ:
    """`quantize_activation` to NVFP4 with given global scales fp32 [..., 1] (None: own ones); waits for nothing."""
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    used = _run(x, out, None, None if gs is None else given_scale(x, gs), _QS, False)
    return ActivationQ(out, used.reciprocal().expand(x.shape[:-1].numel()).view(*x.shape[:-1], 1))


@torch.no_grad()
def fake_quantize_activation(
    x: Tensor, fmt: Format, rac: RacSpec | None = None, static_mask: Tensor | None = None
) -> Tensor:
    """Dequantized activation cast once to x.dtype; contiguous, shape of x. Errors as `quantize_activation`."""
    require_nvfp4(fmt, "fake_quantize_activation")
    _refuse_rac(rac, static_mask, "fake_quantize_activation")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run(x, out, None, None, _FAKE, False)
    return out


@torch.no_grad()
def pack_activation(x: Tensor, gs: Tensor | None = None, layout: ScaleLayout = "linear") -> Packed:
    """Packed codes uint8 [..., K/2], scales uint8 [..., K/16] or 128x4 with zero padding, gs fp32 [..., 1].

    gs: fp32 divisor, one value or [..., 1]; None: one per token. Raises ValueError for an unknown layout, K % 16 != 0,
    a dtype without kernel, a CPU tensor.
    """
    check_layout(layout, ("linear", "128x4"))
    rows, groups = (x.shape[-2] if x.ndim > 1 else 1), x.shape[-1] // 16
    shape = swizzled_shape(rows, groups) if layout == "128x4" else (rows, groups)
    allocate = torch.empty if shape == (rows, groups) else torch.zeros
    codes = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=torch.uint8, device=x.device)
    leading = x.shape[:-2] + shape if x.ndim > 1 else shape[1:]
    scales = allocate(leading, dtype=torch.uint8, device=x.device)
    used = _run(x, codes, scales, None if gs is None else given_scale(x, gs), _PACK, layout == "128x4")
    used = used.expand(x.shape[:-1].numel()) if used.numel() == 1 else used
    return Packed(codes, scales, used.reshape(*x.shape[:-1], 1))
