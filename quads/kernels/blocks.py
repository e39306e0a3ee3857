# SPDX-License-Identifier: Apache-2.0
"""Triton device functions on blocks of 16: load, scale, round, pack and store one block per lane.

A tile is NB blocks. One lane holds a whole block as two halves of 8 consecutive elements; a half is a pair of fp32
tensors lo, hi [NB, 4], the even and the odd elements (the two halves of four 32-bit words of bf16 input). So block
maxima and packing are reductions within a lane, and the scale's three divisions are spread over 16 elements.

    load_block      -> lo0, hi0, lo1, hi1 fp32 [NB, 4], amax fp32 [NB] (NaN or infinity when the block holds one)
    round_half      |x| * m -> E2M1 magnitudes
    pack_half       E2M1 magnitudes and the signs of x -> int32 [NB], 8 codes, lowest element in the lowest nibble
    store_codes     two int32 [NB] -> 8 bytes a block
    store_half      8 values with the signs of x, as bf16 or fp32
    activation_scale, weight_scale   the two canonical orders of operations of `quads.numerics.nvfp4`

Differs from the obvious tile [NB, 16]: there two lanes share a block and both compute its scale, and 16 codes take
more instructions to pack than to round. The kernels are limited by instruction issue, not by memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quads.kernels.encode import (
    HARDWARE,
    INFINITY_BITS,
    MAGNITUDE_BITS,
    RCP_6,
    bf16_bits,
    bf16_high,
    bf16_low,
    bf16_pair,
    e2m1_bits,
    e2m1_round,
    e4m3_decode,
    e4m3_encode,
)

# Within these bounds of a weight's global scale no intermediate of `divide_shared` over- or underflows.
_GS_LOW = tl.constexpr(2.0**-80)
_GS_HIGH = tl.constexpr(2.0**80)


@triton.jit
def split4(x, NB: tl.constexpr):
    """[NB, 4] -> its four columns, each [NB]; registers are renamed, nothing moves."""
    even, odd = tl.split(tl.reshape(x, (NB, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _amax_words(a, b, NB: tl.constexpr):
    """fp32 [NB]: largest magnitude of the 16 bf16 in int32 words a, b [NB, 4]; NaN wins."""
    if HARDWARE:
        a0, a1, a2, a3 = split4(a, NB)
        b0, b1, b2, b3 = split4(b, NB)
        pair = tl.inline_asm_elementwise(
            """{
            .reg .b32 x<8>;
            abs.bf16x2 x0, $1; abs.bf16x2 x1, $2; abs.bf16x2 x2, $3; abs.bf16x2 x3, $4;
            abs.bf16x2 x4, $5; abs.bf16x2 x5, $6; abs.bf16x2 x6, $7; abs.bf16x2 x7, $8;
            max.NaN.bf16x2 x0, x0, x1; max.NaN.bf16x2 x2, x2, x3;
            max.NaN.bf16x2 x4, x4, x5; max.NaN.bf16x2 x6, x6, x7;
            max.NaN.bf16x2 x0, x0, x2; max.NaN.bf16x2 x4, x4, x6; max.NaN.bf16x2 $0, x0, x4;
            }""",
            "=r,r,r,r,r,r,r,r,r",
            [a0, a1, a2, a3, b0, b1, b2, b3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        low, high = pair << 16, pair & 0x7FFF0000
        return tl.maximum(low, high).to(tl.float32, bitcast=True)
    low = tl.maximum(tl.max((a << 16) & MAGNITUDE_BITS, axis=1), tl.max((b << 16) & MAGNITUDE_BITS, axis=1))
    high = tl.maximum(tl.max(a & 0x7FFF0000, axis=1), tl.max(b & 0x7FFF0000, axis=1))
    return tl.maximum(low, high).to(tl.float32, bitcast=True)


@triton.jit
def _magnitude(x):
    """Bits of |x|: an integer order that puts NaN on top."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE_BITS


@triton.jit
def amax_values(lo0, hi0, lo1, hi1):
    """fp32 [NB]: largest magnitude of a block given as fp32 halves; NaN wins."""
    first = tl.maximum(_magnitude(lo0), _magnitude(hi0))
    second = tl.maximum(_magnitude(lo1), _magnitude(hi1))
    return tl.max(tl.maximum(first, second), axis=1).to(tl.float32, bitcast=True)


@triton.jit
def _load_values(ptr, block, half: tl.constexpr, mask, NB: tl.constexpr, ROUND: tl.constexpr):
    """Half a block of fp32 or fp16 elements as lo, hi [NB, 4], rounded to bf16 on request."""
    element = block[:, None] * 16 + half * 8 + tl.arange(0, 8)[None, :]
    x = tl.load(ptr + element, mask=mask[:, None], other=0.0).to(tl.float32)
    if ROUND:
        x = (bf16_bits(x, HARDWARE) << 16).to(tl.float32, bitcast=True)
    return tl.split(tl.reshape(x, (NB, 4, 2)))


@triton.jit
def load_block(ptr, block, mask, NB: tl.constexpr, BF16: tl.constexpr, ROUND: tl.constexpr, POLICY: tl.constexpr):
    """Blocks `block` int64 [NB] of a 16-byte aligned contiguous tensor. POLICY: cache eviction policy of the loads.

    ROUND: round to bf16 first (weights); no effect on bf16 input.
    """
    if BF16:
        words = ptr.to(tl.pointer_type(tl.int32)) + block[:, None] * 8 + tl.arange(0, 4)[None, :]
        a = tl.load(words, mask=mask[:, None], other=0, eviction_policy=POLICY)
        b = tl.load(words + 4, mask=mask[:, None], other=0, eviction_policy=POLICY)
        return bf16_low(a), bf16_high(a), bf16_low(b), bf16_high(b), _amax_words(a, b, NB)
    lo0, hi0 = _load_values(ptr, block, 0, mask, NB, ROUND)
    lo1, hi1 = _load_values(ptr, block, 1, mask, NB, ROUND)
    return lo0, hi0, lo1, hi1, amax_values(lo0, hi0, lo1, hi1)


@triton.jit
def global_scale(amax):
    """gs = min(RN(2688 / amax), 2^126), 1 for amax 0, NaN when amax is not finite; any shape."""
    gs = tl.minimum(tl.div_rn(2688.0, tl.where(amax == 0.0, 2688.0, amax)), 8.507059173023462e37)
    return tl.where(amax.to(tl.int32, bitcast=True) < INFINITY_BITS, gs, float("nan"))


@triton.jit
def activation_scale(amax, gs, rcp):
    """Order of vllm_cuda. amax, gs, rcp = RN(1 / gs) fp32 [NB] or scalar -> byte int32, s, t = s * rcp, m = 1 / t.

    m is 0 where s is. A block that is not finite gets the byte 0x7F (NaN) and s = NaN; a NaN gs stays in rcp.
    """
    byte = e4m3_encode(gs * (amax * RCP_6), HARDWARE)
    s = e4m3_decode(byte, HARDWARE)
    t = s * rcp
    m = tl.where(s != 0.0, tl.div_rn(1.0, t), 0.0)
    good = amax.to(tl.int32, bitcast=True) < INFINITY_BITS
    return tl.where(good, byte, 0x7F), tl.where(good, s, float("nan")), t, m


@triton.jit
def divide_shared(x, d, r):
    """RN(x / d) given r = RN(1 / d): the quotient's remainder is exact in an fma and corrects it (Markstein).

    Four instructions instead of an IEEE division's dozen; callers keep every intermediate normal.
    """
    q = x * r
    return tl.fma(tl.fma(-d, q, x), r, q)


@triton.jit
def shared_divisor_is_safe(gs):
    """Whether `divide_shared` may be used for a weight with this gs (scalar); never in the interpreter (no fma)."""
    if HARDWARE:
        return (gs > _GS_LOW) & (gs < _GS_HIGH)
    return gs != gs


@triton.jit
def weight_scale(amax, gs, rcp, limit, SHARED: tl.constexpr):
    """Order of verl_export. Block amax [NB], scalar gs, rcp = RN(1 / gs), amax of gs -> byte, s, d = RN(s / gs).

    A zero scale is stored as 0.125. A block that is not finite or exceeds `limit` gets the byte 0x7F and s = d = NaN.
    SHARED: quotients through `divide_shared`; a block amax too small for it gives scale zero either way.
    """
    if SHARED:
        byte = e4m3_encode(gs * divide_shared(amax, 6.0, RCP_6), HARDWARE)
    else:
        byte = e4m3_encode(gs * tl.div_rn(amax, 6.0), HARDWARE)
    byte = tl.where(byte == 0, 0x20, byte)
    good = (amax.to(tl.int32, bitcast=True) < INFINITY_BITS) & (amax <= limit)
    byte = tl.where(good, byte, 0x7F)
    s = tl.where(good, e4m3_decode(byte, HARDWARE), float("nan"))
    if SHARED:
        return byte, s, divide_shared(s, gs, rcp)
    return byte, s, tl.div_rn(s, gs)


@triton.jit
def round_half(lo, hi, m):
    """E2M1 magnitudes of a half block scaled by m [NB]."""
    return e2m1_round(tl.abs(lo) * m[:, None]), e2m1_round(tl.abs(hi) * m[:, None])


@triton.jit
def round_half_divided(lo, hi, d, r, SHARED: tl.constexpr):
    """E2M1 magnitudes of a half block divided by d [NB], rounded as IEEE division; r = RN(1 / d) if SHARED."""
    lo, hi = tl.abs(lo), tl.abs(hi)
    if SHARED:
        return e2m1_round(divide_shared(lo, d[:, None], r[:, None])), e2m1_round(
            divide_shared(hi, d[:, None], r[:, None])
        )
    return e2m1_round(tl.div_rn(lo, d[:, None])), e2m1_round(tl.div_rn(hi, d[:, None]))


@triton.jit
def _sign_nibbles(lo, hi, NB: tl.constexpr):
    """int32 [NB]: the sign bits of 8 elements at the top of 8 nibbles."""
    if HARDWARE:
        e0, e1, e2, e3 = split4(lo, NB)
        o0, o1, o2, o3 = split4(hi, NB)
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 p, q, e, o;
            prmt.b32 p, $1, $2, 0x0073; prmt.b32 q, $3, $4, 0x0073; prmt.b32 e, p, q, 0x5410;
            prmt.b32 p, $5, $6, 0x0073; prmt.b32 q, $7, $8, 0x0073; prmt.b32 o, p, q, 0x5410;
            shr.b32 e, e, 4; and.b32 e, e, 0x08080808; and.b32 o, o, 0x80808080; or.b32 $0, e, o;
            }""",
            "=r,r,r,r,r,r,r,r,r",
            [e0, e1, e2, e3, o0, o1, o2, o3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    even = (lo.to(tl.int32, bitcast=True) >> 28) & 8
    odd = (hi.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.sum((even | odd) << (tl.arange(0, 4) * 8)[None, :], axis=1)


@triton.jit
def pack_half(v_lo, v_hi, lo, hi, NB: tl.constexpr):
    """8 codes a lane: E2M1 magnitudes v_lo, v_hi with the signs of lo, hi (all [NB, 4]) -> int32 [NB]."""
    pairs = e2m1_bits(v_lo) + (e2m1_bits(v_hi) << 4)  # two indices at bits 22..24 and 26..28, zeros elsewhere
    p0, p1, p2, p3 = split4(pairs, NB)
    return ((p0 >> 22) + (p1 >> 14) + (p2 >> 6) + (p3 << 2)) | _sign_nibbles(lo, hi, NB)


@triton.jit
def store_codes(ptr, block, first, second, mask):
    """Two int32 [NB] -> 8 bytes at block `block` int64 [NB] of a uint8 tensor."""
    word = (first.to(tl.int64) & 0xFFFFFFFF) | (second.to(tl.int64) << 32)
    tl.store(ptr.to(tl.pointer_type(tl.int64)) + block, word, mask=mask)


@triton.jit
def store_half(ptr, block, half: tl.constexpr, o_lo, o_hi, lo, hi, mask, NB: tl.constexpr, BF16: tl.constexpr):
    """8 values a lane, magnitudes o_lo, o_hi with the signs of lo, hi (all fp32 [NB, 4]), as bf16 or ptr's type."""
    if BF16:
        sign = (lo.to(tl.int32, bitcast=True) >> 16) & 0x8000 | hi.to(tl.int32, bitcast=True) & (-2147483648)
        words = ptr.to(tl.pointer_type(tl.int32)) + block[:, None] * 8 + half * 4 + tl.arange(0, 4)[None, :]
        tl.store(words, bf16_pair(o_lo, o_hi, HARDWARE) | sign, mask=mask[:, None])
    else:
        o_lo = (o_lo.to(tl.int32, bitcast=True) | lo.to(tl.int32, bitcast=True) & (-2147483648)).to(
            tl.float32, bitcast=True
        )
        o_hi = (o_hi.to(tl.int32, bitcast=True) | hi.to(tl.int32, bitcast=True) & (-2147483648)).to(
            tl.float32, bitcast=True
        )
        element = block[:, None] * 16 + half * 8 + tl.arange(0, 8)[None, :]
        tl.store(ptr + element, tl.reshape(tl.join(o_lo, o_hi), (NB, 8)), mask=mask[:, None])


@triton.jit
def swizzled(row, group, row_tiles_of_groups):
    """Byte offset of scale (row, group) in the 128x4 layout with `row_tiles_of_groups` = ceil(G / 4) tiles a row."""
    tile = (row >> 7).to(tl.int64) * row_tiles_of_groups + (group >> 2)
    return tile * 512 + (row & 31) * 16 + ((row >> 5) & 3) * 4 + (group & 3)
