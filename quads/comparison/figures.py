"""One figure: reward, mean gap and largest gap against the step, one panel each, one colour and style per run.

Reward: thin line as recorded, thick line the centred mean over five steps. Gaps on a logarithmic scale, in nats.
Colours, styles and markers are those of the reports, so a run is told apart without colours too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from quads.comparison.runs import ComparedRun
from quads.paper.figures import draw_curve, plain, smooth, step_axis

PANELS = (
    ("reward", "mean reward of rollouts"),
    ("gap_mean", "mean gap (nats)"),
    ("gap_max", "largest gap (nats)"),
)


def curves_figure(runs: Sequence[ComparedRun]) -> Figure:
    """Figure with the three panels; a curve that a run did not record is absent from its panel."""
    figure = Figure(figsize=(7.6, 8.0), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(PANELS), 1, sharex=True)
    labels = _labels(runs)
    for axes, (key, title) in zip(panels, PANELS, strict=True):
        for index, run in enumerate(runs):
            values = run.curve(key)
            if np.isnan(values).all():
                continue
            thick, thin = (smooth(values), values) if key == "reward" else (values, None)
            draw_curve(axes, [s["step"] for s in run.steps], thick, index, labels[index], thin)
        axes.set_ylabel(title)
        plain(axes)
        if key != "reward":
            axes.set_yscale("log", nonpositive="mask")
    step_axis(panels[-1])
    figure.legend(
        *panels[0].get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside lower center", ncols=2
    )
    return figure


def _labels(runs: Sequence[ComparedRun]) -> list[str]:
    """Arm and seed where they tell all runs apart, else the whole name."""
    short = [f"{r.result['run']['arm']['name']}, seed {r.result['run']['seed']}" for r in runs]
    return short if len(set(short)) == len(short) else [r.label for r in runs]
