"""Figures that put arms, blocks or training runs along an axis; conventions of figures.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from quads.diagnostics import figures as base
from quads.paper.figures import COLOURS, MARKERS, STYLES

Row = dict[str, Any]
TERMS = ("delta_weight", "delta_act", "delta_num")
QUADRANT_LABELS = {
    "share_token_adv_pos_d_pos": "A > 0, trainer above rollout",
    "share_token_adv_pos_d_neg": "A > 0, trainer below",
    "share_token_adv_neg_d_pos": "A < 0, trainer above",
    "share_token_adv_neg_d_neg": "A < 0, trainer below",
    "share_token_no_sign": "A = 0 or equal",
}


def definitions(rows: Sequence[Row], names: Sequence[str]) -> Figure:
    """Left: every definition per arm, one line per arm; right: the same over the bf16 arm's value."""
    figure, (left, right) = base.figure_with_axes(2, width=12, height=4.8)
    for ax, column, label in ((left, "value", "gap (nats; probability where named so)"),
                              (right, "over_bf16_arm", "times the bf16 arm's value")):  # fmt: skip
        for index, arm in enumerate(base.unique(rows, "arm")):
            base.line(ax, rows, "definition", column, index, arm, at=lambda n: float(names.index(n)), arm=arm)
        ax.set_yscale("log")
        ax.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
        ax.set_ylabel(label)
    right.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def quadrants(rows: Sequence[Row], names: Sequence[str]) -> Figure:
    """Left: share of tokens by sign(advantage) x sign(d), stacked; right: ESS, clipped and truncated shares."""
    figure, (left, right) = base.figure_with_axes(2, width=12, height=4.6)
    arms = base.unique(rows, "arm")
    groups = [(arm, {"arm": arm}) for arm in arms]
    bottom = np.zeros(len(arms))
    for index, name in enumerate((*names, "share_token_no_sign")):
        height = np.array([np.mean(base.seeds(rows, name, arm=arm) or [0.0]) for arm in arms])
        colour = "#DDDDDD" if name == "share_token_no_sign" else COLOURS[index % len(COLOURS)]
        left.bar(range(len(arms)), height, 0.7, bottom=bottom, color=colour, alpha=0.85, label=QUADRANT_LABELS[name])
        bottom += height
    left.set_xticks(range(len(arms)), arms, rotation=30, ha="right", fontsize=8)
    left.set_ylabel("share of tokens (mean over seeds)")
    left.set_ylim(0, 1.35)
    left.set_yticks(np.linspace(0, 1, 6))
    base.legend(left)
    labels = {"ess_token": "ESS, tokens", "ess_seq": "ESS, sequences", "clipped_share_token": "clipped",
              "truncated_share": "truncated"}  # fmt: skip
    base.grouped_bars(right, rows, groups, labels)
    right.set_ylabel("share (ESS: of the sample size)")
    right.set_ylim(0, 1.25)
    base.legend(right)
    return figure


def layerwise(rows: Sequence[Row]) -> Figure:
    """Per rollout engine: the built-up mismatch (top) and what each block adds on equal inputs (bottom)."""
    rollouts = [r for r in base.unique(rows, "rollout") if r != "bf16"]
    rollouts = rollouts or base.unique(rows, "rollout")
    figure = Figure(figsize=(6.2 * len(rollouts), 7.6), layout="constrained")
    FigureCanvasAgg(figure)
    wanted = (("mean_token_rel_l2", "both on their own inputs"), ("mean_same_input_token_rel_l2", "same input"))
    for line, (metric, how) in enumerate(wanted):
        top = max(r["mean"] + (r["sd"] or 0) for r in rows if r["metric"] == metric)
        for column, rollout in enumerate(rollouts):
            ax = figure.add_subplot(2, len(rollouts), line * len(rollouts) + column + 1)
            _layer_axes(ax, [r for r in rows if r["rollout"] == rollout and r["metric"] == metric])
            ax.set_title(f"rollout engine {rollout}: {how}", fontsize=10, loc="left")
            ax.set_ylabel("mean |h trainer - h rollout| / |h rollout|")
            ax.set_ylim(0, 1.3 * top)
            base.legend(ax)
    return figure


def _layer_axes(ax: Axes, rows: Sequence[Row]) -> None:
    layers = base.unique(rows, "layer")
    for index, trainer in enumerate(base.unique(rows, "trainer")):
        own = {r["layer"]: r for r in rows if r["trainer"] == trainer}
        ax.errorbar(
            [layers.index(name) for name in own],
            [r["mean"] for r in own.values()],
            yerr=[r["sd"] or 0.0 for r in own.values()],
            color=COLOURS[index % len(COLOURS)],
            linestyle=STYLES[index % len(STYLES)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
            capsize=2.5,
            label=f"trainer {trainer}",
        )
    labels = [name.removeprefix("model.layers.") for name in layers]
    labels = [f"{n}.stream" if n.isdigit() else n for n in labels]
    many = len(labels) > 24
    ax.set_xticks(range(0, len(labels), 3 if many else 1), labels[:: 3 if many else 1], rotation=35, ha="right",
                  fontsize=7 if many else 8)  # fmt: skip
    ax.grid(True, linewidth=0.4, alpha=0.5)
    ax.spines[["top", "right"]].set_visible(False)


def trained(rows: Sequence[Row], before: Sequence[Row]) -> Figure:
    """Left: total gap at the start (where `before` has it) and after training; right: the terms after training.

    Bars span the seeds.
    """
    figure, (left, right) = base.figure_with_axes(2, width=12, height=4.6)
    own = [r for r in rows if r["engine"] == "own"]
    arms = base.unique(own, "arm")
    groups = [(arm, {"arm": arm}) for arm in arms]
    start = [
        {"arm": r["arm"], "before": float(r["mean_token_abs"])}
        for r in before
        if r.get("level") == "total" and r["mean_token_abs"] not in ("", None)
    ]
    both = [*start, *({"arm": r["arm"], "after": r["mean_token_abs_total"]} for r in own)]
    names = {"before": "warm checkpoint"} if start else {}
    base.grouped_bars(left, both, groups, names | {"after": "after training"})
    base.grouped_bars(right, own, groups, {f"mean_token_abs_{t}": t for t in TERMS})
    for ax, title in ((left, "total gap"), (right, "after training (a missing bar is exactly 0)")):
        base.log_bars(ax)
        ax.set_ylabel("mean over tokens (nats)")
        ax.set_title(title, fontsize=9, loc="left")
        base.legend(ax)
    return figure
