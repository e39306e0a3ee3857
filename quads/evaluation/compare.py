"""One arm against another on the same problems of several benchmarks: difference, test, non-inferiority, Holm.

    d_P         per problem: mean of arm a minus mean of arm b;  D = mean over benchmarks of mean over problems of d_P
    interval    paired stratified bootstrap: problems redrawn within each benchmark, both arms together, percentile ends
    p           two-sided sign-flip permutation test of D = 0: under the null a problem's two arms could be exchanged;
                exact by enumeration while at most 2**EXACT patterns exist, else seeded draws with the +1 correction
    non-inferior  a is worse than b by less than `margin`: the interval's low end lies above -margin. The margin
                comes from the configuration, fixed before the runs
    Holm        p values of several arms, stepped down: the chance of any false statement stays below the level

Shares in [0, 1] throughout (a margin of 2 points is 0.02). Samples of one checkpoint do not replace training seeds:
callers average a problem over seeds first, and show the spread beside it (stats.seed_spread).
Differs from comparing two intervals for overlap, which ignores that both arms saw the same problems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quads.evaluation.stats import FloatArray, Interval

EXACT = 16  # non-zero differences; 65536 patterns
_TIE = 1e-12  # sums of the same numbers in another order differ by rounding: they count as equal
_CHUNK = 2_000_000

Verdict = Literal["non-inferior", "inferior", "not shown"]


@dataclass(frozen=True)
class Comparison:
    """Arm a minus arm b. `exact`: the permutation p value was enumerated."""

    difference: Interval
    p_difference: float
    exact: bool
    p_noninferior: float
    verdict: Verdict


def differences(a: Sequence[FloatArray], b: Sequence[FloatArray]) -> list[FloatArray]:
    """d_P per benchmark. Raises ValueError unless both arms have the same benchmarks with the same problem counts."""
    if not a or len(a) != len(b) or any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        raise ValueError(
            f"paired comparison of problems {[len(x) for x in a]} and {[len(y) for y in b]} per benchmark: both arms "
            "must be evaluated on the same problems; evaluate again with the same benchmarks"
        )
    return [np.asarray(x - y, dtype=np.float64) for x, y in zip(a, b, strict=True)]


def compare(
    a: Sequence[FloatArray],
    b: Sequence[FloatArray],
    *,
    margin: float,
    resamples: int,
    permutations: int,
    confidence: float,
    seed: int,
) -> Comparison:
    """Compare means per problem, one float64 [P] per benchmark and arm; `margin` >= 0 as a share."""
    if margin < 0:
        raise ValueError(f"margin={margin}: expected a share >= 0")
    d = differences(a, b)
    draws_R = bootstrap_draws(d, resamples=resamples, seed=seed)
    tail = (1.0 - confidence) / 2.0
    low, high = (float(v) for v in np.quantile(draws_R, [tail, 1.0 - tail]))
    p, exact = sign_flip_p(d, permutations=permutations, seed=seed)
    p_worse = (1 + int((draws_R <= -margin).sum())) / (1 + resamples)
    verdict: Verdict = "non-inferior" if low > -margin else "inferior" if high < -margin else "not shown"
    return Comparison(Interval(macro_difference(d), low, high), p, exact, p_worse, verdict)


def macro_difference(d: Sequence[FloatArray]) -> float:
    """D: unweighted mean over benchmarks of the mean difference."""
    return float(np.mean([x.mean() for x in d]))


def bootstrap_draws(d: Sequence[FloatArray], *, resamples: int, seed: int) -> FloatArray:
    """D of `resamples` resampled problem sets, float64 [R]; problems are redrawn within their benchmark."""
    rng = np.random.default_rng(seed)
    out = np.zeros(resamples)
    for x in d:
        step = max(1, _CHUNK // len(x))
        for first in range(0, resamples, step):
            rows = slice(first, min(first + step, resamples))
            out[rows] += x[rng.integers(0, len(x), size=(rows.stop - rows.start, len(x)))].mean(axis=1) / len(d)
    return out


def sign_flip_p(d: Sequence[FloatArray], *, permutations: int, seed: int) -> tuple[float, bool]:
    """Two-sided p of D = 0 and whether it is exact. Differences of zero cannot flip and are left out."""
    weighted = np.concatenate([x / (len(d) * len(x)) for x in d])
    weighted = weighted[weighted != 0.0]
    n = len(weighted)
    if n == 0:
        return 1.0, True
    seen = abs(weighted.sum()) - _TIE
    if n <= EXACT:
        patterns = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
        return float((np.abs((1 - 2 * patterns) @ weighted) >= seen).mean()), True
    rng = np.random.default_rng(seed)
    hits, step = 0, max(1, _CHUNK // n)
    for first in range(0, permutations, step):
        signs = rng.integers(0, 2, size=(min(step, permutations - first), n), dtype=np.int8) * 2 - 1
        hits += int((np.abs(signs @ weighted) >= seen).sum())
    return (1 + hits) / (1 + permutations), False


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p values, in the given order of names: compare each with the level as it is."""
    bad = {name: p for name, p in p_values.items() if not 0.0 <= p <= 1.0}
    if bad:
        raise ValueError(f"Holm: not probabilities: {bad}")
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda n: p_values[n])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}
