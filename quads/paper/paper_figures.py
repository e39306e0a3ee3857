"""Figures of the paper's tables, drawn from the same cells that the tables show.

    ablation     pass@1 of BF16, naive, QAT only, QAT + RAC: the paper's values beside those measured here
    table3       largest gap against k: the paper's on the left, step 0 here on the right, each with its BF16 floor
    layers       symmetric minus asymmetric mismatch, block by block: above zero is what the paper says
    throughput   ratios of rollout speeds: the paper's beside native ones here (never emulated ones)

Colours, line styles and markers are those of quads.paper.figures; a number that was not measured is named in words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from quads.evaluation.stats import Interval
from quads.paper import claims
from quads.paper.cells import Cell, PaperTable
from quads.paper.figures import COLOURS, MARKERS, STYLES, panels
from quads.paper.step0_tables import BUILT_UP, LARGEST, PAIRS, pair_words

PAPER, HERE = "#7F7F7F", "#0072B2"
NOT_RUN = "not run"


def _bar(value: Interval) -> list[list[float]]:
    """Lengths below and above the estimate; none where the spread is unknown."""
    ends = value.estimate - value.low, value.high - value.estimate
    return [[max(e, 0.0) if math.isfinite(e) else 0.0] for e in ends]


def _below(ax: Axes, handles: int = 1) -> None:
    ax.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=handles)


def ablation(table2: PaperTable, steps: PaperTable) -> Figure:
    """pass@1 per arm with intervals; hollow diamonds: the paper."""
    bf16 = next(c for c in table2.cells if c.row == "BF16 RL")
    cells = [bf16, *(c for c in steps.cells if c.unit == "percent")]
    figure, (ax,) = panels(height=2.0 + 0.4 * len(cells))
    for i, cell in enumerate(cells):
        assert cell.paper is not None  # every step is one of the paper's
        ax.plot(cell.paper, i - 0.13, "D", markerfacecolor="none", markeredgecolor=PAPER, markersize=7,
                label="paper (25B, average of four benchmarks)" if i == 0 else None)  # fmt: skip
        if cell.here is None:
            ax.text(2, i + 0.13, NOT_RUN, va="center", fontsize=8)
            continue
        ax.errorbar(cell.here.estimate, i + 0.13, xerr=_bar(cell.here), fmt="o", color=HERE, capsize=2.5,
                    label="here (held-out task, interval over problems)" if i == 0 else None)  # fmt: skip
    ax.set_yticks(range(len(cells)), [c.row.removesuffix(" RL") for c in cells])
    ax.invert_yaxis()
    ax.margins(y=0.15)
    ax.set_xlim(0, 100)
    ax.set_xlabel("pass@1 (%)")
    _below(ax, 2)
    return figure


def table3(table: PaperTable) -> Figure:
    """Left: the paper; right: step 0 here, mean over seeds with Student's interval (log scale)."""
    figure, (left, right) = panels(2, width=9.6, height=4.2)
    ks = [0.0, *claims.TABLE_3]
    left.plot(ks, [claims.GAP_NAIVE, *claims.TABLE_3.values()], color=PAPER, marker="D", linewidth=1.6)
    left.axhline(claims.GAP_BF16, color=PAPER, linestyle=":", linewidth=1.2)
    left.annotate("BF16", (0, claims.GAP_BF16), xytext=(2, 3), textcoords="offset points", fontsize=8)
    left.set_title("paper: trained 25B model", fontsize=10, loc="left")
    left.set_ylim(0, 1.45)
    for index, (granularity, words) in enumerate((g, w) for w in LARGEST.values() for g in ("channel", "block16")):
        cells = [c for c in table.cells if c.measure.startswith(f"{words}, {granularity}") and c.here is not None]
        _sweep(right, [c for c in cells if c.row.startswith("k =")], index, f"{words}, {granularity}")
        floor = next((c.here for c in cells if not c.row.startswith("k =")), None)
        if floor is not None and granularity == "channel":
            right.axhline(floor.estimate, color=COLOURS[index], linestyle=":", linewidth=1.2)
    right.set_title("here: step 0 of the warm checkpoint", fontsize=10, loc="left")
    if right.lines:
        right.set_yscale("log")
        _below(right)
    else:
        right.text(0.5, 0.5, NOT_RUN, ha="center", transform=right.transAxes)
    for ax in (left, right):
        ax.set_xlabel("k: share of channels with a second pass (%)")
        ax.set_ylabel("largest |log p trainer - log p rollout| (nats)\ndotted: BF16 trainer and rollout")
    return figure


def _sweep(ax: Axes, cells: Sequence[Cell], index: int, label: str) -> None:
    points = [(float(c.row.split()[2]), c.here) for c in cells if c.here is not None]
    if not points:
        return
    low = [p.estimate - max(p.low, 0.05 * p.estimate) if math.isfinite(p.low) else 0.0 for _, p in points]
    high = [p.high - p.estimate if math.isfinite(p.high) else 0.0 for _, p in points]
    ax.errorbar(
        [k for k, _ in points], [p.estimate for _, p in points], yerr=np.maximum([low, high], 0),
        color=COLOURS[index], linestyle=STYLES[index], marker=MARKERS[index], markersize=5, capsize=2.5, label=label,
    )  # fmt: skip


def layers(table: PaperTable) -> Figure:
    """Left: difference of the built-up mismatch by layer, a line per pair; right: the log-prob gap."""
    figure, (left, right) = panels(2, width=11, height=4.4)
    names = list(dict.fromkeys(c.row for c in table.cells if c.measure.startswith(BUILT_UP)))
    for index, pair in enumerate(PAIRS):
        words = pair_words(*pair)
        own = {c.row: c.here_difference for c in table.cells if c.measure == f"{BUILT_UP}, {words}, step 0"}
        points = [(names.index(row), value) for row, value in own.items() if value is not None]
        _line(left, points, index, words)
    left.axhline(0, color="#000000", linewidth=0.8)
    every = max(1, len(names) // 24)
    left.set_xticks(range(0, len(names), every), names[::every], rotation=35, ha="right", fontsize=8)
    left.set_ylabel("relative mismatch of hidden states\nsymmetric - asymmetric (built up)")
    left.set_title("above 0: the symmetric trainer mismatches more", fontsize=10, loc="left")
    if len(left.lines) > 1:
        left.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.3))
    else:
        left.text(0.5, 0.6, NOT_RUN, ha="center", transform=left.transAxes)
    _gaps(right, [c for c in table.cells if c.unit == "nats"])
    return figure


def _line(ax: Axes, points: Sequence[tuple[int, Interval]], index: int, label: str) -> None:
    if not points:
        return
    ends = np.array([[low[0], high[0]] for low, high in (_bar(v) for _, v in points)]).T
    ax.errorbar(
        [x + 0.12 * (index - 1) for x, _ in points], [v.estimate for _, v in points], yerr=ends,
        color=COLOURS[index], linestyle=STYLES[index], marker=MARKERS[index], markersize=5, capsize=2.5, label=label,
    )  # fmt: skip


def _gaps(ax: Axes, cells: Sequence[Cell]) -> None:
    """Differences of log-prob gaps, one below the other; square and orange where the symmetric trainer's is smaller."""
    for i, cell in enumerate(cells):
        value = cell.here_difference or cell.here
        if value is None:
            ax.text(0, i, f"{NOT_RUN}  ", va="center", ha="right", fontsize=8)
            continue
        more = value.estimate > 0
        ax.errorbar(value.estimate, i, xerr=_bar(value), fmt="o" if more else "s", capsize=2.5,
                    color=HERE if more else COLOURS[1])  # fmt: skip
    ax.axvline(0, color="#000000", linewidth=0.8)
    words = [c.measure.removeprefix("log-prob gap, ").removesuffix(", step 0").replace(", ", "\n") for c in cells]
    words = ["trained arms" if c.row == "trained arms" else w for c, w in zip(cells, words, strict=True)]
    ax.set_yticks(range(len(cells)), words, fontsize=8)
    ax.set_ylim(len(cells) - 0.4, -0.6)
    ax.xaxis.set_major_locator(MaxNLocator(5))  # more labels run into each other
    ax.set_xlabel("log-prob gap, symmetric - asymmetric (nats)")


def throughput(table: PaperTable) -> Figure:
    """Speed ratios; without native rows the figure says so."""
    cells = [c for c in table.cells if c.unit == "ratio" and c.measure.endswith("native")]
    figure, (ax,) = panels(height=1.6 + 0.34 * len(cells))
    for i, cell in enumerate(cells):
        assert cell.paper is not None  # every ratio is one of the paper's
        ax.plot(cell.paper, i, "D", markerfacecolor="none", markeredgecolor=PAPER, markersize=7,
                label="paper" if i == 0 else None)  # fmt: skip
        if cell.here is None:
            ax.text(cell.paper + 0.012, i, f"{NOT_RUN} (needs Blackwell)", va="center", fontsize=8)
        else:
            ax.errorbar(cell.here.estimate, i, xerr=_bar(cell.here), fmt="o", color=HERE, capsize=2.5)
    ax.axvline(1, color="#000000", linewidth=0.8)
    ax.set_yticks(range(len(cells)), [c.measure.removesuffix(", native") for c in cells], fontsize=8)
    ax.set_ylim(len(cells) - 0.5, -0.5)
    ax.set_xlabel("ratio of rollout speeds (tokens per second)")
    ax.set_xlim(min(0.95, ax.get_xlim()[0]), max(1.4, ax.get_xlim()[1]))
    _below(ax)
    return figure
