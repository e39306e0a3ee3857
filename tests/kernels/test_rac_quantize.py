# SPDX-License-Identifier: Apache-2.0
"""quads.kernels.rac_quantize, byte for byte against quads.numerics and the golden vectors; all outputs poisoned."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, VECTORS, assert_bytes, assert_same, bits, hard, load, poison

from quads.kernels import rac_quantize
from quads.numerics import packed
from quads.numerics.rac import RacSpec, select

TAGS = ["block16_sumsq_k125", "block16_sumsq_k500", "block16_abs_k500", "block16_sumsq_k1000"]


@pytest.fixture(autouse=True)
def _poison():
    with poison():
        yield


def random_mask(k: int, share: float, seed: int = 0) -> torch.Tensor:
    scores = torch.rand(k, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return select(scores, RacSpec(share)).to(DEVICE)


@pytest.mark.parametrize("layout", ["compact", "in_place"])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("token", [False, True])
def test_hard_values(token: bool, share: float, layout: str) -> None:
    for shape, dtype in (((9, 48), torch.bfloat16), ((7, 80), torch.float32)):
        x = hard(*shape, dtype=dtype)
        spec = RacSpec(share, mask="token" if token else "static")
        mask = None if token else random_mask(shape[-1], share)
        for gs in (None, torch.tensor(90.0, device=DEVICE), torch.rand(shape[0], 1, device=DEVICE) * 100 + 1):
            got = rac_quantize.pack_rac(x, spec, mask, gs, layout)
            assert_same(got, packed.pack_rac(x, spec, mask, gs, layout), f"{shape} {gs}")


def test_token_masks_by_magnitude_and_with_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal scores (repeated blocks, zero residuals) go to the lowest index."""
    monkeypatch.setattr(rac_quantize, "MASK_TILE", 16)
    block = hard(1, 16, seed=3)
    x = torch.cat([block.repeat(4, 6), hard(3, 96), torch.zeros(1, 96, dtype=torch.bfloat16, device=DEVICE)])
    for score in ("abs", "sumsq"):
        spec = RacSpec(0.5, mask="token", score=score)
        got, expected = rac_quantize.pack_rac(x, spec), packed.pack_rac(x, spec)
        assert got.blocks[0].tolist() == [0, 1, 2]
        assert_same(got, expected, score)


@pytest.mark.parametrize("tag", TAGS)
def test_golden_vectors(tag: str) -> None:
    v = load(VECTORS / "rac.npz")
    x, shared = v["x_bf16"], f"{tag}_shared"
    if f"q2_packed__{shared}" not in v:
        pytest.skip("the file holds no second pass for this tag")
    mask = bits(v[f"mask__{shared}"], x.shape[-1])
    got = rac_quantize.pack_rac(x, RacSpec(0.5), mask, v["gs_a"], "in_place")
    assert_bytes(got.first.codes, v["q1_packed"])
    assert_bytes(got.first.scales, v["q1_scale"])
    assert_bytes(got.second.codes, v[f"q2_packed__{shared}"])
    assert_bytes(got.second.scales, v[f"q2_scale__{shared}"])


def test_a_changed_mask_is_read_again() -> None:
    x, mask = hard(4, 64), random_mask(64, 0.25)
    first = rac_quantize.pack_rac(x, RacSpec(0.25), mask)
    mask.copy_(mask.roll(16))
    second = rac_quantize.pack_rac(x, RacSpec(0.25), mask)
    assert not torch.equal(first.blocks, second.blocks)
    assert_same(second, packed.pack_rac(x, RacSpec(0.25), mask))


def test_cancelled_residuals_are_positive_zero() -> None:
    """x = q * s exactly: the residual's codes must be 0, never 8 (minus zero)."""
    x = torch.tensor([-6.0, 4.0, -3.0, 2.0, -1.5, 1.0, -0.5, 0.0] * 4, device=DEVICE).view(1, 32).to(torch.bfloat16)
    got = rac_quantize.pack_rac(x, RacSpec(1.0), random_mask(32, 1.0))
    assert not bool(got.second.codes.any())


def test_refuses() -> None:
    x = hard(2, 32)
    with pytest.raises(ValueError, match="batch mask"):
        rac_quantize.pack_rac(x, RacSpec(0.5, mask="batch"))
    with pytest.raises(ValueError, match="whole 16-blocks"):
        rac_quantize.pack_rac(x, RacSpec(0.5, "channel"), random_mask(32, 0.5))
    with pytest.raises(ValueError, match="cuts one"):
        rac_quantize.pack_rac(x, RacSpec(0.5), torch.arange(32, device=DEVICE) < 8)
    with pytest.raises(ValueError, match="no static_mask"):
        rac_quantize.pack_rac(x, RacSpec(0.5))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1000, 2048), (33, 768), (5, 16384), (4099, 48)])
@pytest.mark.parametrize("share", [0.125, 0.5, 1.0])
def test_large(shape, share: float) -> None:
    x = (torch.randn(shape, device=DEVICE) * torch.exp2(torch.randn(shape[0], 1, device=DEVICE) * 4)).to(torch.bfloat16)
    mask = random_mask(shape[1], share)
    gs = torch.tensor(2688.0, device=DEVICE) / x.abs().max().float()
    for spec, chosen in ((RacSpec(share), mask), (RacSpec(share, mask="token"), None)):
        for scale in (None, gs):
            for layout in ("compact", "in_place"):
                got = rac_quantize.pack_rac(x, spec, chosen, scale, layout)
                assert_same(got, packed.pack_rac(x, spec, chosen, scale, layout), f"{spec} {layout}")


@pytest.mark.gpu
def test_runs_in_a_cuda_graph_after_one_call() -> None:
    x, mask = hard(64, 256), random_mask(256, 0.5)
    expected = rac_quantize.pack_rac(x, RacSpec(0.5), mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = rac_quantize.pack_rac(x, RacSpec(0.5), mask)
    got.second.codes.fill_(255)
    graph.replay()
    assert_same(got, expected)
