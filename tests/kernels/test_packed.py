# SPDX-License-Identifier: Apache-2.0
"""quads.kernels.packed: the layout decoded by hand, the kernel against its definition."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from gemm_cases import DEVICE, gaussian, poison, relative_error, wide_range
from tolerances import TOLERANCES

from quads.kernels import packed as pk
from quads.kernels.rac_gemm import terms
from quads.numerics import nvfp4
from quads.numerics.formats import decode_e2m1, decode_e4m3
from quads.numerics.qdq import ActivationQ, WeightQ, emulated_linear, quantize_activation, quantize_weight, weight_amax

LIMIT = TOLERANCES["gemm_fp32_accumulation"].limit


@pytest.fixture(autouse=True)
def _poison():
    with poison():
        yield


def weight(*shape: int, make=gaussian, seed: int = 7, order=None):
    """WeightQ and PackedWeight of the same random weight."""
    w = make(*shape, seed=seed)
    nv = nvfp4.quantize(w.bfloat16().float(), nvfp4.global_scale(weight_amax(w)), "verl_export")
    wq = quantize_weight(w, "nvfp4")
    return wq, pk.prepack(nv.codes, nv.scales, wq.rcp, order)


def decode(p: pk.PackedWeight, e: int, n: int, k: int) -> float:
    """One q*s, bit by bit as the module docstring states the layout."""
    tile, block, position = k // 128, k % 128 // 16, k % 16
    g, slot = block // 4, block % 4
    word = int(p.words[e, tile, n, 2 * (position // 2) + g]) & 0xFFFFFFFF
    half = word >> 16 if position % 2 else word & 0xFFFF
    sign_bit, magnitude_bits = [(15, (8, 7, 6)), (12, (5, 4, 3)), (9, (2, 1, 0)), (14, (11, 10, 13))][slot]
    index = sum((half >> bit & 1) << (2 - i) for i, bit in enumerate(magnitude_bits))
    byte = (int(p.scales[e, tile, g, n]) >> (8 * slot)) & 0xFF
    value = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[index] * (1 + (byte & 7) / 8) * 2.0 ** ((byte >> 3) - 21)
    return -value if half >> sign_bit & 1 else value


def test_layout_bit_by_bit() -> None:
    wq, p = weight(2, 5, 160)
    for e in range(2):
        for n in range(5):
            assert [decode(p, e, n, k) for k in range(160)] == wq.qs[e, n].tolist()


def test_every_scale_and_code() -> None:
    """All finite E4M3 scales, subnormal ones and zero too, times all codes."""
    scales = torch.arange(127, dtype=torch.uint8, device=DEVICE).repeat(2)[: 16 * 8].view(16, 8)
    codes = torch.arange(16, dtype=torch.uint8, device=DEVICE).repeat(16, 8)
    p = pk.prepack(codes, scales, torch.ones(1, 1, device=DEVICE))
    eye = torch.eye(128, dtype=torch.bfloat16, device=DEVICE)
    y = pk.packed(eye[None], torch.ones(128, device=DEVICE), p, torch.float32)
    expected = decode_e2m1(codes) * decode_e4m3(scales).repeat_interleave(16, -1)
    assert torch.equal(y.mT, expected)


@pytest.mark.parametrize("shape", [(1, 16, 16), (10, 40, 144), (33, 33, 256), (5, 64, 128)])
@pytest.mark.parametrize("make", [gaussian, wide_range])
def test_packed(shape, make) -> None:
    T, N, K = shape
    x = make(T, K)
    wq, p = weight(N, K, make=make)
    t = terms(x)
    y = pk.packed(t.first[None].contiguous(), t.rcp, p, torch.float32)
    assert relative_error(y, t.first, None, t.rcp, wq.qs, wq.rcp.expand(N, 1)) <= LIMIT
    if make is gaussian:
        y = pk.packed(t.first[None].contiguous(), t.rcp, p, torch.bfloat16)
        assert torch.equal(y, emulated_linear(quantize_activation(x, "nvfp4"), wq, torch.bfloat16))


@pytest.mark.parametrize("loads", [[3, 0, 7], [0, 0, 10], [20, 1, 16]])
def test_grouped(loads: list[int]) -> None:
    R, N, K = sum(loads), 40, 144
    x = gaussian(R, K)
    wq, p = weight(3, N, K)
    bounds = [0, *torch.tensor(loads).cumsum(0).tolist()]
    offsets = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    t, a = terms(x), quantize_activation(x, "nvfp4")
    y = pk.packed(t.first[None].contiguous(), t.rcp, p, torch.float32, offsets)
    for e, (lo, hi) in enumerate(pairwise(bounds)):
        expected = emulated_linear(ActivationQ(a.qs[lo:hi], a.rcp[lo:hi]), WeightQ(wq.qs[e], wq.rcp[e]), torch.float32)
        assert torch.allclose(y[lo:hi], expected, rtol=1e-5, atol=1e-5)


def test_size() -> None:
    """4.5 bits a weight when K is a multiple of 128."""
    _, p = weight(64, 256)
    assert p.words.nbytes + p.scales.nbytes == 64 * 256 * 9 // 16


def test_errors() -> None:
    _, p = weight(16, 32)
    t = terms(gaussian(4, 32))
    with pytest.raises(ValueError, match=r"\[1 or 2, T, 32\]"):
        pk.packed(t.first, t.rcp, p, torch.float32)
    with pytest.raises(ValueError, match="bfloat16"):
        pk.packed(t.first[None].float(), t.rcp, p, torch.float32)
    with pytest.raises(ValueError, match="offsets"):
        pk.packed(t.first[None].contiguous(), t.rcp, weight(2, 16, 32)[1], torch.float32)
    with pytest.raises(ValueError, match="not negative"):
        pk.prepack(torch.zeros(1, 16, dtype=torch.uint8), torch.full((1, 1), 0x80, dtype=torch.uint8), torch.ones(1, 1))
    with pytest.raises(ValueError, match="need scales"):
        pk.prepack(torch.zeros(1, 32, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8), torch.ones(1, 1))
