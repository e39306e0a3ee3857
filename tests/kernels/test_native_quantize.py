# SPDX-License-Identifier: Apache-2.0
"""quads.kernels.native_quantize, byte for byte against quads.numerics; outputs poisoned."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, assert_bytes, hard, poison

from quads.kernels import native_quantize
from quads.kernels.native_quantize import pack_terms, torch_terms
from quads.numerics import nvfp4, packed
from quads.numerics.qdq import quantize_activation
from quads.numerics.rac import RacSpec, select


@pytest.fixture(autouse=True)
def _poison():
    with poison():
        yield


def random_mask(k: int, spec: RacSpec | None, seed: int = 0) -> torch.Tensor | None:
    if spec is None or spec.mask != "static":
        return None
    return select(torch.rand(k, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), spec).to(DEVICE)


def decoded(p: native_quantize.Operand) -> torch.Tensor:
    return nvfp4.to_qs(nvfp4.NVFP4(nvfp4.unpack(p.codes), p.scales, p.rcp))


def check(x: torch.Tensor, spec: RacSpec | None, mask: torch.Tensor | None) -> None:
    """Operands against those of torch, their decoded sum against the definition, bytes against numerics.packed."""
    got, expected = pack_terms(x, spec, mask), torch_terms(x.contiguous(), spec, mask)
    for part in (0, 1) if spec else (0,):
        for name, g, e in zip(got.first._fields, got[part], expected[part], strict=True):
            assert_bytes(g, e, f"{spec} {part} {name}")
    a = quantize_activation(x, "nvfp4", spec, mask)
    total = decoded(got.first) + (decoded(got.second) if spec else 0)
    assert torch.equal(total, a.qs) and torch.equal(got.first.rcp, a.rcp.squeeze(-1))
    if spec and spec.granularity == "block16" and (mask is None or bool(mask.any())):
        both = packed.pack_rac(x, spec, mask, layout="in_place")
        for p, q in zip((got.first, got.second), (both.first, both.second), strict=True):
            assert_bytes(p.codes, q.codes, "codes")
            assert_bytes(p.scales, q.scales, "scales")


SPECS = [
    None,
    RacSpec(0.3),
    RacSpec(1.0),
    RacSpec(0.3, "channel"),
    RacSpec(0.3, mask="token"),
    RacSpec(0.5, mask="token", score="abs"),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(("shape", "dtype"), [((9, 48), torch.bfloat16), ((7, 80), torch.float32), ((2, 16), None)])
def test_hard_values(spec, shape, dtype) -> None:
    x = hard(*shape, dtype=dtype or torch.float16)
    check(x if dtype else x.nan_to_num(0, 6e4, -6e4), spec, random_mask(shape[1], spec))


def test_off_the_mask_is_zero() -> None:
    x, mask = hard(5, 64), torch.arange(64, device=DEVICE) < 32
    second = pack_terms(x, RacSpec(0.5), mask).second
    assert not second.codes[:, 16:].any() and not second.scales[:, 2:].any() and bool(second.codes.any())


@pytest.mark.parametrize("spec", [RacSpec(0.5, mask="batch"), RacSpec(0.5, "channel", "token")], ids=str)
def test_masks_without_a_kernel_are_packed_by_torch(spec) -> None:
    check(hard(6, 64), spec, None)


@pytest.mark.parametrize("spec", [None, RacSpec(0.5), RacSpec(0.5, mask="token")], ids=str)
def test_empty_and_strided_inputs(spec) -> None:
    mask = random_mask(64, spec)
    empty = pack_terms(hard(3, 64)[:0], spec, mask)
    assert empty.first.codes.shape == (0, 32) and empty.first.rcp.shape == (0,)
    wide = hard(6, 160)
    for x in (wide[:, 1:65], wide[::2, 16:80], hard(6, 64).T.contiguous().T):
        check(x, spec, mask)


def test_an_overwritten_mask_is_seen() -> None:
    """Same tensor, written through a view that does not count as a new version of it."""
    x, spec = hard(4, 64), RacSpec(0.5)
    mask = random_mask(64, spec)
    before = pack_terms(x, spec, mask).second
    mask.data.copy_(~mask)
    after = pack_terms(x, spec, mask).second
    assert_bytes(after.codes, torch_terms(x, spec, mask).second.codes, "codes")
    assert not torch.equal(before.codes, after.codes)


@pytest.mark.parametrize("spec", [None, RacSpec(0.5)], ids=str)
def test_a_row_that_is_not_finite_becomes_nan(spec) -> None:
    x = hard(3, 64).float()
    x[1, 5] = float("nan")
    rcp = pack_terms(x, spec, random_mask(64, spec)).first.rcp
    assert rcp.isnan().tolist() == [False, True, False]


def test_a_missing_mask_is_an_error() -> None:
    with pytest.raises(ValueError, match="static"):
        pack_terms(hard(3, 64), RacSpec(0.5))
