"""What training seeds say about a difference of two arms: seed by seed, with Student's interval over seeds.

    difference   x_s(a) - x_s(b) for every seed s that both arms ran (the same data, order and warm checkpoint)
    interval     mean +- t(n - 1) s / sqrt(n) over these differences; None for fewer than two seeds
    collapsed    the detector says collapsed or diverged, or pass@1 at the end lies below the run's own start

Units: points (percent) for accuracies, nats for gaps, shares in [0, 1]. Contract: a verdict for several seeds needs
this interval and the one over problems (quads.paper.status.jointly).
Differs from the bootstraps over problems, which hold the trained weights fixed: they say how well these runs were
measured, not what another seed would have given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from quads.config import Collapse, Evaluation
from quads.diagnostics.collapse import STOPPING, judge
from quads.evaluation.stats import Interval
from quads.paper.sources import Source
from quads.paper.study_files import over_seeds
from quads.paper.tables import below_start, tail


def own_points(run: Source) -> float | None:
    """pass@1 through the own engine in percent; None when it was not evaluated."""
    return 100 * float(run.per_problem("own").mean()) if "own" in run.eval["engines"] else None


def last_gap(key: str) -> Callable[[Source], float | None]:
    """Function of a run: mean of `key` over the last steps; None where no value is finite."""

    def mean(run: Source) -> float | None:
        values = tail(run, key)
        finite = values[np.isfinite(values)]
        return float(finite.mean()) if finite.size else None

    return mean


def by_seed(runs: Sequence[Source], value: Callable[[Source], float | None]) -> dict[int, float]:
    """Seed -> value, without seeds that have none."""
    found = {r.seed: value(r) for r in runs}
    return {s: v for s, v in found.items() if v is not None}


def spread(values: Sequence[float], confidence: float) -> Interval | None:
    """Student's interval; None for fewer than two values, because one seed separates nothing."""
    return over_seeds(values, confidence) if len(values) > 1 else None


def difference(
    a: Sequence[Source], b: Sequence[Source], evaluation: Evaluation, value: Callable[[Source], float | None]
) -> Interval | None:
    """Interval over seeds of value(a) - value(b), paired by seed."""
    x, y = by_seed(a, value), by_seed(b, value)
    return spread([x[s] - y[s] for s in x if s in y], evaluation.confidence)


def share(
    arm: Sequence[Source], worst: Sequence[Source], best: Sequence[Source], evaluation: Evaluation
) -> Interval | None:
    """Interval over seeds of (arm - worst) / (best - worst); infinite where a seed has no loss to recover from."""
    x, w, b = (by_seed(runs, own_points) for runs in (arm, worst, best))
    common = [s for s in x if s in w and s in b]
    if len(common) < 2:
        return None
    if any(b[s] <= w[s] for s in common):
        return Interval(math.nan, -math.inf, math.inf)
    return spread([(x[s] - w[s]) / (b[s] - w[s]) for s in common], evaluation.confidence)


def collapsed(runs: Sequence[Source], evaluation: Evaluation, settings: Collapse) -> Mapping[int, bool]:
    """Seed -> whether its run collapsed; "below its own start" means by more than the interval over problems."""
    return {r.seed: judge(r.steps, settings).verdict in STOPPING or below_start(r, evaluation) for r in runs}
