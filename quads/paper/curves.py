"""Training curves as a table: each arm's mean over seeds at a few steps; the CSV (curves.csv) holds every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quads.paper.cells import MISSING
from quads.paper.render import Grid
from quads.paper.sources import Source
from quads.paper.tables import group

SHOWN = {
    "reward": ("reward", "{:.3f}"),
    "gap_mean": ("gap mean (nats)", "{:.3g}"),
    "gap_max": ("gap max (nats)", "{:.3g}"),
}
COLUMNS = 7


def curves_grid(sources: Sequence[Source]) -> Grid:
    """Rows: arm and quantity; columns: steps, first and last included. A dash where no seed was finite or still ran."""
    last = max(len(s.steps) for s in sources)
    steps = sorted({round(v) for v in np.linspace(1, last, min(COLUMNS, last))})
    body = []
    for name, runs in group(sources).items():
        for key, (words, form) in SHOWN.items():
            means = [_mean([r.curve(key)[step - 1] for r in runs if len(r.steps) >= step]) for step in steps]
            body.append([f"{name}: {words}", *(MISSING if m is None else form.format(m) for m in means)])
    return ["arm", *(f"step {s}" for s in steps)], body


def _mean(values: Sequence[float]) -> float | None:
    finite = [v for v in values if np.isfinite(v)]
    return float(np.mean(finite)) if finite else None
