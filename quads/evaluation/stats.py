"""Estimators of accuracy and their intervals; numpy only.

    pass@1   mean over problems of the mean score over K samples
    pass@k   mean over problems of 1 - C(K - c, k) / C(K, k), c right answers among K (unbiased for k <= K)
    maj@k    mean over problems of the score of the most frequent answer among k samples, ties shared equally
    interval percentile bootstrap: resample PROBLEMS with replacement, all samples of a problem stay together
    paired   the same on per-problem differences d_P = a_P - b_P (two arms, the same problems)
    nested   resample groups (training seeds), then the values inside each drawn group (steps)

Shapes: P problems, K samples, R resamples; scores_PK float in [0, 1]. Results are shares, not percent.
Source: unbiased pass@k of Chen et al. 2021; clustered and paired intervals as in "Adding Error Bars to Evals" (2024).
Differs from a bootstrap over samples, which sees decoding noise only and hides that 384 problems are a sample, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

SUBSETS = 1000  # of samples, for maj@k
_CHUNK = 4_000_000  # indices drawn at once: bounds memory at about 32 MB whatever R and P are


@dataclass(frozen=True)
class Interval:
    """An estimate with a percentile interval; equal ends mean that nothing varied."""

    estimate: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Whether `value` lies outside [low, high]."""
        return value < self.low or value > self.high


def _scores(scores_PK: Any, what: str) -> FloatArray:
    out = np.asarray(scores_PK, dtype=np.float64)
    if out.ndim != 2 or 0 in out.shape:
        raise ValueError(f"{what}: expected scores of shape [problems, samples], both > 0, got {out.shape}")
    if not np.isfinite(out).all() or out.min() < 0.0 or out.max() > 1.0:
        raise ValueError(f"{what}: scores must be finite and in [0, 1]; got min {out.min()}, max {out.max()}")
    return out


def problem_means(scores_PK: Any) -> FloatArray:
    """Mean score per problem, float64 [P], from scores [P, K]."""
    means: FloatArray = _scores(scores_PK, "problem_means").mean(axis=1)
    return means


def pass_at_1(scores_PK: Any) -> float:
    """Mean over problems of the mean over samples."""
    return float(problem_means(scores_PK).mean())


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Unbiased pass@k of one problem: the chance that k of `samples` draws hold at least one of `correct`.

    Raises ValueError unless 1 <= k <= samples and 0 <= correct <= samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@k needs 1 <= k <= samples, got k={k}, samples={samples}; draw more samples")
    if not 0 <= correct <= samples:
        raise ValueError(f"pass@k: {correct} right answers of {samples} samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def mean_pass_at_k(scores_PK: Any, k: int) -> float:
    """Mean over problems of the unbiased pass@k; scores [P, K] must be 0 or 1."""
    scores = _scores(scores_PK, "mean_pass_at_k")
    if not np.isin(scores, (0.0, 1.0)).all():
        raise ValueError("pass@k counts right answers: every score must be 0 or 1")
    samples = scores.shape[1]
    return float(np.mean([pass_at_k(int(c), samples, k) for c in scores.sum(axis=1)]))


def majority_score(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """Score of the most frequent answer of one problem; several such answers share equally.

    None is no answer and does not vote; with nobody voting the score is 0. Answers are equal as text. An answer that
    was graded differently in two samples counts with its mean score.
    """
    by_answer: dict[str, list[float]] = {}
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None:
            by_answer.setdefault(answer, []).append(score)
    if not by_answer:
        return 0.0
    most = max(map(len, by_answer.values()))
    return float(np.mean([np.mean(s) for s in by_answer.values() if len(s) == most]))


def majority_at_k(answers: Sequence[str | None], scores: Sequence[float], k: int, *, seed: int = 0) -> float:
    """maj@k of one problem: mean of `majority_score` over the subsets of k samples, all of them up to SUBSETS.

    Beyond that over SUBSETS seeded ones. Raises ValueError unless 1 <= k <= samples.
    """
    n = len(answers)
    if not 1 <= k <= n:
        raise ValueError(f"maj@k needs 1 <= k <= samples, got k={k}, samples={n}; draw more samples")
    if math.comb(n, k) <= SUBSETS:
        subsets = list(combinations(range(n), k))
    else:
        rng = np.random.default_rng(seed)
        subsets = [tuple(rng.permutation(n)[:k]) for _ in range(SUBSETS)]
    return float(np.mean([majority_score([answers[i] for i in s], [scores[i] for i in s]) for s in subsets]))


@dataclass(frozen=True)
class Spread:
    """A result over training seeds. `sd` is None for one seed: the spread is then unknown, not zero."""

    mean: float
    low: float
    high: float
    sd: float | None
    seeds: int


def seed_spread(values: Sequence[float]) -> Spread:
    """Mean, smallest, largest and standard deviation (n - 1) over training seeds."""
    array = _values(values, "seed_spread")
    sd = float(array.std(ddof=1)) if array.size > 1 else None
    return Spread(float(array.mean()), float(array.min()), float(array.max()), sd, array.size)


def _values(values: Any, what: str) -> FloatArray:
    out = np.asarray(values, dtype=np.float64)
    if out.ndim != 1 or out.size == 0:
        raise ValueError(f"{what}: expected a non-empty vector, got shape {out.shape}")
    if not np.isfinite(out).all():
        raise ValueError(f"{what}: {int((~np.isfinite(out)).sum())} of {out.size} values are not finite")
    return out


def _percentiles(estimate: float, means_R: FloatArray, confidence: float) -> Interval:
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(means_R, [tail, 1.0 - tail])
    return Interval(float(estimate), float(low), float(high))


def _check(resamples: int, confidence: float) -> None:
    if resamples < 1 or not 0.0 < confidence < 1.0:
        raise ValueError(f"bootstrap needs resamples >= 1 and 0 < confidence < 1, got {resamples}, {confidence}")


def bootstrap_mean(values_P: Any, *, resamples: int, confidence: float, seed: int) -> Interval:
    """Mean of values [P] with its percentile interval over resampled problems; the same seed gives the same ends."""
    values = _values(values_P, "bootstrap_mean")
    _check(resamples, confidence)
    rng = np.random.default_rng(seed)
    rows = max(1, _CHUNK // values.size)
    means = [
        values[rng.integers(0, values.size, size=(min(rows, resamples - start), values.size))].mean(axis=1)
        for start in range(0, resamples, rows)
    ]
    return _percentiles(float(values.mean()), np.concatenate(means), confidence)


def paired_difference(a_P: Any, b_P: Any, *, resamples: int, confidence: float, seed: int) -> Interval:
    """Mean of a - b over the same problems [P], with the interval of the paired bootstrap.

    Raises ValueError when the two vectors do not describe the same number of problems.
    """
    a, b = _values(a_P, "paired_difference"), _values(b_P, "paired_difference")
    if a.shape != b.shape:
        raise ValueError(
            f"paired difference of {a.size} and {b.size} problems: both arms must be evaluated on the same problems; "
            "evaluate again with the same data"
        )
    return bootstrap_mean(a - b, resamples=resamples, confidence=confidence, seed=seed)


def nested_bootstrap(groups: Sequence[Any], *, resamples: int, confidence: float, seed: int) -> Interval:
    """Mean over groups of the group mean, resampling groups (when there are several) and then values in each.

    With one group only its values are resampled: the interval then says nothing about training seeds. Steps of one
    run follow each other, so that resampling them one by one gives an interval that is rather too narrow.
    """
    arrays = [_values(g, "nested_bootstrap") for g in groups]
    if not arrays:
        raise ValueError("nested_bootstrap: no groups given")
    _check(resamples, confidence)
    rng = np.random.default_rng(seed)
    count = len(arrays)
    means_GR = np.empty((count, resamples))
    picks_RG = rng.integers(0, count, size=(resamples, count)) if count > 1 else np.zeros((resamples, 1), dtype=int)
    total = np.zeros(resamples)
    for slot in range(count):
        # a group drawn twice in one resample gets independent draws of its values: hence one draw per slot
        for g, values in enumerate(arrays):
            means_GR[g] = values[rng.integers(0, values.size, size=(resamples, values.size))].mean(axis=1)
        total += means_GR[picks_RG[:, slot], np.arange(resamples)]
    estimate = float(np.mean([a.mean() for a in arrays]))
    return _percentiles(estimate, total / count, confidence)


def proportion_interval(share: float, trials: int, confidence: float) -> Interval:
    """Wilson interval of a share seen in independent trials (for step 0, where only the share was kept)."""
    if trials < 1 or not 0.0 <= share <= 1.0:
        raise ValueError(f"a share of {share} in {trials} trials is not a proportion")
    z = _normal_quantile(0.5 + confidence / 2.0)
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    # at share 0 or 1 the exact end is the share itself; rounding may put it one ulp inside
    return Interval(share, min(max(0.0, centre - half), share), max(min(1.0, centre + half), share))


def independent_difference(a: Interval, b: Interval) -> Interval:
    """a - b of independent estimates, both intervals at the same confidence (Newcombe, square and add)."""
    diff = a.estimate - b.estimate
    low = diff - math.hypot(a.estimate - a.low, b.high - b.estimate)
    high = diff + math.hypot(a.high - a.estimate, b.estimate - b.low)
    return Interval(diff, low, high)


def _normal_quantile(p: float) -> float:
    """Standard normal quantile by bisection on erf (no scipy here); |error| < 1e-12 for 1e-9 < p < 1 - 1e-9."""
    low, high = -10.0, 10.0
    for _ in range(80):
        mid = (low + high) / 2.0
        if 0.5 * (1.0 + math.erf(mid / math.sqrt(2.0))) < p:
            low = mid
        else:
            high = mid
    return (low + high) / 2.0
