"""Decoding and problem-sampling intervals: coverage on synthetic Bernoulli samples, and their two limits."""

import numpy as np
import pytest
from tolerances import TOLERANCES

from quads.evaluation.intervals import Tally, decoding_interval, macro_average, problem_interval

KW = {"resamples": 300, "confidence": 0.9}
TRIALS = 300


def tally(rng, p_P, samples):
    return Tally(rng.binomial(samples, p_P), np.full(len(p_P), samples))


def test_scores_become_counts_and_failed_grading_is_masked():
    nan = float("nan")
    got = Tally.from_scores([[1, 0, nan], [1, 1, 1]])
    assert got.correct.tolist() == [1, 3] and got.samples.tolist() == [2, 3]
    assert got.mean == pytest.approx((0.5 + 1) / 2)
    with pytest.raises(ValueError, match="problem 1 has no graded sample"):
        Tally.from_scores([[1, 0], [nan, nan]])
    with pytest.raises(ValueError, match="0, 1 or NaN"):
        Tally.from_scores([[0.5, 1]])


def test_macro_average_weighs_benchmarks_not_problems():
    small, large = Tally.from_scores([[1, 1]]), Tally.from_scores([[0, 0]] * 9)
    assert macro_average([small, large]) == 0.5
    with pytest.raises(ValueError, match="no benchmark"):
        macro_average([])


@pytest.mark.parametrize("samples", [2, 4, 16])
def test_decoding_interval_covers_the_fixed_problems_mean(samples):
    rng = np.random.default_rng(samples)
    p = [rng.beta(0.8, 0.6, 60), rng.beta(2, 2, 30)]
    truth = np.mean([x.mean() for x in p])
    hits = 0
    for trial in range(TRIALS):
        got = decoding_interval([tally(rng, x, samples) for x in p], seed=trial, **KW)
        hits += not got.excludes(truth)
    assert abs(hits / TRIALS - 0.9) <= TOLERANCES["decoding_coverage"].limit, hits / TRIALS


def test_problem_interval_covers_the_mean_of_the_law_that_problems_come_from():
    rng = np.random.default_rng(3)
    laws = [(1.2, 0.8), (1.0, 1.0)]
    truth = np.mean([a / (a + b) for a, b in laws])
    hits = narrow = 0
    for trial in range(TRIALS):
        drawn = [tally(rng, rng.beta(a, b, 60), 8) for a, b in laws]
        hits += not problem_interval(drawn, seed=trial, **KW).excludes(truth)
        narrow += not decoding_interval(drawn, seed=trial, **KW).excludes(truth)
    # a little too wide by construction, hence the one-sided slack; decoding noise alone misses most of the time
    assert 0.9 - 0.04 <= hits / TRIALS <= 0.9 + TOLERANCES["problem_coverage_excess"].limit, hits / TRIALS
    assert narrow / TRIALS < 0.7


def test_ends_against_the_exact_law_of_one_problem():
    """One problem, 4 samples, 2 right: redrawn means are binomial(4, 1/2) / 4, stretched by sqrt(4/3)."""
    one = Tally.from_scores([[1, 1, 0, 0]])
    law = {k / 4: w / 16 for k, w in zip(range(5), (1, 4, 6, 4, 1), strict=True)}
    # 80 %: the 10 % and 90 % quantiles are 1/4 and 3/4 (cumulative 1/16, 5/16, 11/16, 15/16)
    assert sum(w for v, w in law.items() if v <= 0.25) > 0.1 > law[0.0]
    half = 0.25 * (4 / 3) ** 0.5
    got = decoding_interval([one], resamples=20_000, confidence=0.8, seed=0)
    assert (got.low, got.high) == (pytest.approx(0.5 - half), pytest.approx(0.5 + half))
    # with one problem, redrawing problems does nothing: the second stage alone is left, without the stretch
    both = problem_interval([one], resamples=20_000, confidence=0.8, seed=0)
    assert (both.low, both.high) == (0.25, 0.75)


def test_more_samples_shrink_decoding_noise_only():
    rng = np.random.default_rng(5)
    p = rng.beta(1, 1, 50)
    width = {}
    for samples in (4, 256):
        drawn = [tally(rng, p, samples)]
        for name, interval in (("decoding", decoding_interval), ("problems", problem_interval)):
            got = interval(drawn, seed=0, **KW)
            width[name, samples] = got.high - got.low
    assert width["decoding", 256] < 0.2 * width["decoding", 4]
    assert width["problems", 256] > 0.6 * width["problems", 4]


def test_one_sample_has_no_decoding_interval():
    assert decoding_interval([Tally.from_scores([[1], [0]])], seed=0, **KW) is None
    got = problem_interval([Tally.from_scores([[1], [0]])], seed=0, **KW)
    assert (got.low, got.high) == (0.0, 1.0)


def test_seeded_and_chunked(monkeypatch):
    rng = np.random.default_rng(6)
    drawn = [tally(rng, rng.random(30), 16)]
    first = problem_interval(drawn, seed=1, **KW)
    assert first == problem_interval(drawn, seed=1, **KW) != problem_interval(drawn, seed=2, **KW)
    monkeypatch.setattr("quads.evaluation.intervals._CHUNK", 20)
    assert problem_interval(drawn, seed=1, **KW).estimate == first.estimate
