"""Two intervals of a macro average over benchmarks: decoding noise alone, and problem sampling on top of it.

    avg@k     per problem c/n, mean over the problems of a benchmark; macro: unweighted mean over benchmarks
    decoding  the problems stay, the samples of each are redrawn: what another run of the same evaluation would give.
              Deviations are stretched by sqrt(n / (n - 1)), because c/n (1 - c/n) / n is too small by that factor
    problems  problems are redrawn within each benchmark, then samples within each problem: what other problems of the
              same kind would give. Never shrinks to zero, however many samples are drawn

Samples are 0 or 1, so redrawing n of them is one binomial draw. `n` may differ between problems: samples whose grading
failed are masked (`Tally.from_scores`, NaN), and a benchmark of one is a plain interval.

Contract: seeded, percentile ends, within [0, 1]; a problem with one sample has no decoding interval (None: unknown).
Both stages of `problems` hold decoding noise, so it is a little too wide rather than too narrow.
Legend: P problems, R resamples, B benchmarks. Source: clustered intervals as in "Adding Error Bars to Evals" (2024).
Differs from verl's validation bootstrap, which redraws samples only and so shows the first kind as if it were both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from quads.evaluation.stats import FloatArray, Interval

IntArray = NDArray[np.int64]

_CHUNK = 1_000_000  # draws held at once


@dataclass(frozen=True)
class Tally:
    """Right answers and graded samples per problem of one benchmark, both int64 [P]."""

    correct: IntArray
    samples: IntArray

    def __post_init__(self) -> None:
        correct, samples = self.correct, self.samples
        if correct.ndim != 1 or correct.shape != samples.shape or correct.size == 0:
            raise ValueError(f"tally: expected two vectors of one length > 0, got {correct.shape} and {samples.shape}")
        if (samples < 1).any():
            raise ValueError(
                f"tally: problem {int(np.argmin(samples))} has no graded sample; see the statuses of its samples, "
                "then grade again (python -m quads.regrade)"
            )
        if (correct < 0).any() or (correct > samples).any():
            raise ValueError("tally: right answers outside 0 to the number of samples")

    @classmethod
    def from_scores(cls, scores_PK: Any) -> Self:
        """From scores [P, K] of 0 and 1, NaN where grading failed. Raises ValueError for any other value."""
        scores = np.asarray(scores_PK, dtype=np.float64)
        if scores.ndim != 2:
            raise ValueError(f"tally: expected scores of shape [problems, samples], got {scores.shape}")
        valid = ~np.isnan(scores)
        if not np.isin(scores[valid], (0.0, 1.0)).all():
            raise ValueError("tally: every score must be 0, 1 or NaN (grading failed)")
        return cls(np.nansum(scores, axis=1).astype(np.int64), valid.sum(axis=1).astype(np.int64))

    @property
    def means(self) -> FloatArray:
        """Share of right samples per problem, float64 [P]."""
        means: FloatArray = self.correct / self.samples
        return means

    @property
    def mean(self) -> float:
        """avg@k of the benchmark."""
        return float(self.means.mean())


def macro_average(tallies: Sequence[Tally]) -> float:
    """Unweighted mean over benchmarks of avg@k."""
    if not tallies:
        raise ValueError("macro average of no benchmark")
    return float(np.mean([t.mean for t in tallies]))


def decoding_interval(tallies: Sequence[Tally], *, resamples: int, confidence: float, seed: int) -> Interval | None:
    """Macro average with its interval over redrawn samples; None where a problem has one sample only."""
    if any((t.samples < 2).any() for t in tallies):
        return None
    rng = np.random.default_rng(seed)
    deviation_R = np.zeros(resamples)
    for tally in tallies:
        p_P, n_P = tally.means, tally.samples
        stretch_P = np.sqrt(n_P / (n_P - 1))
        for rows in _rows(resamples, len(n_P)):
            redrawn = rng.binomial(n_P, p_P, size=(rows.stop - rows.start, len(n_P))) / n_P
            deviation_R[rows] += ((redrawn - p_P) * stretch_P).mean(axis=1) / len(tallies)
    return _interval(macro_average(tallies), macro_average(tallies) + deviation_R, confidence)


def problem_interval(tallies: Sequence[Tally], *, resamples: int, confidence: float, seed: int) -> Interval:
    """Macro average with its interval over redrawn problems and redrawn samples in each."""
    estimate = macro_average(tallies)
    rng = np.random.default_rng(seed)
    mean_R = np.zeros(resamples)
    for tally in tallies:
        p_P, n_P = tally.means, tally.samples
        for rows in _rows(resamples, len(n_P)):
            pick = rng.integers(0, len(n_P), size=(rows.stop - rows.start, len(n_P)))
            mean_R[rows] += (rng.binomial(n_P[pick], p_P[pick]) / n_P[pick]).mean(axis=1) / len(tallies)
    return _interval(estimate, mean_R, confidence)


def _rows(resamples: int, problems: int) -> list[slice]:
    if resamples < 1:
        raise ValueError(f"resamples={resamples}: expected at least 1")
    step = max(1, _CHUNK // problems)
    return [slice(first, min(first + step, resamples)) for first in range(0, resamples, step)]


def _interval(estimate: float, values_R: FloatArray, confidence: float) -> Interval:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence={confidence}: expected a share between 0 and 1")
    tail = (1.0 - confidence) / 2.0
    low, high = np.clip(np.quantile(values_R, [tail, 1.0 - tail]), 0.0, 1.0)
    return Interval(estimate, float(low), float(high))
