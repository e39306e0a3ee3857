"""Paired comparison: p values by enumeration, size and power by simulation, Holm by hand."""

import itertools

import numpy as np
import pytest
from tolerances import TOLERANCES

from quads.evaluation.compare import compare, differences, holm, macro_difference, sign_flip_p
from quads.evaluation.stats import majority_at_k, majority_score, seed_spread

KW = {"resamples": 500, "permutations": 999, "confidence": 0.95, "margin": 0.02}


def brute_force_p(d):
    """All sign patterns of all differences, zeros included, with plain Python."""
    seen = abs(np.mean([np.mean(x) for x in d]))
    flat = [(i, v) for i, x in enumerate(d) for v in x]
    hits = 0
    for signs in itertools.product((1, -1), repeat=len(flat)):
        groups = [[s * v for s, (j, v) in zip(signs, flat, strict=True) if j == i] for i in range(len(d))]
        hits += abs(np.mean([np.mean(g) for g in groups])) >= seen - 1e-12
    return hits / 2 ** len(flat)


@pytest.mark.parametrize(
    "d",
    [
        [[0.5, 0.25, -0.25]],
        [[1.0, 1.0, 1.0, 1.0, 1.0]],
        [[0.25, 0.0, 0.0, -0.25]],
        [[0.5, -0.25], [0.1, 0.2, 0.3, -0.1]],
        [[0.3, 0.3, 0.3], [0.3, -0.3, 0.3, 0.0, 0.6]],
    ],
)
def test_exact_p_equals_the_enumeration(d):
    arrays = [np.array(x) for x in d]
    p, exact = sign_flip_p(arrays, permutations=9, seed=0)
    assert exact and p == pytest.approx(brute_force_p(d), abs=1e-12)


def test_all_of_five_in_one_direction_is_two_of_32():
    assert sign_flip_p([np.ones(5)], permutations=9, seed=0) == (2 / 32, True)
    assert sign_flip_p([np.zeros(5)], permutations=9, seed=0) == (1.0, True)


def test_drawn_p_converges_to_the_exact_one(monkeypatch):
    d = [np.array([0.5, -0.25, 0.25, 0.75, -0.5, 0.25, 0.5, 0.0])]
    exact, _ = sign_flip_p(d, permutations=9, seed=0)
    monkeypatch.setattr("quads.evaluation.compare.EXACT", 0)
    drawn, enumerated = sign_flip_p(d, permutations=40_000, seed=0)
    # three standard errors of 40,000 draws at p = 0.3
    assert not enumerated and drawn == pytest.approx(exact, abs=3 * (exact * (1 - exact) / 40_000) ** 0.5 + 1e-4)


def test_size_and_power_of_test_and_interval():
    rng = np.random.default_rng(0)
    false_p = false_interval = found = 0
    for trial in range(200):
        p = [rng.beta(1, 1, 40), rng.beta(1, 1, 25)]
        b = [rng.binomial(8, x) / 8 for x in p]
        a = [rng.binomial(8, x) / 8 for x in p]
        worse = [rng.binomial(8, np.clip(x - 0.2, 0, 1)) / 8 for x in p]
        same = compare(a, b, seed=trial, **KW)
        false_p += same.p_difference <= 0.05
        false_interval += same.difference.excludes(0.0)
        found += compare(worse, b, seed=trial, **KW).verdict == "inferior"
    assert false_p / 200 <= TOLERANCES["sign_flip_size"].limit, false_p
    assert false_interval / 200 <= TOLERANCES["paired_size"].limit, false_interval
    assert found / 200 > 0.9, found


def test_stratified_bootstrap_keeps_benchmarks_apart():
    """Constant differences per benchmark: redrawing within benchmarks cannot move D; redrawing across them would."""
    a, b = [np.full(10, 0.9), np.full(30, 0.3)], [np.full(10, 0.5), np.full(30, 0.4)]
    got = compare(a, b, seed=0, **KW)
    assert got.difference.estimate == pytest.approx(0.15)
    assert (got.difference.low, got.difference.high) == (pytest.approx(0.15), pytest.approx(0.15))
    assert macro_difference(differences(a, b)) == pytest.approx(0.15)


@pytest.mark.parametrize(
    ("shift", "noise", "verdict"),
    [(0.0, 0.0, "non-inferior"), (-0.01, 0.0, "non-inferior"), (-0.05, 0.0, "inferior"), (0.0, 0.5, "not shown")],
)
def test_non_inferiority_needs_the_whole_interval_above_the_margin(shift, noise, verdict):
    rng = np.random.default_rng(1)
    b = [np.full(50, 0.5)]
    a = [b[0] + shift + noise * rng.standard_normal(50)]
    got = compare(a, b, seed=0, **KW)
    assert got.verdict == verdict
    assert (got.p_noninferior <= 0.025) == (verdict == "non-inferior")


def test_a_margin_at_the_difference_decides_nothing_beyond_it():
    a, b = [np.full(5, 0.4)], [np.full(5, 0.5)]
    assert compare(a, b, seed=0, **{**KW, "margin": 0.11}).verdict == "non-inferior"
    assert compare(a, b, seed=0, **{**KW, "margin": 0.09}).verdict == "inferior"
    with pytest.raises(ValueError, match="margin=-1"):
        compare(a, b, seed=0, **{**KW, "margin": -1})


def test_other_problems_are_refused():
    with pytest.raises(ValueError, match="same problems"):
        differences([np.zeros(3)], [np.zeros(4)])
    with pytest.raises(ValueError, match="same problems"):
        differences([np.zeros(3)], [np.zeros(3), np.zeros(3)])


def test_holm_by_hand():
    # sorted .005 .01 .03 .04; times 4 3 2 1: .02 .03 .06 .04; running maximum: .02 .03 .06 .06
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02}
    )
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}
    assert holm({"a": 0.03}) == {"a": 0.03} and holm({}) == {}
    with pytest.raises(ValueError, match="not probabilities"):
        holm({"a": 1.5})


def test_majority_vote_by_hand():
    assert majority_score(["3", "3", "4"], [1, 1, 0]) == 1.0
    assert majority_score(["3", "4", "4"], [1, 0, 0]) == 0.0
    assert majority_score(["3", "4"], [1, 0]) == 0.5
    assert majority_score([None, None, "3"], [0, 0, 1]) == 1.0
    assert majority_score([None, None], [0, 0]) == 0.0


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_majority_at_k_is_the_mean_over_subsets(k):
    answers, scores = ["1", "1", "2", None, "2"], [1.0, 1.0, 0.0, 0.0, 0.0]
    total = []
    for subset in itertools.combinations(range(5), k):
        votes = [answers[i] for i in subset if answers[i]]
        top = {v for v in votes if votes.count(v) == max(map(votes.count, votes))}
        total.append(sum(v == "1" for v in top) / len(top) if top else 0.0)
    assert majority_at_k(answers, scores, k) == pytest.approx(np.mean(total))


def test_majority_of_many_subsets_is_drawn():
    answers, scores = ["1"] * 12 + ["2"] * 8, [1.0] * 12 + [0.0] * 8
    assert majority_at_k(answers, scores, 20) == 1.0
    # 184756 subsets of 10: hypergeometric, P(more than 5 of the 12) + half P(5)
    from math import comb

    law = {x: comb(12, x) * comb(8, 10 - x) / comb(20, 10) for x in range(2, 11)}
    exact = sum(w for x, w in law.items() if x > 5) + 0.5 * law[5]
    assert majority_at_k(answers, scores, 10) == pytest.approx(exact, abs=0.04)
    with pytest.raises(ValueError, match="maj@k"):
        majority_at_k(answers, scores, 21)


def test_spread_over_seeds():
    got = seed_spread([0.5, 0.7, 0.9])
    assert (got.mean, got.low, got.high, got.seeds) == (pytest.approx(0.7), 0.5, 0.9, 3)
    assert got.sd == pytest.approx(0.2)
    assert seed_spread([0.5]).sd is None
