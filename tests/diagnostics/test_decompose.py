"""The telescoping identities, and what breaks them."""

from __future__ import annotations

import pytest
import torch

from quads.diagnostics.decompose import NUM_TERMS, TERMS, Rungs, decompose, summary


def rungs(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [-5 * torch.rand(4, 6, generator=generator) for _ in range(count)]


MASK = torch.arange(6)[None] < torch.tensor([6, 3, 1, 5])[:, None]


def test_terms_add_up_to_float_precision() -> None:
    p, q, r, e, stored, e32, prefill = rungs(7)
    d = decompose(Rungs(p, q, r, e, stored, e32, prefill), MASK)
    total = (e.double() - p.double())[MASK]
    assert torch.equal(d.total[MASK], total)
    assert float((sum(d.terms[t] for t in TERMS)[MASK] - total).abs().max()) <= 1e-12
    assert float((sum(d.num[t] for t in NUM_TERMS) - d.terms["delta_num"]).abs().max()) <= 1e-12
    assert bool((d.total[~MASK] == 0).all())


def test_float32_sums_would_break_the_identity() -> None:
    """The same sum in float32 misses by more than what is asserted: the check is not vacuous."""
    p, q, r, e = rungs(4)
    missed = ((q - p) + (r - q) + (e - r) - (e - p))[MASK].abs().max()
    assert float(missed) > 1e-8


def test_unmeasured_parts_are_named_not_zero() -> None:
    p, q, r, e = rungs(4)
    d = decompose(Rungs(p, q, r, e), MASK, {"of_kernel": "no Blackwell GPU"})
    assert not d.num
    rows = {row["term"]: row for row in summary(d, torch.ones(4, dtype=torch.bool))}
    for term in (*NUM_TERMS, "of_kernel", "of_routing", "of_repeat", "of_batch"):
        assert rows[term]["level"] == "not measured" and "mean_token_abs" not in rows[term] and rows[term]["note"]


def test_nan_on_a_response_token_is_refused_and_elsewhere_ignored() -> None:
    p, q, r, e = rungs(4)
    e[1, 5] = torch.nan  # masked out
    decompose(Rungs(p, q, r, e), MASK)
    e[1, 2] = torch.nan
    with pytest.raises(ValueError, match="1 of 15 response tokens"):
        decompose(Rungs(p, q, r, e), MASK)


def test_summary_counts_the_chosen_sequences_only() -> None:
    p, q, r, e = rungs(4)
    known = torch.zeros_like(MASK)
    known[1] = True
    d = decompose(Rungs(p, q, r, e, within={"of_batch": (q, p, known)}), MASK)
    rows = {row["term"]: row for row in summary(d, torch.tensor([True, True, False, False]))}
    assert rows["total"]["tokens"] == 9 and rows["of_batch"]["tokens"] == 3
    want = (e.double() - p.double())[:2][MASK[:2]].abs()
    assert rows["total"]["max_token_abs"] == float(want.max())
    assert rows["total"]["mean_token_abs"] == pytest.approx(float(want.mean()), rel=1e-12)
