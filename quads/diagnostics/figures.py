"""One figure per study (matplotlib without global state): points are means over seeds, bars span the seeds.

Log axes where values span decades. Colours and styles are those of the report's figures, so that an arm or a trainer is
told apart without colour as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quads.paper.figures import COLOURS, MARKERS, STYLES, panels

Row = dict[str, Any]
GAP_LABEL = "mean |log p trainer - log p rollout| (nats)"
OUTLIER_WORDS = {
    "w4a4_T2_minus_T0": "W4A4: T2 - T0",
    "weight_T1_minus_T0": "its weights: T1 - T0",
    "act_w4a4_T2_minus_T1": "its activations: T2 - T1",
    "act_rac_T2_minus_T1": "activations with RAC: T2 - T1",
    "fp8_T2_minus_T0": "FP8: T2 - T0",
}


def _seeds(rows: Sequence[Row], value: str, **where: Any) -> list[float]:
    """The values of all rows that match; rows without the value are left out."""
    chosen = [r for r in rows if all(r.get(k) == v for k, v in where.items())]
    return [float(r[value]) for r in chosen if isinstance(r.get(value), int | float)]


def _unique(rows: Sequence[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(r[key] for r in rows if key in r))


def _line(
    ax: Axes, rows: Sequence[Row], x: str, y: str, index: int, label: str, *, at: Callable[[Any], float], **where: Any
) -> None:
    """One line over the values of column x, with a bar from the lowest to the highest seed."""
    points = [(at(v), _seeds(rows, y, **{x: v}, **where)) for v in _unique(rows, x)]
    points = [(a, b) for a, b in points if b]
    mean = np.array([np.mean(b) for _, b in points])
    ends = np.array([[m - min(b), max(b) - m] for m, (_, b) in zip(mean, points, strict=True)]).T
    ax.errorbar(
        [a for a, _ in points],
        mean,
        yerr=np.maximum(ends, 0),
        color=COLOURS[index % len(COLOURS)],
        linestyle=STYLES[index % len(STYLES)],
        marker=MARKERS[index % len(MARKERS)],
        markersize=5,
        capsize=2.5,
        label=label,
    )


def _legend(ax: Axes) -> None:
    ax.legend(fontsize=8, frameon=False, ncols=2)


def _grouped_bars(ax: Axes, rows: Sequence[Row], groups: Sequence[tuple[str, Row]], values: dict[str, str]) -> None:
    """For every group (label, filter) one bar per value column (column -> label)."""
    width = 0.8 / len(values)
    for index, (column, label) in enumerate(values.items()):
        numbers = [_seeds(rows, column, **where) for _, where in groups]
        mean = np.array([np.mean(n) if n else np.nan for n in numbers])
        ends = np.array([[m - min(n), max(n) - m] if n else [0, 0] for m, n in zip(mean, numbers, strict=True)]).T
        place = np.arange(len(groups)) + (index - (len(values) - 1) / 2) * width
        colour = COLOURS[index % len(COLOURS)]
        ax.bar(place, mean, width, color=colour, alpha=0.85, label=label)
        ax.errorbar(place, mean, yerr=np.maximum(ends, 0), fmt="none", ecolor="#333333", elinewidth=0.8)
    ax.set_xticks(range(len(groups)), [label for label, _ in groups], rotation=30, ha="right", fontsize=8)
    ax.set_xlim(-0.75, len(groups) - 0.25)  # a single group would fill the axes


def _log_bars(ax: Axes) -> None:
    """Log axis for bars: they start at 0, which a log axis cannot show, so that the lowest bar sets the floor."""
    heights = [bar.get_height() for bar in ax.patches if bar.get_height() > 0]
    ax.set_yscale("log", nonpositive="clip")
    if heights:
        span = max(max(heights) / min(heights), 10.0)  # equal bars would leave the legend no room
        ax.set_ylim(min(heights) / 2, max(heights) * span**0.35)


# For other modules that draw figures.
figure_with_axes, line, seeds, unique = panels, _line, _seeds, _unique
legend, grouped_bars, log_bars = _legend, _grouped_bars, _log_bars


def decomposition(rows: Sequence[Row], arms: Sequence[str]) -> Figure:
    """Left: total and its three terms per arm; right: the parts of delta_num."""
    figure, (left, right) = panels(2, width=12, height=4.6)
    for ax, names, title in (
        (left, ("total", "delta_weight", "delta_act", "delta_num"), "the gap and its three terms"),
        (
            right,
            ("num_storage", "num_float32", "num_bf16", "num_decode", "of_routing", "of_batch"),
            "parts of delta_num",
        ),
    ):
        flat = [{"arm": r["arm"], r["term"]: r["mean_token_abs"]} for r in rows if "mean_token_abs" in r]
        _grouped_bars(ax, flat, [(arm, {"arm": arm}) for arm in arms], {n: n for n in names})
        _log_bars(ax)
        ax.set_ylabel("mean |term| over tokens (nats)")
        ax.set_title(f"{title} (a missing bar is exactly 0 or not measured)", fontsize=9, loc="left")
        _legend(ax)
    return figure


def tokens(rows: Sequence[Row]) -> Figure:
    """Gap by response position and by entropy decile, one line per arm; nearly empty bins (`filled`) are not drawn."""
    figure, axes = panels(2, width=13, height=4.8)
    for ax, by, label in zip(
        axes, ("position", "entropy_decile"), ("response position", "entropy decile"), strict=True
    ):
        own = filled([r for r in rows if r["by"] == by])
        for index, arm in enumerate(_unique(own, "arm")):
            _line(ax, own, "bin", "mean_token_abs_d", index, arm, at=float, arm=arm)
        ax.set_yscale("log")
        ax.set_xlabel(label)
        ax.set_ylabel(GAP_LABEL)
    axes[1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def filled(rows: Sequence[Row], share: float = 0.05) -> list[Row]:
    """Rows of bins with at least this share of the fullest bin's tokens: two late tokens are no mean to look at."""
    fullest = max((r["tokens"] for r in rows), default=0)
    return [r for r in rows if r["tokens"] >= share * fullest]


def layer_bars(rows: Sequence[Row]) -> Figure:
    """QSNR per layer on the left; dead zone, captured energy and overlap of both granularities on the right."""
    figure, (left, right) = panels(2, width=13, height=4.8)
    first, *_ = granularities = _unique(rows, "granularity")
    names = _unique(rows, "layer")
    groups = [(name.removeprefix("model.layers."), {"layer": name}) for name in names]
    formats = ("nvfp4", "nvfp4_rac", "fp8")
    own = [r for r in rows if r["granularity"] == first]
    _grouped_bars(left, own, groups, {f"activation_qsnr_db_{f}": f for f in formats})
    left.set_ylabel(f"activation QSNR (dB), masks by {first}")
    shares = {"dead_zone_share_of_nonzero": "dead zone"}
    wide = [{k: r[k] for k in ("layer", "seed", *shares)} for r in own]
    for granularity in granularities:
        for column, label in (("rac_energy_share_static", "RAC energy"), ("mask_overlap_share", "mask overlap")):
            shares[f"{column}_{granularity}"] = f"{label}, {granularity}"
            wide += [{"layer": r["layer"], f"{column}_{granularity}": r[column]}
                     for r in rows if r["granularity"] == granularity]  # fmt: skip
    _grouped_bars(right, wide, groups, shares)
    right.set_ylabel("share (calibrated masks)")
    for ax, room in ((left, 1.2), (right, 1.35)):
        ax.set_ylim(top=ax.get_ylim()[1] * room)  # room for the legend
        _legend(ax)
    return figure


def k_sweep(rows: Sequence[Row]) -> Figure:
    """Mean gap of both trainers and granularities (left), three definitions of the largest gap (right), against k."""
    figure, (left, right) = panels(2, width=12, height=4.4)
    swept = [r for r in rows if r["k"] != "floor"]
    cases = list(dict.fromkeys((r["trainer"], r["granularity"]) for r in swept))
    for index, (trainer, granularity) in enumerate(cases):
        where = {"trainer": trainer, "granularity": granularity}
        label = f"trainer {trainer}, {granularity}"
        _line(left, swept, "k", "mean_token_abs_d", index, label, at=lambda k: 100 * k, **where)
    where = {"trainer": swept[0]["trainer"], "granularity": swept[0]["granularity"]}
    for index, name in enumerate(("max_token_abs_d", "mean_microbatch_max_token_abs_d", "mean_seq_max_token_abs_d")):
        _line(right, swept, "k", name, index, name, at=lambda k: 100 * k, **where)
        floor = _seeds(rows, name, k="floor")
        if floor:
            right.set_ylim(bottom=min(floor) / 6)  # the last definition is the lowest: room for the legend
            right.axhline(float(np.mean(floor)), color=COLOURS[index], linewidth=0.8, linestyle=":")
    floor = _seeds(rows, "mean_token_abs_d", k="floor")
    if floor:
        left.set_ylim(bottom=min(floor) / 4)  # room for the legend below the floor
        left.axhline(float(np.mean(floor)), color="#555555", linewidth=0.8, linestyle=":", label="BF16 / BF16")
    left.set_ylabel(GAP_LABEL)
    right.set_ylabel("largest gap, QAT trainer, blocks (nats)\ndotted: BF16 / BF16")
    for ax in (left, right):
        ax.set_yscale("log")
        ax.set_xlabel("k (%)")
        _legend(ax)
    return figure


def masks(rows: Sequence[Row]) -> Figure:
    """Gap and its batch-dependent part for every granularity and kind of mask."""
    figure, (ax,) = panels(width=8.5, height=4.4)
    pairs = list(dict.fromkeys((r["granularity"], r["mask"]) for r in rows))
    groups = [("no RAC" if g == "none" else f"{g}, {m}", {"granularity": g, "mask": m}) for g, m in pairs]
    columns = {
        "mean_token_abs_d": "gap, QAT trainer",
        "mean_token_abs_delta_act": "delta_act",
        "mean_token_abs_num_alone": "num: alone - emulation",
        "mean_token_abs_num_batch": "num: in a batch - alone",
        "mean_token_abs_num_decode": "num: decode - prefill",
    }
    _grouped_bars(ax, rows, groups, columns)
    _log_bars(ax)
    ax.set_ylabel("mean over tokens (nats)")
    _legend(ax)
    return figure


def matrix(rows: Sequence[Row]) -> Figure:
    """Heat map of the mean gap: trainer precision down, rollout precision across; every cell with its number."""
    figure, (ax,) = panels(width=7.2, height=4.4)
    trainers, rollouts = _unique(rows, "trainer"), _unique(rows, "rollout")
    cells = np.array(
        [[np.mean(_seeds(rows, "mean_token_abs_d", trainer=t, rollout=r)) for r in rollouts] for t in trainers]
    )
    image = ax.imshow(np.log10(cells), cmap="viridis_r", aspect="auto")
    middle = (np.log10(cells).max() + np.log10(cells).min()) / 2
    for (i, j), value in np.ndenumerate(cells):
        colour = "white" if np.log10(value) > middle else "black"
        ax.text(j, i, f"{value:.4f}", ha="center", va="center", fontsize=9, color=colour)
    ax.grid(False)
    ax.set_xticks(range(len(rollouts)), rollouts)
    ax.set_yticks(range(len(trainers)), trainers)
    ax.set_xlabel("rollout engine")
    ax.set_ylabel("trainer")
    figure.colorbar(image, label=f"log10 of {GAP_LABEL}")
    return figure


def stacked(rows: Sequence[Row]) -> Figure:
    """Total and terms for every rollout x trainer of the format study."""
    figure, (ax,) = panels(width=10, height=4.6)
    pairs = list(dict.fromkeys((r["rollout"], r["trainer"]) for r in rows))
    groups = [(f"{r.split('-')[0]} | {t}", {"rollout": r, "trainer": t}) for r, t in pairs]
    names = ("total", "delta_weight", "delta_act", "delta_num")
    _grouped_bars(ax, rows, groups, {f"mean_token_abs_{n}": n for n in names})
    _log_bars(ax)
    ax.set_ylabel("mean over tokens (nats)")
    ax.set_xlabel("rollout | trainer (weight/activation)")
    _legend(ax)
    return figure


def scales(rows: Sequence[Row]) -> Figure:
    """|T1 - T2| by granularity of the activation's global scale, without and with RAC."""
    figure, (ax,) = panels(height=3.8)
    words = {"token": "per token", "forward": "per forward", "constant": "constant"}
    groups = [(f"{words[s]}{', RAC' if rac else ''}", {"scale": s, "rac": rac}) for rac in (False, True)
              for s in _unique(rows, "scale")]  # fmt: skip
    _grouped_bars(ax, rows, groups, {"mean_token_abs_d": "mean |T2 - T1|", "p99_token_abs_d": "p99 |T2 - T1|"})
    _log_bars(ax)
    ax.set_ylabel("nats")
    _legend(ax)
    return figure


def drift(rows: Sequence[Row]) -> Figure:
    """Amplification of input noise by each quantizer, mean over layers, against the noise."""
    figure, (ax,) = panels(height=4.0)
    own = [r for r in rows if "noise_over_rms" in r]
    for index, quantizer in enumerate(_unique(own, "quantizer")):
        _line(ax, own, "noise_over_rms", "amplification_change_over_noise", index, quantizer, at=float,
              quantizer=quantizer)  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("noise / rms of the row (2^-9: bf16 rounding)")
    ax.set_ylabel("|Q(x + eta) - Q(x)| / |eta|\nmean over layers; bars: all layers and seeds")
    _legend(ax)
    return figure


def outliers(rows: Sequence[Row]) -> Figure:
    """Emulated terms against the strength of the injected channels."""
    figure, (ax,) = panels(height=4.2)
    columns = [key for key in rows[0] if key.startswith("mean_token_abs_")]
    for index, column in enumerate(columns):
        _line(ax, rows, "strength", column, index, OUTLIER_WORDS[column.removeprefix("mean_token_abs_")], at=float)
    ax.set_yscale("log")
    ax.set_xlabel("strength of injected outlier channels (1: off)")
    ax.set_ylabel("mean |difference| over tokens (nats)")
    ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
