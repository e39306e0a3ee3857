# SPDX-License-Identifier: Apache-2.0
"""quads.kernels.gemm against its definition and against float64 sums."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from gemm_cases import DEVICE, gaussian, poison, relative_error, wide_range
from tolerances import TOLERANCES

from quads.kernels import gemm
from quads.kernels.rac_gemm import terms
from quads.numerics.qdq import ActivationQ, WeightQ, emulated_linear, quantize_activation, quantize_weight

LIMIT = TOLERANCES["gemm_fp32_accumulation"].limit
SHAPES = [(1, 16, 16), (10, 40, 144), (17, 33, 48), (33, 16, 256)]


@pytest.fixture(autouse=True)
def _poison():
    with poison():
        yield


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [gaussian, wide_range])
def test_linear(shape, make) -> None:
    T, N, K = shape
    x, w = make(T, K), make(N, K, seed=7)
    wq, t = quantize_weight(w, "nvfp4"), terms(x)
    y = gemm.linear(t.first, t.rcp, gemm.cache(wq), torch.float32)
    assert relative_error(y, t.first, None, t.rcp, wq.qs, wq.rcp.expand(N, 1)) <= LIMIT
    if make is gaussian and DEVICE == "cpu":
        assert torch.equal(y, emulated_linear(quantize_activation(x, "nvfp4"), wq, torch.float32))


def test_wide_range_data_would_show_rounded_products() -> None:
    """The vectors can fail a kernel: operands dequantized to bf16 are far outside the limit."""
    x, w = wide_range(10, 144), wide_range(40, 144, seed=7)
    wq, t = quantize_weight(w, "nvfp4"), terms(x)
    wrong = (t.first.float() * t.rcp).bfloat16().float() @ wq.dequantize().bfloat16().float().mT
    assert relative_error(wrong, t.first, None, t.rcp, wq.qs, wq.rcp.expand(40, 1)) > 100 * LIMIT


@pytest.mark.parametrize("bias", [False, True])
def test_bf16_output_is_rounded_once(bias: bool) -> None:
    x, w = gaussian(10, 144), gaussian(40, 144, seed=7)
    b = gaussian(40, seed=9) if bias else None
    wq, t = quantize_weight(w, "nvfp4"), terms(x)
    y = gemm.linear(t.first, t.rcp, gemm.cache(wq), torch.bfloat16, b)
    assert torch.equal(y, emulated_linear(quantize_activation(x, "nvfp4"), wq, torch.bfloat16, b))


def test_rows_of_one_weight_may_have_scales_of_their_own() -> None:
    x, w = gaussian(5, 32), gaussian(16, 32, seed=7)
    wq, t = quantize_weight(w, "nvfp4"), terms(x)
    rcp = wq.rcp * torch.arange(1, 17, device=DEVICE).view(16, 1)
    y = gemm.linear(t.first, t.rcp, gemm.cache(WeightQ(wq.qs, rcp)), torch.float32)
    expected = emulated_linear(quantize_activation(x, "nvfp4"), WeightQ(wq.qs, rcp), torch.float32)
    assert relative_error(y, t.first, None, t.rcp, wq.qs, rcp) <= LIMIT
    assert torch.allclose(y, expected, rtol=1e-6)


def test_no_tokens() -> None:
    w = gemm.cache(quantize_weight(gaussian(16, 32), "nvfp4"))
    empty = torch.empty(0, 32, dtype=torch.bfloat16, device=DEVICE)
    assert gemm.linear(empty, torch.empty(0, 1, device=DEVICE), w, torch.float32).shape == (0, 16)


@pytest.mark.parametrize("loads", [[3, 0, 7], [0, 0, 10], [10, 0, 0], [1, 1, 1], [20, 33, 16]])
def test_grouped(loads: list[int]) -> None:
    R, N, K = sum(loads), 40, 80
    x, w = gaussian(R, K), gaussian(3, N, K, seed=7)
    wq, t = quantize_weight(w, "nvfp4"), terms(x)
    bounds = [0, *torch.tensor(loads).cumsum(0).tolist()]
    offsets = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    y = gemm.grouped(t.first, t.rcp, gemm.cache(wq), offsets, torch.float32)
    a = quantize_activation(x, "nvfp4")
    for e, (lo, hi) in enumerate(pairwise(bounds)):
        own = ActivationQ(a.qs[lo:hi], a.rcp[lo:hi])
        expected = emulated_linear(own, WeightQ(wq.qs[e], wq.rcp[e]), torch.float32)
        assert torch.allclose(y[lo:hi], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [1, 4, 16])
def test_group_rows_covers_every_row_once(block: int) -> None:
    generator = torch.Generator().manual_seed(block)
    for _ in range(20):
        loads = torch.randint(0, 9, (7,), generator=generator) * torch.randint(0, 2, (7,), generator=generator)
        bounds = [0, *loads.cumsum(0).tolist()]
        groups = gemm.group_rows(torch.tensor(bounds, dtype=torch.int32), bounds[-1], block)
        covered = []
        for e, row in zip(groups.expert.tolist(), groups.row.tolist(), strict=True):
            if e >= 0:
                covered += [(e, r) for r in range(row, min(row + block, bounds[e + 1]))]
        assert covered == [(e, r) for e in range(7) for r in range(bounds[e], bounds[e + 1])]


def test_errors_name_the_operand() -> None:
    w = gemm.cache(quantize_weight(gaussian(16, 32), "nvfp4"))
    t = terms(gaussian(4, 32))
    with pytest.raises(ValueError, match="do not fit"):
        gemm.linear(t.first[:, :16].contiguous(), t.rcp, w, torch.float32)
    with pytest.raises(ValueError, match="bfloat16"):
        gemm.linear(t.first.float(), t.rcp, w, torch.float32)
    with pytest.raises(ValueError, match="one value per row"):
        gemm.linear(t.first, t.rcp[:2], w, torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        gemm.linear(t.first.mT.contiguous().mT, t.rcp, w, torch.float32)
    with pytest.raises(ValueError, match="known: triton, cublas"):
        gemm.linear(t.first, t.rcp, w, torch.float32, method="magic")
    if DEVICE == "cpu":
        with pytest.raises(ValueError, match="not exact in bf16"):
            gemm.cache(WeightQ(quantize_weight(gaussian(16, 32), "nvfp4").dequantize(), torch.ones(1, 1)))


@pytest.mark.gpu
def test_uniform_scale_refuses_graph_capture() -> None:
    w = gemm.cache(quantize_weight(gaussian(64, 64), "nvfp4"))
    t = terms(gaussian(16, 64))
    gemm.linear_uniform(t.first, 0.5, w)
    with pytest.raises(RuntimeError, match="weight update"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        gemm.linear_uniform(t.first, 0.5, w)


@pytest.mark.gpu
def test_graph_replay_sees_new_weights() -> None:
    """Fixed addresses, no host value baked in: a refresh in place reaches a captured graph."""
    first, second = (gemm.cache(quantize_weight(gaussian(64, 128, seed=s) * s, "nvfp4")) for s in (1, 2))
    live = gemm.CachedWeight(first.qs.clone(), first.rcp.clone())
    t = terms(gaussian(16, 128))
    expected = gemm.linear(t.first, t.rcp, second, torch.bfloat16)
    gemm.linear(t.first, t.rcp, live, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = gemm.linear(t.first, t.rcp, live, torch.bfloat16)
    live.qs.copy_(second.qs)
    live.rcp.copy_(second.rcp)
    graph.replay()
    assert torch.equal(y, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [gemm.DENSE, gemm.GROUPED, gemm.GROUPED_RAC])
def test_large_tiles(tile: gemm.Tile) -> None:
    x, w = gaussian(700, 1024), gaussian(1000, 1024, seed=7)
    wq, t = quantize_weight(w, "nvfp4"), terms(x)
    y = gemm.linear(t.first, t.rcp, gemm.cache(wq), torch.float32, tile=tile)
    assert relative_error(y, t.first, None, t.rcp, wq.qs, wq.rcp.expand(1000, 1)) <= LIMIT
