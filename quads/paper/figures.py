"""The figures of a report, as SVG and PNG: reward and gap against the step, accuracy at the start and at the end.

    reward    thin: recorded mean reward of the step's rollouts; thick: centred mean over `SMOOTH` steps
    gap       mean over tokens of |log pi_trainer - log pi_rollout| (nats, log scale); thin: largest token of the step
    accuracy  pass@1 per arm: start (own engine), end (own engine), end (BF16 engine), with intervals

Several seeds of an arm share a colour. Colours are Okabe and Ito's, told apart by colour-blind readers, and every arm
has its own line style and marker as well, so that the figure survives a grey printer.
Differs from pyplot scripts in that no global state is used: figures are objects, safe in any process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from quads.evaluation.stats import Interval
from quads.paper.sources import Source
from quads.paper.tables import Row, group

SMOOTH = 5

# black, vermillion, orange, blue, then the rest; yellow last (weak on white)
COLOURS = ("#000000", "#D55E00", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#7F7F7F", "#F0E442")
STYLES = (
    "-",
    "--",
    "-.",
    (0, (4, 1, 1, 1, 1, 1)),
    (0, (1, 1)),
    (0, (6, 2)),
    (0, (3, 1, 1, 1)),
    (0, (2, 2)),
    (0, (5, 1)),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")


def panels(columns: int = 1, *, width: float = 7.2, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """A figure with axes side by side, light grid, no frame on top and right."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, i + 1) for i in range(columns)]
    for ax in axes:
        plain(ax)
        ax.set_axisbelow(True)
    return figure, axes


def plain(axes: Axes) -> None:
    """Light grid, no frame on top and right."""
    axes.grid(True, linewidth=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def smooth(values: NDArray[np.float64], width: int = SMOOTH) -> NDArray[np.float64]:
    """Centred mean over `width` steps, over fewer at the ends; NaN are left out."""
    half = width // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return np.array([np.nan if np.isnan(w).all() else np.nanmean(w) for w in windows], dtype=np.float64)


def _axes(title: str, ylabel: str, *, height: float = 4.2) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_ylabel(ylabel)
    plain(axes)
    return figure, axes


def draw_curve(
    axes: Axes,
    steps: Sequence[int],
    thick: ArrayLike,
    place: int,
    label: str | None = None,
    thin: ArrayLike | None = None,
) -> None:
    """A curve with the colour, line style and marker of `place`, about eight markers; `thin` behind it."""
    colour = COLOURS[place % len(COLOURS)]
    if thin is not None:
        axes.plot(steps, thin, color=colour, linewidth=0.7, alpha=0.35)
    axes.plot(
        steps,
        thick,
        color=colour,
        linewidth=2.0,
        linestyle=STYLES[place % len(STYLES)],
        marker=MARKERS[place % len(MARKERS)],
        markersize=4.5,
        markevery=max(1, len(steps) // 8),
        label=label,
    )


def step_axis(axes: Axes) -> None:
    """Whole training steps along the bottom."""
    axes.set_xlabel("GRPO step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _curves(axes: Axes, sources: Sequence[Source], thick: str, thin: str, *, smoothed: bool) -> None:
    """One colour and style per arm: `thick` with markers and label, `thin` behind it."""
    for index, (name, runs) in enumerate(group(sources).items()):
        for run in runs:
            values = smooth(run.curve(thick)) if smoothed else run.curve(thick)
            label = name if run is runs[0] else None
            draw_curve(axes, [s["step"] for s in run.steps], values, index, label, run.curve(thin))
    step_axis(axes)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def reward_figure(sources: Sequence[Source], title: str) -> Figure:
    """Mean reward of the rollouts per step."""
    figure, axes = _axes(f"Reward, {title}", "mean reward of rollouts")
    _curves(axes, sources, "reward", "reward", smoothed=True)
    return figure


def gap_figure(sources: Sequence[Source], title: str) -> Figure:
    """Mean (thick) and largest (thin) log-prob gap per step, log scale."""
    figure, axes = _axes(f"Log-prob gap, {title}", "|log p trainer - log p rollout| (nats)\nthick: mean, thin: max")
    _curves(axes, sources, "gap_mean", "gap_max", smoothed=False)
    axes.set_yscale("log", nonpositive="mask")
    return figure


def accuracy_figure(rows: Sequence[Row], title: str, confidence: float) -> Figure:
    """pass@1 per arm at the start and at the end through both engines, with intervals; a tick for each seed.

    The intervals redraw problems: only the ticks show how far the training seeds lie apart.
    """
    figure, axes = _axes(f"pass@1, {title}", "", height=1.6 + 0.55 * len(rows))
    kinds: tuple[tuple[str, str, str, list[Interval | None]], ...] = (
        ("start, own engine", "o", "white", [r.start for r in rows]),
        ("end, own engine", "o", "#0072B2", [r.own for r in rows]),
        ("end, BF16 engine", "D", "#E69F00", [r.bf16 for r in rows]),
    )
    for offset, (label, marker, face, intervals) in zip((-0.22, 0.0, 0.22), kinds, strict=True):
        _points(axes, [i + offset for i in range(len(rows))], intervals, label, marker, face)
    ticks = [(100 * share, i) for i, r in enumerate(rows) if len(r.own_by_seed) > 1 for share in r.own_by_seed]
    if ticks:
        axes.plot(*zip(*ticks, strict=True), linestyle="none", marker="|", markersize=13, markeredgewidth=1.4,
                  color="#0072B2", label="end, own engine: each seed")  # fmt: skip
    axes.set_yticks(range(len(rows)), [r.arm.name for r in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel(f"pass@1 (%), {100 * confidence:g} % intervals over problems")
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _points(
    axes: Axes, heights: list[float], intervals: Sequence[Interval | None], label: str, marker: str, face: str
) -> None:
    kept = [(y, i) for y, i in zip(heights, intervals, strict=True) if i is not None]
    if not kept:
        return
    x = np.array([100 * i.estimate for _, i in kept])
    ends = np.array([[100 * (i.estimate - i.low), 100 * (i.high - i.estimate)] for _, i in kept]).T
    axes.errorbar(
        x,
        [y for y, _ in kept],
        xerr=np.maximum(ends, 0.0),
        fmt=marker,
        color="#333333",
        markerfacecolor=face,
        markersize=6,
        elinewidth=1.2,
        capsize=2.5,
        label=label,
    )


def save(figure: Figure, stem: Path) -> list[Path]:
    """`stem`.svg and `stem`.png; the same input gives the same bytes (no date, fixed SVG ids)."""
    import matplotlib

    paths = [stem.with_suffix(".svg"), stem.with_suffix(".png")]
    with matplotlib.rc_context({"svg.hashsalt": "quads", "svg.fonttype": "path"}):
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=150)
    return paths
