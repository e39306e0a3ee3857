# SPDX-License-Identifier: Apache-2.0
"""All forms of the RAC GEMM against the definition."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from gemm_cases import DEVICE, gaussian, poison, relative_error, wide_range
from test_packed import weight
from tolerances import TOLERANCES

from quads.kernels import gemm, rac_gemm
from quads.numerics.qdq import ActivationQ, WeightQ, emulated_linear, quantize_activation
from quads.numerics.rac import RacSpec

LIMIT = TOLERANCES["gemm_fp32_accumulation"].limit
SPEC = RacSpec(0.5)


@pytest.fixture(autouse=True)
def _poison():
    with poison():
        yield


def block_mask(K: int, blocks: list[int]) -> torch.Tensor:
    mask = torch.zeros(K // 16, dtype=torch.bool)
    mask[blocks] = True
    return mask.repeat_interleave(16).to(DEVICE)


@pytest.mark.parametrize(
    "spec", [None, SPEC, RacSpec(0.3, "channel", "token"), RacSpec(0.25, mask="batch", score="abs")]
)
@pytest.mark.parametrize("make", [gaussian, wide_range])
def test_terms_add_up_to_the_definition(spec, make) -> None:
    x = make(9, 96)
    mask = block_mask(96, [0, 2, 5]) if spec is SPEC else None
    t, a = rac_gemm.terms(x, spec, mask), quantize_activation(x, "nvfp4", spec, mask)
    total = t.first.float() if t.second is None else t.first.float() + t.second.float()
    assert torch.equal(total, a.qs) and torch.equal(t.rcp, a.rcp)


def form(name: str, t, wq, nv, mask, offsets=None) -> torch.Tensor:
    """y fp32 by one form; nv: packs the weight in a given order."""
    order, blocks = rac_gemm.masked_first(mask), rac_gemm.selected_blocks(mask)
    w = gemm.cache(wq)
    sorted_t, sorted_w = rac_gemm.order_terms(t, order, blocks.numel()), rac_gemm.order_weight(w, order)
    if name == "A":
        augmented = rac_gemm.augment(w, blocks)
        if offsets is not None:
            return rac_gemm.form_a_grouped(t, augmented, blocks, offsets, torch.float32)
        return rac_gemm.form_a(t, augmented, blocks, torch.float32)
    if name == "A1":
        tile = gemm.SMALL if gemm.INTERPRET else gemm.Tile(16, 64, 16, 2, 2, 4)
        return rac_gemm.form_a_once(sorted_t, sorted_w, torch.float32, tile)
    if name == "B":
        return rac_gemm.form_b(t, w, rac_gemm.take_blocks(w.qs, blocks), blocks, torch.float32)
    if name == "D" and offsets is not None:
        return rac_gemm.form_d_grouped(sorted_t, sorted_w, offsets, torch.float32)
    if name == "D":
        return rac_gemm.form_d(sorted_t, sorted_w, torch.float32)
    return rac_gemm.form_d_packed(t, nv(order), blocks.numel(), torch.float32, offsets)


@pytest.mark.parametrize("blocks", [[0], [1, 4, 5, 8], list(range(9))])
@pytest.mark.parametrize("name", ["A", "A1", "B", "D", "packed"])
@pytest.mark.parametrize("make", [gaussian, wide_range])
def test_dense(name: str, blocks: list[int], make) -> None:
    x, mask = make(10, 144), block_mask(144, blocks)
    wq, _ = weight(40, 144, make=make)
    t = rac_gemm.terms(x, SPEC, mask)
    y = form(name, t, wq, lambda order: weight(40, 144, make=make, order=order)[1], mask)
    assert relative_error(y, t.first, t.second, t.rcp, wq.qs, wq.rcp.expand(40, 1)) <= LIMIT


@pytest.mark.parametrize("loads", [[3, 0, 7], [0, 20, 1]])
@pytest.mark.parametrize("name", ["A", "D", "packed"])
def test_grouped_uneven(name: str, loads: list[int]) -> None:
    R, mask = sum(loads), block_mask(144, [1, 4, 5, 8])
    x = gaussian(R, 144)
    wq, _ = weight(3, 40, 144)
    bounds = [0, *torch.tensor(loads).cumsum(0).tolist()]
    offsets = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    t, a = rac_gemm.terms(x, SPEC, mask), quantize_activation(x, "nvfp4", SPEC, mask)
    y = form(name, t, wq, lambda order: weight(3, 40, 144, order=order)[1], mask, offsets)
    for e, (lo, hi) in enumerate(pairwise(bounds)):
        expected = emulated_linear(ActivationQ(a.qs[lo:hi], a.rcp[lo:hi]), WeightQ(wq.qs[e], wq.rcp[e]), torch.float32)
        assert torch.allclose(y[lo:hi], expected, rtol=1e-5, atol=1e-5)


def test_compensation_is_in_the_result() -> None:
    """Without the second term the same comparison fails."""
    x, mask = gaussian(10, 144), block_mask(144, [1, 4, 5, 8])
    wq, _ = weight(40, 144)
    t = rac_gemm.terms(x, SPEC, mask)
    y = gemm.linear(t.first, t.rcp, gemm.cache(wq), torch.float32)
    assert relative_error(y, t.first, t.second, t.rcp, wq.qs, wq.rcp.expand(40, 1)) > 100 * LIMIT


def test_masked_first_is_a_stable_permutation() -> None:
    assert rac_gemm.masked_first(block_mask(144, [1, 4, 8])).tolist() == [1, 4, 8, 0, 2, 3, 5, 6, 7]
    assert rac_gemm.selected_blocks(block_mask(144, [8, 1])).tolist() == [1, 8]


def test_terms_without_residual_are_refused() -> None:
    wq, _ = weight(16, 32)
    with pytest.raises(ValueError, match="no residual"):
        rac_gemm.form_d(rac_gemm.terms(gaussian(4, 32)), gemm.cache(wq), torch.float32)
