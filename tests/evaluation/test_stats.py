"""Estimators against enumeration, and the properties that make an interval an interval."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import TOLERANCES

from quads.evaluation.stats import (
    Interval,
    bootstrap_mean,
    independent_difference,
    mean_pass_at_k,
    nested_bootstrap,
    paired_difference,
    pass_at_1,
    pass_at_k,
    proportion_interval,
)

ENDS = TOLERANCES["bootstrap_quantile"].limit


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_equals_the_share_of_subsets_with_a_right_answer(samples):
    for correct in range(samples + 1):
        outcomes = [1] * correct + [0] * (samples - correct)
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(outcomes, k))
            brute = sum(any(s) for s in subsets) / len(subsets)
            assert pass_at_k(correct, samples, k) == pytest.approx(brute, abs=1e-12)


def test_pass_at_1_is_the_mean_over_problems_of_the_mean_over_samples():
    scores = [[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    assert pass_at_1(scores) == pytest.approx((0.25 + 1 + 0) / 3)
    assert mean_pass_at_k(scores, 1) == pytest.approx(pass_at_1(scores))


@given(st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=4), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_pass_at_k_grows_with_k(scores):
    values = [mean_pass_at_k(scores, k) for k in range(1, 5)]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(np.mean([max(row) for row in scores]))


@pytest.mark.parametrize("bad", [(1, 4, 0), (1, 4, 5), (5, 4, 1), (-1, 4, 1)])
def test_pass_at_k_rejects_impossible_counts(bad):
    with pytest.raises(ValueError, match="pass@k"):
        pass_at_k(*bad)


def _exact_bootstrap_quantiles(values, confidence):
    """All n**n resamples, equally likely: the distribution that the seeded bootstrap samples from."""
    means = np.array([np.mean(draw) for draw in itertools.product(values, repeat=len(values))])
    tail = (1 - confidence) / 2
    return np.quantile(means, [tail, 1 - tail])


def test_bootstrap_converges_to_the_exact_resampling_distribution():
    values = [0.0, 0.2, 0.5, 0.9, 1.0]
    low, high = _exact_bootstrap_quantiles(values, 0.9)
    got = bootstrap_mean(values, resamples=200_000, confidence=0.9, seed=1)
    assert got.estimate == pytest.approx(np.mean(values))
    assert got.low == pytest.approx(low, abs=ENDS)
    assert got.high == pytest.approx(high, abs=ENDS)


def test_bootstrap_is_seeded_and_chunking_does_not_change_its_law(monkeypatch):
    values = np.linspace(0, 1, 50)
    kw = {"resamples": 400, "confidence": 0.95}
    first = bootstrap_mean(values, seed=3, **kw)
    assert first == bootstrap_mean(values, seed=3, **kw)
    assert first != bootstrap_mean(values, seed=4, **kw)
    monkeypatch.setattr("quads.evaluation.stats._CHUNK", 120)
    assert bootstrap_mean(values, seed=3, **kw) == first


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30), st.floats(-2, 2))
@settings(max_examples=40, deadline=None)
def test_bootstrap_brackets_the_estimate_and_moves_with_a_shift(values, shift):
    kw = {"resamples": 300, "confidence": 0.9, "seed": 0}
    got = bootstrap_mean(values, **kw)
    moved = bootstrap_mean(np.asarray(values) + shift, **kw)
    assert min(values) - 1e-12 <= got.low <= got.high <= max(values) + 1e-12
    assert moved.low == pytest.approx(got.low + shift, abs=1e-9)
    assert moved.high == pytest.approx(got.high + shift, abs=1e-9)


def test_interval_covers_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(300):
        values = rng.random(60) < 0.6
        hits += not bootstrap_mean(values.astype(float), resamples=400, confidence=0.9, seed=trial).excludes(0.6)
    assert abs(hits / 300 - 0.9) <= TOLERANCES["bootstrap_coverage"].limit


def test_paired_difference_is_narrower_than_the_unpaired_one_when_problems_dominate():
    rng = np.random.default_rng(1)
    difficulty = rng.random(200)
    a, b = difficulty, np.clip(difficulty - 0.02 + 0.01 * rng.standard_normal(200), 0, 1)
    kw = {"resamples": 1000, "confidence": 0.95}
    paired = paired_difference(a, b, seed=0, **kw)
    unpaired = independent_difference(bootstrap_mean(a, seed=0, **kw), bootstrap_mean(b, seed=1, **kw))
    assert paired.estimate == pytest.approx(unpaired.estimate)
    assert (paired.high - paired.low) < 0.2 * (unpaired.high - unpaired.low)
    assert paired.excludes(0.0) and not unpaired.excludes(0.0)


def test_paired_difference_size_at_zero_difference():
    rng = np.random.default_rng(2)
    wrong = 0
    for trial in range(300):
        p = rng.random(60)
        a, b = rng.binomial(8, p) / 8, rng.binomial(8, p) / 8
        wrong += paired_difference(a, b, resamples=400, confidence=0.95, seed=trial).excludes(0.0)
    assert wrong / 300 <= TOLERANCES["paired_size"].limit


def test_paired_difference_refuses_other_problems():
    with pytest.raises(ValueError, match="same problems"):
        paired_difference([1.0, 0.0], [1.0], resamples=10, confidence=0.9, seed=0)


def test_nested_bootstrap_of_one_group_is_the_plain_bootstrap_in_law():
    values = [0.0, 0.2, 0.5, 0.9, 1.0]
    low, high = _exact_bootstrap_quantiles(values, 0.9)
    got = nested_bootstrap([values], resamples=100_000, confidence=0.9, seed=0)
    assert got.estimate == pytest.approx(np.mean(values))
    assert (got.low, got.high) == (pytest.approx(low, abs=ENDS), pytest.approx(high, abs=ENDS))


def test_nested_bootstrap_sees_the_spread_between_groups():
    groups = [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    got = nested_bootstrap(groups, resamples=4000, confidence=0.9, seed=0)
    assert got == Interval(0.5, 0.0, 1.0)


def test_nested_bootstrap_resamples_two_levels_like_the_enumeration():
    groups = [[0.0, 1.0], [2.0, 4.0]]
    inner = [[np.mean(d) for d in itertools.product(g, repeat=2)] for g in groups]
    # a group drawn twice contributes two independent draws
    means = [
        (x + y) / 2 for i, j in itertools.product(range(2), repeat=2) for x, y in itertools.product(inner[i], inner[j])
    ]
    low, high = np.quantile(means, [0.1, 0.9])
    got = nested_bootstrap(groups, resamples=100_000, confidence=0.8, seed=0)
    assert (got.low, got.high) == (pytest.approx(low, abs=ENDS), pytest.approx(high, abs=ENDS))


def test_wilson_interval_solves_its_own_equation():
    share, n, z = 22 / 30, 30, 1.959963984540054
    got = proportion_interval(share, n, 0.95)
    for end in (got.low, got.high):
        assert abs(share - end) == pytest.approx(z * math.sqrt(end * (1 - end) / n), abs=1e-9)
    assert (round(got.low, 3), round(got.high, 3)) == (0.556, 0.858)
    assert proportion_interval(0.0, 10, 0.95).low == 0.0
    assert proportion_interval(1.0, 10, 0.95).high == 1.0


@pytest.mark.parametrize("bad", [[], [[0.1]], [float("nan")]])
def test_bootstrap_rejects_what_is_no_vector(bad):
    with pytest.raises(ValueError, match="bootstrap_mean"):
        bootstrap_mean(bad, resamples=10, confidence=0.9, seed=0)
