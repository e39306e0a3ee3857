"""preflight.md and the summary on the terminal, from the dict of report.run. No torch.

Contract: every table says on which tokens its numbers were taken, modelled times say that they are modelled, a number
that does not exist is a dash. Differs from preflight.json in that only the verdicts' pairs and the worst layers appear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from quads.diagnostics.preflight.cost import TOKENS
from quads.diagnostics.preflight.report import OFFENDERS

Row = dict[str, Any]
BASIS = {
    "response": "the given responses; next tokens are the rollout's own, contexts are the file's",
    "generated": "responses sampled from the checkpoint (temperature 1); next tokens are the rollout's own, contexts "
    "are the checkpoint's",
    "prompt": "the prompts' own text: no responses were given. A gap on prompt tokens differs from one on sampled "
    "responses (on this project's toy it was 1.6 to 3.0 times as large)",
}


def summary(result: Row) -> str:
    """What a reader needs on a terminal."""
    s, model = result["sequences"], result["model"]
    lines = [
        f"{model['class']}, {model['parameters']:,} parameters, {model['layers']} layers; {s['scored_tokens']} scored "
        f"tokens of {s['scored']} sequences ({s['basis']}), {s['calibration']} more calibrate; {result['seconds']} s",
        "",
        f"{'rollout':<30} {'trainer':<8} {'verdict':<10} {'gap':>8}  95 % interval      p99     max",
    ]
    for v in result["verdicts"]:
        lines.append(
            f"{v['rollout']:<30} {v['trainer']:<8} {v['verdict']:<10} {_four(v['gap']):>8}  "
            f"[{_four(v['interval_low'])}, {_four(v['interval_high'])}]  {v['p99']:6.3f}  {v['max']:6.2f}"
        )
    lines += ["", *_search_lines(result), *_limits(result)]
    return "\n".join(lines)


def _search_lines(result: Row) -> list[str]:
    found = result["search"]
    if found is None:
        return []
    lines = []
    for trainer, row in found["found"].items():
        if row is None:
            best = min((r for r in found["rows"] if r["trainer"] == trainer), key=lambda r: _or_inf(r["gap"]))
            lines.append(
                f"trainer {trainer}: no RAC setting reaches a gap of {found['target']:g}; the smallest is "
                f"{_four(best['gap'])} (k {best['k']:g}, {best['granularity']}, {best['mask']})"
            )
        else:
            lines.append(
                f"trainer {trainer}: a gap of {found['target']:g} is reached with k {row['k']:g}, "
                f"{row['granularity']}, {row['mask']} "
                f"({row['gap']:.4f}, {100 * row['selected_channel_share']:.0f} % of the channels)"
            )
    return [*lines, ""]


def _limits(result: Row) -> list[str]:
    limits = result["limits"]
    return [
        f"ok below {limits['ok_below']:.3g}, will hurt from {limits['will_hurt_from']:.3g} nats, by runs of a toy "
        f"(154k parameters).",
        "Whether these limits hold for a model of real size is not known; a gap at step 0 is no training result.",
    ]


def markdown(result: Row) -> str:
    """The report."""
    model, s = result["model"], result["sequences"]
    parts = [
        f"# Pre-flight of {model['folder']}\n",
        f"{model['class']}, {model['parameters']:,} parameters, {model['layers']} layers, {model['quantized_modules']} "
        f"quantized modules. {s['scored_tokens']} scored tokens of {s['scored']} sequences, {s['calibration']} other "
        f"sequences calibrate RAC masks, {s['cut']} were cut to {result['settings']['tokens']} tokens. Scored: "
        f"{BASIS[s['basis']]}.\n",
        "## Verdicts\n",
        _table(
            ("rollout", "trainer", "verdict", "gap", "95 % interval", "p99", "max", "clipped %", "why"),
            [
                (
                    v["rollout"],
                    v["trainer"],
                    f"**{v['verdict']}**",
                    _n(v["gap"]),
                    f"[{_n(v['interval_low'])}, {_n(v['interval_high'])}]",
                    _n(v["p99"]),
                    _n(v["max"]),
                    _n(100 * v["clipped_share"]),
                    v["reason"],
                )
                for v in result["verdicts"]
            ],
        ),
        "Gap: expected |log pi_trainer - log pi_rollout| (nats) over the rollout's own next token; p99, max and "
        "clipped over one drawn token per context. The rollout side is emulated: quantized products exactly, the "
        "engine around them by bf16 arithmetic.\n",
        "\n".join(_limits(result)) + "\n",
        *_matrix(result),
        *_search_section(result),
        *_layer_section(result),
        *_cost_section(result),
        *_evidence_section(result),
    ]
    return "\n".join(parts)


def _matrix(result: Row) -> list[str]:
    asked = ["bf16", *dict.fromkeys(v["rollout"] for v in result["verdicts"])]
    trainers = list(dict.fromkeys(r["trainer"] for r in result["pairs"]))
    by = {(r["trainer"], r["rollout"]): r for r in result["pairs"]}
    rows = [(t, *(_n(by[t, r]["expected_mean_token_abs_d"]) for r in asked), _n(result["shift"][t])) for t in trainers]
    return [
        "## Trainer (down) x rollout (across), predicted mean gap\n",
        _table(("trainer", *asked, "KL(bf16 trainer, this trainer)"), rows),
        "The last column is what the trainer's own precision changes in the policy before the first step.\n",
    ]


def _search_section(result: Row) -> list[str]:
    found = result["search"]
    if found is None:
        return []
    trainers = list(found["found"])
    columns = ("k", "granularity", "mask", "selected_channel_share")
    by: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in found["rows"]:
        by.setdefault(tuple(row[c] for c in columns), {})[row["trainer"]] = row
    rows = [
        (f"{k:g}", granularity, mask, _n(share), *(_n(own[t]["gap"]) for t in trainers))
        for (k, granularity, mask, share), own in by.items()
    ]
    lines = "".join(f"- {line}\n" for line in _search_lines(result) if line)
    shown = (*columns[:3], "channels compensated", *(f"gap, trainer {t}" for t in trainers))
    return [f"## k and mask for a gap of {found['target']:g}\n", lines, _table(shown, rows)]


def _layer_section(result: Row) -> list[str]:
    rows = [
        (f"{text} ({column})", ", ".join(f"{r['layer'].removeprefix('model.layers.')} {_n(r['value'])}" for r in found))
        for column, text in ((c, t) for c, (_, t) in OFFENDERS.items())
        for found in [result["worst"][column]]
    ]
    return ["## Worst inputs\n", _table(("worst first", "inputs"), rows)]


def _cost_section(result: Row) -> list[str]:
    rows = [
        (r["rollout"], _size(r["native_bytes"]), _size(r["emulated_bytes"]),
         *(_n(r[f"model_speedup_over_bf16_at_{t}_tokens"]) for t in TOKENS))
        for r in result["cost"]
    ]  # fmt: skip
    times = tuple(f"model, {t} tokens" for t in TOKENS)
    return [
        "## Weights in memory, and modelled speed\n",
        _table(("rollout", "native", "emulated", *times), rows),
        f"Speed: quantized GEMMs over BF16's by a roofline model with {result['settings']['chip']} rates (-: no matrix "
        "units for the format); nothing was measured. Attention, head, KV cache and sampling are left out; in a tiny "
        "model kernel launches are all there is.\n",
    ]


def _evidence_section(result: Row) -> list[str]:
    rows = [
        (e["run"], _n(e["gap"]), f"{e['points']:+.1f} [{e['low']:+.1f}, {e['high']:+.1f}]", f"docs/{e['source']}")
        for e in result["evidence"]
    ]
    return [
        "## Where the limits come from\n",
        _table(("trained run (trainer / rollout)", "gap at the start", "pass@1 minus BF16 arm", "source"), rows),
    ]


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _n(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _four(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _or_inf(value: float | None) -> float:
    return math.inf if value is None else value


def _size(value: int) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.2f} MiB"
