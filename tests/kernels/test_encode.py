# SPDX-License-Identifier: Apache-2.0
"""Device functions of quads.kernels.encode against quads.numerics.formats, over every bf16 value and cast vectors."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import DEVICE, VECTORS, assert_bytes, load

from quads.kernels import encode
from quads.kernels.encode import LAUNCH
from quads.numerics import formats

HW = [False, pytest.param(True, marks=pytest.mark.gpu)]


@triton.jit
def _apply(x_ptr, y_ptr, count, WHAT: tl.constexpr, HW: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    x = tl.load(x_ptr + i, mask=i < count, other=0.0)
    if WHAT == "e4m3":
        y = encode.e4m3_encode(tl.abs(x), HW)
    elif WHAT == "e2m1":
        y = encode.e2m1_bits(encode.e2m1_round(tl.abs(x))) >> 22
    elif WHAT == "bf16":
        y = encode.bf16_bits(x, HW)
    else:
        y = encode.bf16_pair(x, x * -1.0, HW)  # -x is 0 - x in Triton: it loses the sign of zero
    tl.store(y_ptr + i, y, mask=i < count)


@triton.jit
def _decode(b_ptr, y_ptr, WHAT: tl.constexpr, HW: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    b = tl.load(b_ptr + i)
    if WHAT == "e4m3":
        y = encode.e4m3_decode(b, HW)
    elif WHAT == "e2m1":
        y = encode.e2m1_decode(b)
    elif WHAT == "low":
        y = encode.bf16_low(b)
    else:
        y = encode.bf16_high(b)
    tl.store(y_ptr + i, y)


def apply(x: torch.Tensor, what: str, hw: bool) -> torch.Tensor:
    y = torch.full(x.shape, -1, dtype=torch.int32, device=DEVICE)
    _apply[(triton.cdiv(x.numel(), 4096),)](x, y, x.numel(), WHAT=what, HW=hw, N=4096, **LAUNCH)
    return y


def decode(b: torch.Tensor, what: str, hw: bool = False) -> torch.Tensor:
    y = torch.full(b.shape, torch.inf, device=DEVICE)
    _decode[(1,)](b, y, WHAT=what, HW=hw, N=b.numel(), **LAUNCH)
    return y


def every_bf16() -> torch.Tensor:
    """All finite bf16 values and, around each, values one and three fp32 ulps away and halfway to the next."""
    patterns = torch.arange(2**16, dtype=torch.int32)
    patterns = patterns[(patterns & 0x7F80) != 0x7F80] << 16
    shifted = torch.cat([patterns + d for d in (0, 1, -1, 3, 0x7FFF, 0x8000, 0x8001)])
    x = shifted.view(torch.float32)
    return x[x.isfinite()].to(DEVICE)


@pytest.mark.parametrize("hw", HW)
def test_e4m3_encode(hw: bool) -> None:
    x = every_bf16()
    assert_bytes(apply(x, "e4m3", hw).to(torch.uint8), formats.encode_e4m3(x.abs()))


@pytest.mark.parametrize("hw", HW)
def test_casts_of_the_golden_vectors(hw: bool) -> None:
    v = load(VECTORS / "fp8_and_casts.npz")
    x = v["cast_in"][v["cast_in"].isfinite()]
    expected = v["cast_e4m3_satfinite"][v["cast_in"].isfinite()]
    assert_bytes(apply(x, "e4m3", hw).to(torch.uint8), expected & 0x7F)
    y, codes = v["cast4_in"], v["cast4_code"]
    keep = y.isfinite()
    assert_bytes(apply(y[keep], "e2m1", hw).to(torch.uint8), codes[keep] & 7)


def test_e2m1_round() -> None:
    x = every_bf16()
    assert_bytes(apply(x, "e2m1", False).to(torch.uint8), formats.encode_e2m1(formats.round_e2m1(x.abs())))


@pytest.mark.parametrize("hw", HW)
def test_bf16(hw: bool) -> None:
    x = every_bf16()
    expected = x.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
    assert torch.equal(apply(x, "bf16", hw), expected)
    assert torch.equal(apply(x, "pair", hw), expected | ((expected ^ 0x8000) << 16))


def test_nan_stays_nan_in_bf16() -> None:
    nan = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32, device=DEVICE).view(torch.float32)
    got = apply(nan, "bf16", not encode.INTERPRETED)
    assert bool((got & 0x7FFF > 0x7F80).all())


@pytest.mark.parametrize("hw", HW)
def test_decode(hw: bool) -> None:
    b = torch.arange(256, dtype=torch.int32, device=DEVICE)
    expected = formats.decode_e4m3(b.to(torch.uint8))
    got = decode(b, "e4m3", hw)
    assert torch.equal(got.isnan(), expected.isnan())
    assert_bytes(got.nan_to_num(), expected.nan_to_num())
    assert_bytes(decode(b[:16], "e2m1"), formats.decode_e2m1(b[:16].to(torch.uint8)))
    words = torch.tensor([0x3F80C000, -0x40000000, 0x00010002, 0], dtype=torch.int32, device=DEVICE)
    halves = words.view(torch.int16).view(torch.bfloat16).float().view(-1, 2)
    assert_bytes(decode(words, "low"), halves[:, 0].contiguous())
    assert_bytes(decode(words, "high"), halves[:, 1].contiguous())
