# SPDX-License-Identifier: Apache-2.0
"""Residual compensation on the GPU: both NVFP4 passes of an activation from one read of it.

    pack_rac   x [T, K] -> PackedRac(first, second, blocks), bit-equal to `quads.numerics.packed.pack_rac`

Static mask: a program walks over the compensated blocks of some rows, then over the rest, through an index list; so no
lane computes a second pass that nobody wants, and outputs stay in the order of x. With a scale per token it takes
the rows' maxima first, from registers or by a scan that leaves the rows in cache.
Token mask: a program holds whole rows, scores every block (float64 as the definition), finds the R-th largest score
of each row bit by bit, and compensates what lies above it, ties to the lowest index.

Differs from the definition: batch masks (they depend on other rows) and channel granularity are refused; the block
list of a static mask is read from the GPU once per mask tensor and version, so call it once before CUDA graph capture.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from quads.kernels.activation import given_scale
from quads.kernels.blocks import (
    activation_scale,
    global_scale,
    load_block,
    pack_half,
    round_half,
    store_codes,
)
from quads.kernels.encode import LAUNCH
from quads.kernels.host import power_of_two, prepared
from quads.numerics.formats import BLOCK
from quads.numerics.packed import Packed, PackedRac, RacLayout, check_layout, rac_blocks
from quads.numerics.rac import RacSpec, residual_mask, units_selected

# Chosen on an H200 (docs/kernels.md). TILE: blocks of a chunk; MASK_TILE: blocks of a program with token masks.
TILE, WARPS = 64, 2
MASK_TILE, MASK_LANES = 128, 2  # MASK_LANES: blocks a lane holds
_SIGN = tl.constexpr(-2147483648)
_plans: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


@triton.jit
def _residual(x, v, t):
    """x - v * t with the sign of x on v: both operations rounded, zero positive when they cancel."""
    dq = (v * t).to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & _SIGN)
    return x - dq.to(tl.float32, bitcast=True)


@triton.jit
def _residuals(x, v, t):
    """Residuals of a block; x and v are tuples of its four [NB, 4] parts, t [NB]."""
    t = t[:, None]
    r0, r1 = _residual(x[0], v[0], t), _residual(x[1], v[1], t)
    r2, r3 = _residual(x[2], v[2], t), _residual(x[3], v[3], t)
    return r0, r1, r2, r3


@triton.jit
def _residual_amax(r):
    """fp32 [NB]: largest magnitude; NaN may be lost, since the first pass has marked its block already."""
    first, second = tl.maximum(tl.abs(r[0]), tl.abs(r[1])), tl.maximum(tl.abs(r[2]), tl.abs(r[3]))
    return tl.max(tl.maximum(first, second), axis=1)


@triton.jit
def _pass(x, amax, gs, rcp, code_ptr, scale_ptr, block, mask, NB: tl.constexpr):
    """Quantize and store blocks given as four parts; returns their magnitudes and t."""
    x0, x1, x2, x3 = x
    byte, _, t, m = activation_scale(amax, gs, rcp)
    v0, v1 = round_half(x0, x1, m)
    v2, v3 = round_half(x2, x3, m)
    store_codes(code_ptr, block, pack_half(v0, v1, x0, x1, NB), pack_half(v2, v3, x2, x3, NB), mask)
    tl.store(scale_ptr + block, byte.to(tl.uint8), mask=mask)
    return (v0, v1, v2, v3), t


@triton.jit
def _tile(x_ptr, order_ptr, first, count, rows, groups, ROWS: tl.constexpr, WIDTH: tl.constexpr, BF16: tl.constexpr):
    """Load blocks order[first : first + count] of ROWS rows: parts, amax, row, list place, block number, mask."""
    lane = tl.arange(0, ROWS * WIDTH)
    row = tl.program_id(0) * ROWS + lane // WIDTH
    place = lane % WIDTH
    mask = (row < rows) & (place < count)
    block = row.to(tl.int64) * groups + tl.load(order_ptr + first + place, mask=place < count, other=0)
    lo0, hi0, lo1, hi1, amax = load_block(x_ptr, block, mask, ROWS * WIDTH, BF16, False, "evict_first")
    return (lo0, hi0, lo1, hi1), amax, row, place, block, mask


@triton.jit
def _row_amax(amax, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """int32 bits [ROWS] of the row maxima of block amaxes [ROWS * WIDTH]."""
    return tl.max(tl.reshape(amax, (ROWS, WIDTH)).to(tl.int32, bitcast=True), axis=1)


@triton.jit
def _spread(value, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS] -> [ROWS * WIDTH], each value repeated."""
    return tl.reshape(tl.broadcast_to(value[:, None], (ROWS, WIDTH)), (ROWS * WIDTH,))


@triton.jit
def _scan_rows(x_ptr, rows, groups, ROWS: tl.constexpr, WIDTH: tl.constexpr, BF16: tl.constexpr):
    """fp32 [ROWS]: row maxima, read in the order of memory (the passes then find the rows in cache)."""
    lane = tl.arange(0, ROWS * WIDTH)
    row = tl.program_id(0) * ROWS + lane // WIDTH
    top = tl.zeros((ROWS * WIDTH,), tl.int32)
    for first in range(0, groups, WIDTH):
        column = first + lane % WIDTH
        mask = (row < rows) & (column < groups)
        block = row.to(tl.int64) * groups + column
        _, _, _, _, amax = load_block(x_ptr, block, mask, ROWS * WIDTH, BF16, False, "evict_last")
        top = tl.maximum(top, amax.to(tl.int32, bitcast=True))
    return tl.max(tl.reshape(top, (ROWS, WIDTH)), axis=1).to(tl.float32, bitcast=True)


@triton.jit
def _compensated(
    tile, gs, rcp, c1_ptr, s1_ptr, c2_ptr, s2_ptr, first, selected, NB: tl.constexpr, IN_PLACE: tl.constexpr
):
    """Both passes of a tile of selected blocks that starts at place `first` of the list."""
    x, amax, row, place, block, mask = tile
    v, t = _pass(x, amax, gs, rcp, c1_ptr, s1_ptr, block, mask, NB)
    r = _residuals(x, v, t)
    target = block if IN_PLACE else row.to(tl.int64) * selected + first + place
    _pass(r, _residual_amax(r), gs, rcp, c2_ptr, s2_ptr, target, mask, NB)


@triton.jit
def _plain(tile, gs, rcp, c1_ptr, s1_ptr, c2_ptr, s2_ptr, NB: tl.constexpr, IN_PLACE: tl.constexpr):
    """The first pass of a tile of other blocks; in place, zeros for the second."""
    x, amax, _, _, block, mask = tile
    _pass(x, amax, gs, rcp, c1_ptr, s1_ptr, block, mask, NB)
    if IN_PLACE:
        zero = tl.zeros((NB,), tl.int32)
        store_codes(c2_ptr, block, zero, zero, mask)
        tl.store(s2_ptr + block, zero.to(tl.uint8), mask=mask)


@triton.jit
def _static_kernel(
    x_ptr, c1_ptr, s1_ptr, c2_ptr, s2_ptr, order_ptr, gs_ptr, gs_stride, rows, groups, selected,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, SINGLE: tl.constexpr, TOKEN: tl.constexpr, IN_PLACE: tl.constexpr,
    BF16: tl.constexpr,
):  # fmt: skip
    """order: block numbers, the `selected` compensated ones first; chunks of ROWS x WIDTH blocks of either part.

    The first chunk of both parts is loaded before either is computed. SINGLE: there are no others, as at k = 50 %.
    """
    NB: tl.constexpr = ROWS * WIDTH
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    one = _tile(x_ptr, order_ptr, 0, selected, rows, groups, ROWS, WIDTH, BF16)
    two = _tile(x_ptr, order_ptr, selected, groups - selected, rows, groups, ROWS, WIDTH, BF16)
    if TOKEN:
        if SINGLE:
            row_amax = tl.maximum(_row_amax(one[1], ROWS, WIDTH), _row_amax(two[1], ROWS, WIDTH))
            row_amax = row_amax.to(tl.float32, bitcast=True)
        else:
            row_amax = _scan_rows(x_ptr, rows, groups, ROWS, WIDTH, BF16)
        row_gs = global_scale(row_amax)
        tl.store(gs_ptr + own, row_gs, mask=own < rows)
    else:
        row_gs = tl.load(gs_ptr + own * gs_stride, mask=own < rows, other=1.0)
    gs, rcp = _spread(row_gs, ROWS, WIDTH), _spread(tl.div_rn(1.0, row_gs), ROWS, WIDTH)
    _compensated(one, gs, rcp, c1_ptr, s1_ptr, c2_ptr, s2_ptr, 0, selected, NB, IN_PLACE)
    _plain(two, gs, rcp, c1_ptr, s1_ptr, c2_ptr, s2_ptr, NB, IN_PLACE)
    if not SINGLE:
        for first in range(WIDTH, selected, WIDTH):
            tile = _tile(x_ptr, order_ptr, first, selected - first, rows, groups, ROWS, WIDTH, BF16)
            _compensated(tile, gs, rcp, c1_ptr, s1_ptr, c2_ptr, s2_ptr, first, selected, NB, IN_PLACE)
        for first in range(selected + WIDTH, groups, WIDTH):
            tile = _tile(x_ptr, order_ptr, first, groups - first, rows, groups, ROWS, WIDTH, BF16)
            _plain(tile, gs, rcp, c1_ptr, s1_ptr, c2_ptr, s2_ptr, NB, IN_PLACE)


@triton.jit
def _score(r, ABSOLUTE: tl.constexpr):
    """int64 [NB]: ordered bits of a block's float64 score."""
    total = tl.zeros((r[0].shape[0],), tl.float64)
    for i in tl.static_range(4):
        part = r[i].to(tl.float64)
        total += tl.sum(tl.abs(part) if ABSOLUTE else part * part, axis=1)
    return total.to(tl.int64, bitcast=True)


@triton.jit
def _limit(key, count, BITS: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS]: the count-th largest key of each row [ROWS, WIDTH], keys < 2^BITS; found from the top bit down."""
    limit = tl.zeros((ROWS,), key.dtype)
    one = tl.full((), 1, key.dtype)
    for i in range(BITS):
        trial = limit | (one << (BITS - 1 - i))
        above = tl.sum((key >= trial[:, None]).to(tl.int32), axis=1)
        limit = tl.where(above >= count, trial, limit)
    return limit


@triton.jit
def _top(key, count, ROWS: tl.constexpr):
    """int32 0/1 [ROWS, WIDTH]: the `count` largest int64 keys of each row, ties to the lowest index; -1 never wins.

    The high words decide alone unless two candidates share the deciding one.
    """
    high = (key >> 32).to(tl.int32)
    limit = _limit(high, count, 31, ROWS)
    chosen = (high >= limit[:, None]).to(tl.int32)
    if tl.max(tl.sum(chosen, axis=1), axis=0) > count:
        full = _limit(key, count, 63, ROWS)
        above = (key > full[:, None]).to(tl.int32)
        equal = (key == full[:, None]).to(tl.int32)
        free = count - tl.sum(above, axis=1)
        chosen = above | (equal & (tl.cumsum(equal, axis=1) <= free[:, None]).to(tl.int32))
    return chosen


@triton.jit
def _token_kernel(
    x_ptr, c1_ptr, s1_ptr, c2_ptr, s2_ptr, blocks_ptr, gs_ptr, gs_stride, rows, groups, selected,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, TOKEN: tl.constexpr, IN_PLACE: tl.constexpr, ABSOLUTE: tl.constexpr,
    BF16: tl.constexpr,
):  # fmt: skip
    """Whole rows of WIDTH >= groups blocks; writes the chosen block numbers to blocks int32 [rows, selected]."""
    NB: tl.constexpr = ROWS * WIDTH
    lane = tl.arange(0, NB)
    row = tl.program_id(0) * ROWS + lane // WIDTH
    column = lane % WIDTH
    mask = (row < rows) & (column < groups)
    block = row.to(tl.int64) * groups + column
    lo0, hi0, lo1, hi1, amax = load_block(x_ptr, block, mask, NB, BF16, False, "evict_first")
    x = (lo0, hi0, lo1, hi1)
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if TOKEN:
        gs = global_scale(_row_amax(amax, ROWS, WIDTH).to(tl.float32, bitcast=True))
        tl.store(gs_ptr + own, gs, mask=own < rows)
    else:
        gs = tl.load(gs_ptr + own * gs_stride, mask=own < rows, other=1.0)
    gs_x, rcp_x = _spread(gs, ROWS, WIDTH), _spread(tl.div_rn(1.0, gs), ROWS, WIDTH)
    v, t = _pass(x, amax, gs_x, rcp_x, c1_ptr, s1_ptr, block, mask, NB)
    r = _residuals(x, v, t)
    key = tl.where(mask, _score(r, ABSOLUTE), -1)
    chosen = _top(tl.reshape(key, (ROWS, WIDTH)), selected, ROWS)
    place = tl.reshape(tl.cumsum(chosen, axis=1) - 1, (NB,))
    picked = (tl.reshape(chosen, (NB,)) != 0) & mask
    compact = row.to(tl.int64) * selected + place
    target = block if IN_PLACE else compact
    tl.store(blocks_ptr + compact, column, mask=picked)
    _pass(r, _residual_amax(r), gs_x, rcp_x, c2_ptr, s2_ptr, target, picked, NB)
    if IN_PLACE:
        zero = tl.zeros((NB,), tl.int32)
        store_codes(c2_ptr, block, zero, zero, mask & (tl.reshape(chosen, (NB,)) == 0))
        tl.store(s2_ptr + block, zero.to(tl.uint8), mask=mask & (tl.reshape(chosen, (NB,)) == 0))


def _plan(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(blocks int32 [R], order int32 [G]: those, then the others) of a static mask; waits for the GPU once."""
    known = _plans.get(mask)
    if known is None or known[0] != mask._version:
        blocks = rac_blocks(mask)
        others = (~mask.view(-1, BLOCK)[:, 0]).nonzero()[:, 0].to(torch.int32)
        known = (mask._version, blocks, torch.cat((blocks, others)).contiguous())
        _plans[mask] = known
    return known[1], known[2]


def _chunk(selected: int, rest: int) -> int:
    """Blocks a chunk: the largest power of two <= TILE that leaves at most an eighth of the lanes idle, at least 4."""
    for width in (w for w in (64, 32, 16, 8) if w <= TILE):
        if sum(-n % width for n in (selected, rest)) * 8 <= selected + rest:
            return width
    return 4


def _check(rac: RacSpec, layout: str) -> None:
    check_layout(layout, ("compact", "in_place"))
    if rac.granularity != "block16":
        raise ValueError(f"packed RAC compensates whole 16-blocks, got granularity {rac.granularity!r}; use the layers")
    if rac.mask == "batch":
        raise ValueError(
            "pack_rac: a batch mask needs all rows before the first output, no kernel fuses it; use static"
        )


@torch.no_grad()
def pack_rac(
    x: Tensor,
    rac: RacSpec,
    static_mask: Tensor | None = None,
    gs: Tensor | None = None,
    layout: RacLayout = "compact",
) -> PackedRac:
    """Both passes of x [T, K]; arguments, layouts and result as `quads.numerics.packed.pack_rac`.

    Raises ValueError for a batch mask, channel granularity, a static mask that is missing, misshaped or cuts a block,
    K % 16 != 0, a dtype without kernel, a CPU tensor.
    """
    _check(rac, layout)
    flat = prepared(x, "pack_rac")
    rows, groups = x.shape[:-1].numel(), x.shape[-1] // BLOCK
    static = rac.mask == "static"
    if static:
        blocks, order = _plan(residual_mask(x, rac, static_mask))
        selected = blocks.numel()
    else:
        selected = units_selected(groups, rac.k)
        blocks = torch.empty(*x.shape[:-1], selected, dtype=torch.int32, device=x.device)
    token, in_place = gs is None, layout == "in_place"
    scale = torch.empty(rows, dtype=torch.float32, device=x.device) if gs is None else given_scale(x, gs)
    kept = groups if in_place else selected
    c1, s1, c2, s2 = (
        torch.empty(*x.shape[:-1], n, dtype=torch.uint8, device=x.device) for n in (8 * groups, groups, 8 * kept, kept)
    )
    common = {"TOKEN": token, "IN_PLACE": in_place, "BF16": flat.dtype == torch.bfloat16, **LAUNCH}
    shape = (scale, int(scale.numel() > 1), rows, groups, selected)
    if static:
        width = _chunk(selected, groups - selected)
        per = max(1, TILE // width)
        single = max(selected, groups - selected) <= width
        _static_kernel[(triton.cdiv(rows, per),)](
            flat, c1, s1, c2, s2, order, *shape, ROWS=per, WIDTH=width, SINGLE=single,
            num_warps=1 if token and single else WARPS, **common,
        )  # fmt: skip
    else:
        width = power_of_two(groups)
        per = max(1, MASK_TILE // width)
        _token_kernel[(triton.cdiv(rows, per),)](
            flat, c1, s1, c2, s2, blocks, *shape, ROWS=per, WIDTH=width, ABSOLUTE=rac.score == "abs",
            num_warps=max(1, min(8, per * width // (32 * MASK_LANES))), **common,
        )  # fmt: skip
    scale = (scale.expand(rows) if scale.numel() == 1 else scale).reshape(*x.shape[:-1], 1)
    return PackedRac(Packed(c1, s1, scale), Packed(c2, s2, scale), blocks)
