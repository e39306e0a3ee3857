"""The one figure: verdicts' gaps against the limits, the search, activation QSNR and drift by layer.

Colours and styles are those of the report's figures. Differs from the studies' figures in that bars carry a bootstrap
interval over sequences instead of a range over seeds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from quads.paper.figures import COLOURS, MARKERS, STYLES

Row = dict[str, Any]


def make_figure(result: Row) -> Figure:
    """Four panels from the dict of report.run."""
    figure = Figure(figsize=(13, 8.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(2, 2, i + 1) for i in range(4)]
    for ax in axes:
        ax.grid(True, linewidth=0.4, alpha=0.5)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    _gaps(axes[0], result)
    _search(axes[1], result)
    _qsnr(axes[2], result)
    _drift(axes[3], result)
    return figure


def _short(name: str) -> str:
    return name.replace("w4a4+rac-", "+rac ").replace("block16", "block")


def _limits(ax: Axes, result: Row) -> None:
    limits = result["limits"]
    ax.axhline(limits["ok_below"], color="#009E73", linewidth=1.0, linestyle="--")
    ax.axhline(limits["will_hurt_from"], color="#D55E00", linewidth=1.0, linestyle="--")


def _gaps(ax: Axes, result: Row) -> None:
    rollouts = list(dict.fromkeys(v["rollout"] for v in result["verdicts"]))
    trainers = list(dict.fromkeys(v["trainer"] for v in result["verdicts"]))
    width = 0.8 / len(trainers)
    for index, trainer in enumerate(trainers):
        rows = [v for v in result["verdicts"] if v["trainer"] == trainer]
        # a gap that is not finite is null in the result: no bar
        gap, below, above = (np.array([r[k] for r in rows], float) for k in ("gap", "interval_low", "interval_high"))
        ends = np.array([gap - below, above - gap])
        place = np.arange(len(rows)) + (index - (len(trainers) - 1) / 2) * width
        ax.bar(place, gap, width, color=COLOURS[index], alpha=0.85, label=f"trainer {trainer}")
        ax.errorbar(place, gap, yerr=np.maximum(ends, 0), fmt="none", ecolor="#333333", elinewidth=0.9)
    ax.set_xticks(range(len(rollouts)), [_short(r) for r in rollouts], fontsize=8)
    ax.set_yscale("log")
    low = min((v["gap"] for v in result["verdicts"] if v["gap"]), default=result["limits"]["ok_below"])
    high = max(v["interval_high"] or 0.0 for v in result["verdicts"])
    ax.set_ylim(min(low, result["limits"]["ok_below"]) / 2, 4 * max(high, result["limits"]["will_hurt_from"]))
    _limits(ax, result)
    ax.set_ylabel("predicted mean gap (nats)")
    ax.set_title(
        f"Verdicts on {result['sequences']['basis']} tokens (dashed: ok below, will hurt from; toy runs)", fontsize=9,
        loc="left",
    )  # fmt: skip
    ax.legend(fontsize=8, frameon=False, ncols=3)


def _search(ax: Axes, result: Row) -> None:
    found = result["search"]
    if found is None:
        ax.text(0.5, 0.5, "no search (gap 0, or no RAC asked for)", ha="center", transform=ax.transAxes, fontsize=9)
        return
    trainer = "w4a16" if any(r["trainer"] == "w4a16" for r in found["rows"]) else found["rows"][0]["trainer"]
    rows = [r for r in found["rows"] if r["trainer"] == trainer]
    whole = [r for r in rows if r["k"] == 1]  # every mask is the same there
    kinds = dict.fromkeys((r["granularity"], r["mask"]) for r in rows)
    for index, (granularity, mask) in enumerate(kinds):
        own = [r for r in rows if (r["granularity"], r["mask"]) == (granularity, mask) and r["k"] < 1] + whole
        ax.plot(
            [100 * r["k"] for r in own], [r["gap"] for r in own], color=COLOURS[index], linestyle=STYLES[index],
            marker=MARKERS[index], markersize=5, label=f"{granularity}, {mask}",
        )  # fmt: skip
    ax.axhline(found["target"], color="#333333", linewidth=1.0, linestyle=":", label=f"target {found['target']:g}")
    ax.set_yscale("log")
    ax.set_xlabel("k (%)")
    ax.set_ylabel("predicted mean gap (nats)")
    ax.set_title(f"W4A4 + RAC against trainer {trainer}", fontsize=9, loc="left")
    ax.legend(fontsize=8, frameon=False)


def _qsnr(ax: Axes, result: Row) -> None:
    columns = {"activation_qsnr_db_nvfp4": "activations NVFP4", "activation_qsnr_db_nvfp4_rac": "with RAC",
               "activation_qsnr_db_fp8": "activations FP8", "weight_qsnr_db_nvfp4": "weights NVFP4"}  # fmt: skip
    rows = result["layers"]
    for index, (column, label) in enumerate(columns.items()):
        values = [np.nan if r[column] is None else r[column] for r in rows]
        ax.plot(values, color=COLOURS[index], marker=MARKERS[index], markersize=4, linestyle=STYLES[index], label=label)
    names = [r["layer"].removeprefix("model.layers.") for r in rows]
    step = max(1, len(names) // 16)
    ax.set_xticks(range(0, len(names), step), names[::step], rotation=30, ha="right", fontsize=7)
    ax.set_ylabel("QSNR (dB), higher is better")
    ax.set_title("Quantized inputs in model order", fontsize=9, loc="left")
    ax.legend(fontsize=8, frameon=False)


def _drift(ax: Axes, result: Row) -> None:
    asked = {f"rollout:{name}" for name in ("bf16", *(v["rollout"] for v in result["verdicts"]))}
    shown = [key for key in result["drift"] if key in asked]
    for index, key in enumerate(shown):
        values = result["drift"][key]
        ax.plot(
            range(1, len(values) + 1), values, color=COLOURS[index], linestyle=STYLES[index], marker=MARKERS[index],
            markersize=4, markevery=max(1, len(values) // 12), label=_short(key.removeprefix("rollout:")),
        )  # fmt: skip
    ax.set_yscale("log")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("decoder layer")
    ax.set_ylabel("|h - h_trainer| / |h_trainer|")
    ax.set_title("Rollout's hidden state against the trainer with its weights", fontsize=9, loc="left")
    ax.legend(fontsize=8, frameon=False)
