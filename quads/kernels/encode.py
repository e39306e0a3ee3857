# SPDX-License-Identifier: Apache-2.0
"""Triton device functions that every kernel shares: E2M1, E4M3 and BF16 encoding, bit-equal to `quads.numerics`.

    e2m1_round(a)         a >= 0 fp32 -> nearest E2M1 magnitude (ties to even mantissa), saturating at 6
    e2m1_bits(v)          E2M1 magnitude -> its 3-bit index, at bits 22..24 of an int32 (`>> 22` is the index)
    e2m1_decode(code)     4-bit code (sign << 3 | index) -> fp32
    e4m3_encode(v, HW)    v >= 0 fp32 -> E4M3 byte as int32, saturating at 448
    e4m3_decode(b, HW)    E4M3 byte as int32 -> fp32
    bf16_bits(x, HW)      fp32 -> bf16 bit pattern as int32 (low 16 bits), nearest even
    bf16_pair(lo, hi, HW) two fp32 -> int32 holding both bf16 patterns, lo in the low half
    bf16_low(w), bf16_high(w)   the two bf16 halves of an int32 word as fp32

All work elementwise on tensors of any shape. `HW` is a `tl.constexpr` switch: True uses the GPU's conversion
instructions, False pure integer and fp32 operations. Both give the same bits (a GPU test compares them over every
bf16 value); kernels pass `HARDWARE`, which is False in Triton's CPU interpreter, whose casts are wrong: no mantissa
carry into float8e4nv, truncation into bfloat16.

Differs from the obvious in three places, each visible in bits: `/` in Triton is an approximate division, so kernels
call `tl.div_rn`; ptxas contracts a * b - c into one rounding, so kernels are launched with `LAUNCH` (contraction off)
and say `tl.fma` where one rounding is meant; and NaN is lost by float maxima, so amaxes are maxima of bit patterns.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
HARDWARE = tl.constexpr(not INTERPRETED)
# Options of every launch. The interpreter knows no compiler options.
LAUNCH: dict[str, bool] = {} if INTERPRETED else {"enable_fp_fusion": False}

# Constants read inside kernels must be constexpr; they mirror quads.numerics.formats.
RCP_6 = tl.constexpr(0.16666667163372040)  # RN32(1 / 6)
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def e2m1_round(a):
    """Nearest E2M1 magnitude of fp32 a >= 0, ties to even mantissa, saturating at 6; never NaN for NaN-free input.

    (a + c) - c rounds to a multiple of ulp(c); c = 1.5 * 2^(22 + e), with e the exponent of a clamped to [0, 2], has
    ulp 2^e / 2: E2M1's spacing in that binade and, for e = 0, below it. Both steps are exact in their product.
    """
    a = tl.minimum(a, 6.0)
    power = tl.maximum((a.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 1.0)
    return tl.fma(power, -6291456.0, tl.fma(power, 6291456.0, a))


@triton.jit
def e2m1_bits(v):
    """int32 with the index 0..7 of an E2M1 magnitude at bits 22..24, zeros elsewhere.

    v * 2^-126 is exact and leaves E2M1's exponent and mantissa adjacent at the top of the mantissa field.
    """
    return (v * 1.1754943508222875e-38).to(tl.int32, bitcast=True)


@triton.jit
def e2m1_decode(code):
    """fp32 value of a code 0..15 (int32): the index's bits are an fp32 exponent and mantissa, rescaled by 2^126."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def e4m3_encode(v, HW: tl.constexpr):
    """E4M3 byte (int32) of fp32 v >= 0, nearest even, saturating at 448. NaN gives an unspecified finite byte."""
    v = tl.minimum(v, 448.0)
    if HW:
        return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    u = v.to(tl.int32, bitcast=True)
    normal = ((u + 0x7FFFF + ((u >> 20) & 1)) >> 20) - 960  # round at mantissa bit 20, rebias the exponent 127 -> 7
    subnormal = (v * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000  # multiples of 2^-9
    return tl.where(v < 0.015625, subnormal, normal)


@triton.jit
def e4m3_decode(b, HW: tl.constexpr):
    """fp32 value of an E4M3 byte (int32 0..255); the NaN byte 0x7F decodes to NaN."""
    if HW:
        return b.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    bits = ((b & 0x7F) << 20) | ((b & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120: rebias 7 -> 127, subnormals included
    return tl.where((b & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def bf16_bits(x, HW: tl.constexpr):
    """int32 whose low half is the bf16 pattern of fp32 x, nearest even; any NaN becomes 0x7FFF or a quiet NaN."""
    if HW:
        return x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    u = x.to(tl.int32, bitcast=True)
    rounded = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16) & 0xFFFF
    return tl.where((u & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, rounded)


@triton.jit
def bf16_pair(lo, hi, HW: tl.constexpr):
    """int32 word of two fp32 tensors rounded to bf16: lo in the low half (the lower address)."""
    if HW:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [lo, hi], dtype=tl.int32, is_pure=True, pack=1
        )
    return bf16_bits(lo, HW) | (bf16_bits(hi, HW) << 16)


@triton.jit
def bf16_low(w):
    """fp32 of the bf16 in the low half of an int32 word (the element at the lower address)."""
    return (w << 16).to(tl.float32, bitcast=True)


@triton.jit
def bf16_high(w):
    """fp32 of the bf16 in the high half of an int32 word."""
    return (w & -65536).to(tl.float32, bitcast=True)
