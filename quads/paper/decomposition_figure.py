"""The decomposition during training: mean |term| against the step, one panel per term, one line per arm.

    total, delta_weight, delta_act, delta_num       (nats per token; quads.diagnostics.decompose defines them)

Thin: every run; thick: mean over an arm's runs that measured the step. One scale in all panels, linear, because
delta_weight of a QAT arm is exactly 0. Means of |term| do not add up; only the signed terms do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from quads.paper.figures import COLOURS, draw_curve, plain
from quads.paper.sources import Source
from quads.paper.tables import group

TERMS = ("total", "delta_weight", "delta_act", "delta_num")


def parts_records(sources: Sequence[Source]) -> list[dict[str, object]]:
    """One record per run and measured step; [] where no run was decomposed."""
    return [{"arm": s.arm.name, "seed": s.seed, "run_id": s.run_id, **part} for s in sources for part in s.parts]


def gap_parts_figure(sources: Sequence[Source], title: str) -> Figure | None:
    """The figure of the module docstring; None where no run was decomposed."""
    arms = group(s for s in sources if s.parts)
    if not arms:
        return None
    figure = Figure(figsize=(7.2, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    order = list(group(sources))
    for term, axes in zip(TERMS, panels.flat, strict=True):
        axes.set_title(term, fontsize=10, loc="left")
        plain(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for name, runs in arms.items():
            index = order.index(name)
            colour = COLOURS[index % len(COLOURS)]
            by_step: dict[int, list[float]] = {}
            for run in runs:
                steps, values = [p["step"] for p in run.parts], [float(p[f"{term}_mean_abs"]) for p in run.parts]
                axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.35)
                for step, value in zip(steps, values, strict=True):
                    by_step.setdefault(step, []).append(value)
            means = [float(np.mean(by_step[step])) for step in sorted(by_step)]
            draw_curve(axes, sorted(by_step), means, index, name)
    panels[0, 0].set_ylim(bottom=0)
    for axes in panels[:, 0]:
        axes.set_ylabel("mean over tokens of |term| (nats)", fontsize=8)
    for axes in panels[1]:
        axes.set_xlabel("GRPO step")
    figure.suptitle(f"Parts of the log-prob gap, {title}", fontsize=11, x=0.02, ha="left")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside right center")
    return figure
