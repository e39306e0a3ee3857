# SPDX-License-Identifier: Apache-2.0
"""Measurements as the rows of quads.rollout_bench/1, and their medians, spreads and ratios.

    prefill    batch * prompt tokens / seconds of the run with one token per request
    decode     batch * (response - 1) tokens / (seconds of the whole run - seconds of that run)
    sync       seconds of one weight update (its rows have batch 1 and no tokens)
    ratio      median over rounds of (mode / reference) in the same round; for sync of seconds, so less is better
    spread     interquartile range / median

Contract: one row per round, in order of rounds, for every engine: equal places of two modes belong to one round. Ratios
are taken between rows of one backend only; native, emulated and roofline figures never meet. A round in which a whole
run was not longer than its prefill says nothing about decoding and is left out for all engines.
Differs from tokens per second of a whole run, which mixes both phases in a share that depends on the lengths.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quads.bench.fleet import Measurement, Sync

log = logging.getLogger(__name__)
REFERENCES = ("fp8", "bf16")


LEGEND = (
    "Backend: native (vLLM's own, or FP4 units) or emulated; the table above says what serves each engine. Median, and "
    "spread (interquartile range / median), over rounds; / fp8 and / bf16: median of the ratios within a round, which "
    "is not the ratio of the medians, and no better than the spreads. Memory: the largest of the rounds; on a GPU the "
    "peak of torch's allocator during the request, on a CPU what the process holds after it, which grows with the "
    "rounds."
)


class TooShortError(ValueError):
    """Decoding took no measurable time in any round."""


@dataclass(frozen=True)
class Summary:
    """Median of one mode in one phase and shape; None: not measured, or fewer than two rounds for a spread."""

    mode: str
    backend: str
    phase: str
    batch: int
    prompt_tokens: int
    response_tokens: int
    median: float
    spread: float | None
    rounds: int
    memory_bytes: int | None
    bytes: int | None
    over_fp8: float | None
    over_bf16: float | None


def label(backend: str) -> str:
    """native or emulated, by what the engine's receipt says."""
    return "native" if backend.startswith("native") else "emulated"


def served(mode: str, said: Mapping[str, Any]) -> dict[str, Any]:
    """What all rows of one engine say of it; `said` is its answer when it was ready."""
    execution = {key: said[key] for key in ("rollout_backend", "rollout_graphs")}
    return {"mode": mode, "backend": label(said["backend"]), **execution}


def rows(
    measured: Sequence[Measurement], syncs: Sequence[Sync], engines: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Rows of all engines. engines: name -> `served`. Raises TooShortError."""
    unclear = {m.round for m in measured if m.decode <= 0}
    for number in sorted(unclear):
        log.warning("round %d is left out: a whole run was not longer than its prefill", number + 1)
    kept = [m for m in measured if m.round not in unclear]
    if measured and not kept:
        raise TooShortError("decoding took no measurable time in any round; give more --response-tokens")
    found = []
    for name, who in engines.items():
        own = [m for m in kept if m.engine == name]
        found += [{**who, **row} for row in _speeds(own)]
        for sync in (s for s in syncs if s.engine == name and s.round not in unclear):
            size = {"batch": 1, "prompt_tokens": 0, "response_tokens": 0}
            said = {"seconds": sync.seconds, "bytes": sync.bytes, "memory_bytes": sync.memory}
            found.append({**who, "phase": "sync", **size, **said})
    return found


def _speeds(own: Sequence[Measurement]) -> Iterable[dict[str, Any]]:
    for shape in dict.fromkeys(m.shape for m in own):
        lengths = {"batch": shape.batch, "prompt_tokens": shape.prompt, "response_tokens": shape.response}
        mine = [m for m in own if m.shape == shape]
        for m in mine:
            speed = shape.batch * shape.prompt / m.prefill
            yield {"phase": "prefill", **lengths, "tokens_per_s": speed, "memory_bytes": m.prefill_memory}
        for m in mine:
            speed = shape.batch * (shape.response - 1) / m.decode
            yield {"phase": "decode", **lengths, "tokens_per_s": speed, "memory_bytes": m.whole_memory}


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[k] for k in ("backend", "phase", "batch", "prompt_tokens", "response_tokens"))


def _value(row: Mapping[str, Any]) -> float:
    return float(row["seconds"] if row["phase"] == "sync" else row["tokens_per_s"])


def _spread(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / statistics.median(values)


def summarize(found: Sequence[Mapping[str, Any]]) -> list[Summary]:
    """One entry per mode, backend, phase and shape, in order of rows."""
    cells: dict[tuple[Any, ...], dict[str, list[Mapping[str, Any]]]] = {}
    for row in found:
        cells.setdefault(_key(row), {}).setdefault(row["mode"], []).append(row)
    out = []
    for (backend, phase, batch, prompt, response), by_mode in cells.items():
        for mode, own in by_mode.items():
            values = [_value(row) for row in own]
            ratios = []
            for reference in REFERENCES:
                theirs = [_value(row) for row in by_mode.get(reference, ())]
                pairs = [a / b for a, b in zip(values, theirs, strict=False)]
                ratios.append(statistics.median(pairs) if pairs else None)
            memory = [row["memory_bytes"] for row in own if row.get("memory_bytes") is not None]
            size = next((row["bytes"] for row in own if row.get("bytes") is not None), None)
            out.append(
                Summary(
                    mode, backend, phase, batch, prompt, response, statistics.median(values), _spread(values),
                    len(values), max(memory, default=None), size, ratios[0], ratios[1],
                )
            )  # fmt: skip
    return out


def as_lines(summary: Sequence[Summary]) -> list[dict[str, Any]]:
    """Plain values, one object per entry."""
    return [{"kind": "summary", **asdict(entry)} for entry in summary]


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(summary: Sequence[Summary]) -> str:
    """Markdown: medians with spreads, memory, ratios."""
    lines = [
        "| backend | phase | batch | prompt + response | mode | median | spread | memory MiB | / fp8 | / bf16 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for s in summary:
        if s.phase == "sync":
            value = f"{s.median:.3f} s, {(s.bytes or 0) / 2**20:.1f} MiB" if s.bytes else f"{s.median:.3f} s"
        else:
            value = f"{s.median:.0f} tokens/s"
        memory = None if s.memory_bytes is None else s.memory_bytes / 2**20
        cells = (
            s.backend, s.phase, str(s.batch), f"{s.prompt_tokens} + {s.response_tokens}", s.mode, value,
            _cell(s.spread, ".1%"), _cell(memory, ".0f"), _cell(s.over_fp8, ".3f"), _cell(s.over_bf16, ".3f"),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def engine_table(started: Mapping[str, Mapping[str, Any]], failed: Mapping[str, str]) -> str:
    """Markdown: what multiplied, how long an engine took to start, and which ones are left out and why."""
    lines = ["| engine | multiplies | start s | memory MiB |", "|---|---|---|---|"]
    for name, said in started.items():
        lines.append(f"| {name} | {said['backend']} | {said['seconds']:.1f} | {said['memory_bytes'] / 2**20:.0f} |")
    lines += [f"| {name} | LEFT OUT | - | - |" for name in failed]
    return "\n".join([*lines, *(f"\n{name} is left out: {reason}" for name, reason in failed.items())])
