# SPDX-License-Identifier: Apache-2.0
"""NVFP4 weights on the GPU: amax, quantize, quantize-dequantize and packing; one global scale per leading index.

    weight_amax            w [..., N, K] -> fp32 [..., 1, 1]
    quantize_weight        -> WeightQ(qs bf16 [..., N, K], rcp fp32 [..., 1, 1])
    fake_quantize_weight   -> dequantized, dtype of w
    pack_weight            -> Packed(codes, scales linear or 128x4, gs)

Bit-equal to the functions of the same names in `quads.numerics`, in the order of operations of the exporter
(verl_export, IEEE divisions). `amax` may be one value, one per expert or that of a fused group (gate/up, q/k/v).

How it is fast: `blocks` says why a lane holds a block; x / d shares its divisor within a block, so it is a product
with RN(1 / d) and one exact correction. When amax is not given and the tensor is a stack of experts, one launch
computes the amax of expert e while expert e - LAG is quantized from L2 ("fused"): the weight is read from memory once.
Workgroups take their place in that order from a counter, so an expert's amax tiles always start before its quantize
tiles wait for them, whatever order the hardware starts workgroups in.

Memory beyond inputs and outputs: 8 bytes per expert. Differs from the definition: qs is stored as bf16 (exact), and a
block that is not finite or exceeds the given amax becomes NaN instead of raising.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.kernels.blocks import (
    global_scale,
    load_block,
    pack_half,
    round_half_divided,
    shared_divisor_is_safe,
    store_codes,
    store_half,
    swizzled,
    weight_scale,
)
from quads.kernels.encode import HARDWARE, LAUNCH, MAGNITUDE_BITS, bf16_bits
from quads.kernels.host import matrices, power_of_two, prepared, require_nvfp4
from quads.numerics.packed import Packed, ScaleLayout, check_layout
from quads.numerics.qdq import Format, WeightQ
from quads.numerics.swizzle import swizzled_shape

_FAKE, _QS, _PACK = 0, 1, 2
# Tile sizes in blocks, warps and lag, chosen on an H200 (docs/kernels.md).
TILE, WARPS, POLICY = 64, 2, ""
AMAX_TILE, AMAX_WARPS = 16384, 8
FUSED_BLOCKS, FUSED_WARPS = 128, 4
FUSED_TILE, FUSED_REPEAT, LAG = 4096, 4, 1
FUSED_EXPERTS = 8  # fewer matrices than this: amax and quantize are two launches


@triton.jit
def _amax_tile(
    x_ptr, amax_ptr, matrix, tile, elements,
    BLOCK: tl.constexpr, REPEAT: tl.constexpr, EVEN: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Fold the bf16-rounded magnitudes of REPEAT * BLOCK elements into amax_ptr[matrix], an int32 of fp32 bits."""
    lane = tl.arange(0, BLOCK)
    base = x_ptr + matrix.to(tl.int64) * elements
    policy: tl.constexpr = "evict_last" if KEEP else "evict_first"
    top = tl.zeros((BLOCK,), tl.int32)
    for i in range(REPEAT):
        offset = (tile * REPEAT + i) * BLOCK + lane
        if EVEN:
            x = tl.load(base + offset, eviction_policy=policy)
        else:
            x = tl.load(base + offset, mask=offset < elements, other=0.0, eviction_policy=policy)
        if x.dtype == tl.bfloat16:
            top = tl.maximum(top, (x.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32))
        else:
            top = tl.maximum(top, x.to(tl.float32).to(tl.int32, bitcast=True) & MAGNITUDE_BITS)
    largest = tl.max(top, axis=0)
    if x_ptr.dtype.element_ty != tl.bfloat16:
        largest = bf16_bits(largest.to(tl.float32, bitcast=True), HARDWARE)
    tl.atomic_max(amax_ptr + matrix, largest << 16, sem="relaxed")


@triton.jit
def _amax_kernel(x_ptr, amax_ptr, elements, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    _amax_tile(x_ptr, amax_ptr, tl.program_id(1), tl.program_id(0), elements, BLOCK, 1, EVEN, False)


@triton.jit
def _store_tile(
    values, v, s, byte, rcp, block, local, mask, out_ptr, scale_ptr, matrix, groups, scale_tiles, scale_stride,
    NB: tl.constexpr, MODE: tl.constexpr, BF16_OUT: tl.constexpr, SWIZZLE: tl.constexpr,
):  # fmt: skip
    """Write one tile: values = lo0, hi0, lo1, hi1 (for their signs), v = E2M1 magnitudes."""
    lo0, hi0, lo1, hi1 = values
    v0, v1, v2, v3 = v
    if MODE == 2:
        store_codes(out_ptr, block, pack_half(v0, v1, lo0, hi0, NB), pack_half(v2, v3, lo1, hi1, NB), mask)
        if SWIZZLE:
            row = local // groups
            place = matrix.to(tl.int64) * scale_stride + swizzled(row, local - row * groups, scale_tiles)
        else:
            place = block
        tl.store(scale_ptr + place, byte.to(tl.uint8), mask=mask)
    else:
        f = s[:, None]
        if MODE == 0:
            v0, v1, v2, v3 = v0 * f * rcp, v1 * f * rcp, v2 * f * rcp, v3 * f * rcp
        else:
            v0, v1, v2, v3 = v0 * f, v1 * f, v2 * f, v3 * f
        store_half(out_ptr, block, 0, v0, v1, lo0, hi0, mask, NB, BF16_OUT)
        store_half(out_ptr, block, 1, v2, v3, lo1, hi1, mask, NB, BF16_OUT)


@triton.jit
def _quantize_tile(
    x_ptr, out_ptr, scale_ptr, amax, matrix, tile, blocks, groups, scale_tiles, scale_stride,
    NB: tl.constexpr, MODE: tl.constexpr, BF16: tl.constexpr, BF16_OUT: tl.constexpr, SWIZZLE: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    """Quantize blocks [tile * NB, ...) of one matrix of `blocks` blocks, `groups` a row, with the scalar amax."""
    local = tile * NB + tl.arange(0, NB)
    mask = local < blocks
    block = matrix.to(tl.int64) * blocks + local
    lo0, hi0, lo1, hi1, block_amax = load_block(x_ptr, block, mask, NB, BF16, True, POLICY)
    gs = global_scale(amax)
    rcp = tl.div_rn(1.0, gs)
    # Two bodies under a condition that is the same for the whole tile: the exact shortcut, and plain division.
    if shared_divisor_is_safe(gs):
        byte, s, d = weight_scale(block_amax, gs, rcp, amax, True)
        r = tl.div_rn(1.0, d)
        v0, v1 = round_half_divided(lo0, hi0, d, r, True)
        v2, v3 = round_half_divided(lo1, hi1, d, r, True)
    else:
        byte, s, d = weight_scale(block_amax, gs, rcp, amax, False)
        v0, v1 = round_half_divided(lo0, hi0, d, d, False)
        v2, v3 = round_half_divided(lo1, hi1, d, d, False)
    _store_tile((lo0, hi0, lo1, hi1), (v0, v1, v2, v3), s, byte, rcp, block, local, mask, out_ptr, scale_ptr, matrix,
                groups, scale_tiles, scale_stride, NB, MODE, BF16_OUT, SWIZZLE)  # fmt: skip


@triton.jit
def _quantize_kernel(
    x_ptr, out_ptr, scale_ptr, amax_ptr, amax_stride, blocks, groups, scale_tiles, scale_stride,
    NB: tl.constexpr, MODE: tl.constexpr, BF16: tl.constexpr, BF16_OUT: tl.constexpr, SWIZZLE: tl.constexpr,
    POLICY: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1)
    amax = tl.load(amax_ptr + matrix * amax_stride)
    _quantize_tile(x_ptr, out_ptr, scale_ptr, amax, matrix, tl.program_id(0), blocks, groups, scale_tiles,
                   scale_stride, NB, MODE, BF16, BF16_OUT, SWIZZLE, POLICY)  # fmt: skip


@triton.jit
def _fused_kernel(
    x_ptr, out_ptr, scale_ptr, amax_ptr, counter_ptr, matrices, tiles, blocks, groups,
    scale_tiles, scale_stride, NB: tl.constexpr, BLOCK: tl.constexpr, REPEAT: tl.constexpr, MODE: tl.constexpr,
    BF16: tl.constexpr, BF16_OUT: tl.constexpr, SWIZZLE: tl.constexpr, EVEN: tl.constexpr, BEHIND: tl.constexpr,
):  # fmt: skip
    """amax and quantize in one launch. counter_ptr: int32 [1 + matrices], zero: tickets, then finished amax tiles.

    A tile is BLOCK * REPEAT elements in both stages. Ticket t is step t // (2 * tiles); a step holds the amax tiles of
    matrix `step`, then the quantize tiles of matrix `step - BEHIND`.
    """
    ticket = tl.atomic_add(counter_ptr, 1, sem="relaxed")
    step = ticket // (2 * tiles)
    tile = ticket - step * (2 * tiles)
    if tile < tiles:
        if step < matrices:
            _amax_tile(x_ptr, amax_ptr, step, tile, blocks * 16, BLOCK, REPEAT, EVEN, True)
            tl.atomic_add(counter_ptr + 1 + step, 1, sem="release")
    else:
        matrix = step - BEHIND
        if matrix >= 0:
            while tl.atomic_add(counter_ptr + 1 + matrix, 0, sem="acquire") < tiles:
                pass
            amax = tl.atomic_max(amax_ptr + matrix, 0, sem="relaxed").to(tl.float32, bitcast=True)
            first = (tile - tiles) * (BLOCK * REPEAT // 16 // NB)
            for i in range(BLOCK * REPEAT // 16 // NB):
                _quantize_tile(x_ptr, out_ptr, scale_ptr, amax, matrix, first + i, blocks, groups, scale_tiles,
                               scale_stride, NB, MODE, BF16, BF16_OUT, SWIZZLE, "evict_first")  # fmt: skip


def _launch_amax(x: Tensor, amax: Tensor, tile: int, warps: int) -> None:
    count = amax.numel()
    elements = x.numel() // count
    _amax_kernel[(triton.cdiv(elements, tile), count)](
        x, amax.view(torch.int32), elements, BLOCK=tile, EVEN=elements % tile == 0, num_warps=warps, **LAUNCH
    )


@torch.no_grad()
def weight_amax(w: Tensor) -> Tensor:
    """fp32 [..., 1, 1]: largest magnitude of the bf16-rounded weight [..., N, K], one per leading index; NaN wins.

    Raises ValueError for K % 16 != 0, a dtype without kernel, or a tensor that is not on a GPU.
    """
    x = prepared(w, "weight_amax")
    leading, _, _ = matrices(x, "weight_amax")
    amax = torch.zeros(leading, dtype=torch.float32, device=x.device)
    _launch_amax(x, amax, min(AMAX_TILE, power_of_two(x.numel() // leading)), AMAX_WARPS)
    return amax.view(*w.shape[:-2], 1, 1)


def _given_amax(amax: Tensor, w: Tensor) -> tuple[Tensor, int]:
    """Contiguous fp32 amax values and their stride per matrix: 0 for one value, 1 for one per leading index."""
    amax = amax.to(device=w.device, dtype=torch.float32)
    if amax.numel() == 1:
        return amax.reshape(1), 0
    return amax.expand(*w.shape[:-2], 1, 1).reshape(-1).contiguous(), 1


def _run(w: Tensor, out: Tensor, scales: Tensor | None, amax: Tensor | None, mode: int, swizzle: bool) -> Tensor:
    """Launch for any mode; returns the amax used, fp32 [1] or [leading]."""
    x = prepared(w, "weight quantizer")
    leading, rows, groups = matrices(x, "weight quantizer")
    blocks = rows * groups
    padded_rows, padded_groups = swizzled_shape(rows, groups)
    common = {
        "MODE": mode, "BF16": x.dtype == torch.bfloat16, "BF16_OUT": out.dtype == torch.bfloat16,
        "SWIZZLE": swizzle,
    }  # fmt: skip
    shape = (blocks, groups, padded_groups // 4, padded_rows * padded_groups)
    target = out if scales is None else scales
    if amax is None and leading >= FUSED_EXPERTS:
        scratch = torch.zeros(2 * leading + 1, dtype=torch.int32, device=x.device)
        own, counter = scratch[:leading], scratch[leading:]
        per_tile = FUSED_TILE * FUSED_REPEAT
        tiles = triton.cdiv(blocks * 16, per_tile)
        _fused_kernel[((leading + LAG) * 2 * tiles,)](
            x, out, target, own, counter, leading, tiles, *shape, BLOCK=FUSED_TILE, REPEAT=FUSED_REPEAT,
            EVEN=blocks * 16 % per_tile == 0, BEHIND=LAG, NB=FUSED_BLOCKS, num_warps=FUSED_WARPS, **common, **LAUNCH,
        )  # fmt: skip
        return own.view(torch.float32)
    if amax is None:
        used, stride = torch.zeros(leading, dtype=torch.float32, device=x.device), 1
        _launch_amax(x, used, min(AMAX_TILE, power_of_two(blocks * 16)), AMAX_WARPS)
    else:
        used, stride = _given_amax(amax, w)
    _quantize_kernel[(triton.cdiv(blocks, TILE), leading)](
        x, out, target, used, stride, *shape, NB=TILE, POLICY=POLICY, num_warps=WARPS, **common, **LAUNCH
    )
    return used


def _reciprocal(amax: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """gs and RN(1 / gs), fp32 [..., 1, 1], without waiting for the GPU; NaN where amax is not finite."""
    gs = torch.div(torch.full((), 2688.0, device=amax.device), amax).clamp(max=2.0**126)
    gs = torch.where(amax < torch.inf, gs.masked_fill(amax == 0, 1.0), torch.nan)
    gs = gs.expand(w.shape[:-2].numel()).reshape(*w.shape[:-2], 1, 1)
    return gs, gs.reciprocal()


@torch.no_grad()
def quantize_weight(w: Tensor, fmt: Format, amax: Tensor | None = None, row_amax: Tensor | None = None) -> WeightQ:
    """WeightQ(qs bf16 [..., N, K], exact; rcp fp32 [..., 1, 1]) of a weight of any float dtype.

    row_amax: of fp8 in the definition, for which there is no kernel; not read. Raises ValueError for another format
    than nvfp4, K % 16 != 0, a dtype without kernel, a tensor not on a GPU.
    """
    require_nvfp4(fmt, "quantize_weight")
    out = torch.empty(w.shape, dtype=torch.bfloat16, device=w.device)
    used = _run(w, out, None, amax, _QS, False)
    return WeightQ(out, _reciprocal(used, w)[1])


@torch.no_grad()
def fake_quantize_weight(w: Tensor, fmt: Format, amax: Tensor | None = None) -> Tensor:
    """`quantize_weight(...).dequantize()` cast once to w.dtype; contiguous, shape of w. Errors as there."""
    require_nvfp4(fmt, "fake_quantize_weight")
    out = torch.empty(w.shape, dtype=w.dtype, device=w.device)
    _run(w, out, None, amax, _FAKE, False)
    return out


@torch.no_grad()
def pack_weight(w: Tensor, amax: Tensor | None = None, layout: ScaleLayout = "linear") -> Packed:
    """Packed codes uint8 [..., N, K/2], scales uint8 [..., N, K/16] or 128x4 with zero padding, gs fp32 [..., 1, 1].

    Raises ValueError for an unknown layout and as `quantize_weight`.
    """
    check_layout(layout, ("linear", "128x4"))
    rows, groups = w.shape[-2], w.shape[-1] // 16
    shape = swizzled_shape(rows, groups) if layout == "128x4" else (rows, groups)
    allocate = torch.empty if shape == (rows, groups) else torch.zeros
    codes = torch.empty(*w.shape[:-1], w.shape[-1] // 2, dtype=torch.uint8, device=w.device)
    scales = allocate(*w.shape[:-2], *shape, dtype=torch.uint8, device=w.device)
    used = _run(w, codes, scales, amax, _PACK, layout == "128x4")
    return Packed(codes, scales, _reciprocal(used, w)[0])
