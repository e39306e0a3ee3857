# SPDX-License-Identifier: Apache-2.0
"""quads.kernels.terms, byte for byte against quads.numerics; outputs poisoned."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, assert_bytes, hard, poison

from quads.kernels import rac_gemm, terms
from quads.numerics.nvfp4 import global_scale
from quads.numerics.qdq import quantize_activation
from quads.numerics.rac import RacSpec, select


@pytest.fixture(autouse=True)
def _poison():
    with poison():
        yield


def random_mask(k: int, spec: RacSpec, seed: int = 0) -> torch.Tensor | None:
    if spec.mask != "static":
        return None
    return select(torch.rand(k, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), spec).to(DEVICE)


def check(x: torch.Tensor, spec: RacSpec | None, mask: torch.Tensor | None) -> None:
    """Terms against the torch terms, and their sum against the definition."""
    got, expected = terms.terms(x, spec, mask), rac_gemm.terms(x, spec, mask)
    assert_bytes(got.first, expected.first, f"{spec} first")
    assert_bytes(got.rcp, expected.rcp, f"{spec} rcp")
    a = quantize_activation(x, "nvfp4", spec, mask)
    total = got.first.float()
    if spec is not None:
        assert_bytes(got.second, expected.second, f"{spec} second")
        total = total + got.second.float()
    assert torch.equal(total, a.qs) and torch.equal(got.rcp, a.rcp)


SPECS = [
    None,
    RacSpec(0.0),
    RacSpec(0.3),
    RacSpec(1.0),
    RacSpec(0.3, "channel"),
    RacSpec(0.0, mask="token"),
    RacSpec(0.3, mask="token"),
    RacSpec(0.5, mask="token", score="abs"),
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("shape", "dtype"), [((9, 48), torch.bfloat16), ((7, 80), torch.float32), ((2, 16), None)])
def test_hard_values(spec, shape, dtype) -> None:
    x = hard(*shape, dtype=dtype or torch.float16)
    check(x if dtype else x.nan_to_num(0, 6e4, -6e4), spec, random_mask(shape[1], spec) if spec else None)


def test_a_mask_may_cut_a_block() -> None:
    check(hard(5, 64), RacSpec(0.5), torch.arange(64, device=DEVICE) % 5 < 2)


@pytest.mark.parametrize("spec", [None, RacSpec(0.5), RacSpec(0.5, mask="token")])
def test_empty_and_strided_inputs(spec) -> None:
    mask = random_mask(64, spec) if spec else None
    empty = terms.terms(hard(3, 64)[:0], spec, mask)
    assert empty.first.shape == (0, 64) and empty.rcp.shape == (0, 1)
    wide = hard(6, 160)
    for x in (wide[:, 1:65], wide[::2, 16:80], hard(6, 64).T.contiguous().T):
        check(x, spec, mask)


def test_an_overwritten_mask_is_seen() -> None:
    """Same tensor, written through a view that does not count as a new version of it."""
    x, spec = hard(4, 64), RacSpec(0.5)
    mask = random_mask(64, spec)
    before = terms.terms(x, spec, mask).second
    mask.data.copy_(~mask)
    after = terms.terms(x, spec, mask).second
    assert_bytes(after, rac_gemm.terms(x, spec, mask).second)
    assert not torch.equal(before, after)


def test_non_finite_rows_give_nan_and_leave_the_others_alone() -> None:
    x = hard(4, 64)
    x[2, 5] = float("nan")
    for spec in (None, RacSpec(0.5), RacSpec(0.5, mask="token")):
        mask = random_mask(64, spec) if spec else None
        got, clean = terms.terms(x, spec, mask), terms.terms(x[[0, 1, 3]], spec, mask)
        assert bool(got.rcp[2].isnan())
        for g, c in zip(got, clean, strict=True):
            if g is not None:
                assert_bytes(g[[0, 1, 3]], c)


def test_refuses() -> None:
    x = hard(2, 32)
    with pytest.raises(ValueError, match="batch mask needs the scores"):
        terms.terms(x, RacSpec(0.5, mask="batch"))
    with pytest.raises(ValueError, match="whole 16-blocks"):
        terms.terms(x, RacSpec(0.5, "channel", "token"))
    with pytest.raises(ValueError, match="no static_mask"):
        terms.terms(x, RacSpec(0.5))
    with pytest.raises(ValueError, match="must be bool"):
        terms.terms(x, RacSpec(0.5), torch.ones(16, dtype=torch.bool, device=DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1000, 2048), (33, 768), (5, 16384), (4099, 48)])
def test_large(shape) -> None:
    x = (torch.randn(shape, device=DEVICE) * torch.exp2(torch.randn(shape[0], 1, device=DEVICE) * 4)).to(torch.bfloat16)
    for spec in SPECS:
        check(x, spec, random_mask(shape[1], spec) if spec else None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("spec", [None, RacSpec(0.3), RacSpec(0.3, "channel")])
def test_parts_of_tokens_with_their_scale_are_parts_of_the_terms(spec, dtype) -> None:
    x = hard(9, 160, dtype=dtype).nan_to_num(0, 6e4, -6e4)
    mask = random_mask(160, spec) if spec else None
    whole, gs = terms.terms(x, spec, mask), global_scale(x.float().abs().amax(-1, keepdim=True))
    for part in (slice(0, 64), slice(64, 160)):
        own = None if mask is None else mask[part].contiguous()
        got = terms.terms(x[:, part], spec, own, gs)
        assert_bytes(got.first, whole.first[:, part].contiguous(), f"{spec} first")
        assert_bytes(got.rcp, whole.rcp, f"{spec} rcp")
        if spec is not None:
            assert_bytes(got.second, whole.second[:, part].contiguous(), f"{spec} second")
    alone = [terms.terms(x[:, part]).rcp for part in (slice(0, 64), slice(64, 160))]
    assert any(not torch.equal(rcp, whole.rcp) for rcp in alone)
    assert terms.terms(x[:1, :64], None, None, gs[:1]).rcp.shape == (1, 1)
