"""gap_metrics against definitions written out in plain Python, and its error cases."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quads.trainer.gap import gap_metrics

PAIRS = st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, 0)), min_size=1, max_size=40)


def plain(pairs, low, high):
    d = [a - b for a, b in pairs]
    r = [math.exp(x) for x in d]
    n = len(d)
    return {
        "gap_mean": sum(map(abs, d)) / n,
        "gap_max": max(map(abs, d)),
        "k1": -sum(d) / n,
        "k3": sum(ri - 1 - di for ri, di in zip(r, d, strict=True)) / n,
        "ess": sum(r) ** 2 / (n * sum(ri * ri for ri in r)),
        "clipped_share": sum(ri < 1 - low or ri > 1 + high for ri in r) / n,
    }


@settings(deadline=None, max_examples=50)
@given(PAIRS)
def test_matches_the_definitions(pairs):
    pairs = [(torch.tensor(a).item(), torch.tensor(b).item()) for a, b in pairs]  # float32 values, as verl passes
    trainer, rollout = (torch.tensor([[p[i] for p in pairs]]) for i in (0, 1))
    got = gap_metrics(trainer, rollout, torch.ones_like(trainer), 0.2, 0.28)
    for name, want in plain(pairs, 0.2, 0.28).items():
        if name == "clipped_share" and any(min(abs(math.exp(a - b) - e) for e in (0.8, 1.28)) < 1e-5 for a, b in pairs):
            continue  # a ratio on the edge of the range may fall on either side in float32
        assert got[name] == pytest.approx(want, rel=2e-5, abs=2e-6), name


def test_equal_log_probs_have_no_gap():
    x = torch.randn(3, 5)
    got = gap_metrics(x, x.clone(), torch.ones(3, 5), 0.2, 0.2)
    assert got == {"gap_mean": 0, "gap_max": 0, "gap_p99": 0, "k1": 0, "k3": 0, "ess": 1, "clipped_share": 0}


def test_masked_tokens_do_not_count():
    trainer, rollout = torch.zeros(1, 3), torch.tensor([[0.0, 0.0, 100.0]])
    assert gap_metrics(trainer, rollout, torch.tensor([[1, 1, 0]]), 0.2, 0.2)["gap_max"] == 0


@pytest.mark.parametrize(
    ("trainer", "mask", "words"),
    [
        (torch.zeros(1, 2), torch.zeros(1, 2), "mask is empty"),
        (torch.tensor([[0.0, float("nan")]]), torch.ones(1, 2), "non-finite log-probs in 1 of 2"),
        (torch.zeros(1, 3), torch.ones(1, 2), "one shape"),
    ],
)
def test_bad_input_is_named(trainer, mask, words):
    with pytest.raises(ValueError, match=words):
        gap_metrics(trainer, torch.zeros(1, 2), mask, 0.2, 0.2)
