"""The decomposition during training: when it is measured, and its files.

    decomposition.jsonl, a line per step
    row = {step, tokens, sequences, seconds, <term>_mean, <term>_mean_abs, <term>_p99_abs, <term>_max_abs}
    term in total, delta_weight, delta_act, delta_num      (nats per token; quads.diagnostics.decompose defines them)

    decomposition_layers.jsonl, a line per step and layer: {step} and the row of quads.diagnostics.during_layers

Measured on the step's own rollout batch with the weights that produced it, before the update, so that total_mean_abs
is the history's gap_mean of that step (up to how micro-batches are averaged). Steps: the first, every multiple of
`every`, the last planned one.
Differs from the step-0 study in that the parts of delta_num are not measured: they need a second engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from quads.diagnostics.decompose import TERMS, Rungs, decompose
from quads.files import append_jsonl, read_jsonl, write_text_atomic

FILE = "decomposition.jsonl"
LAYERS_FILE = "decomposition_layers.jsonl"
COLUMNS = tuple(f"{term}_{how}" for term in ("total", *TERMS) for how in ("mean", "mean_abs", "p99_abs", "max_abs"))


def due(step: int, every: int, last: int) -> bool:
    """Whether step (1, 2, ...) is measured; every = 0 measures none."""
    return every > 0 and (step in (1, last) or step % every == 0)


def row(step: int, rungs: Rungs, mask_BR: Tensor) -> dict[str, Any]:
    """One line of the file; log-probs [B, R]. Raises what `decompose` raises, a broken identity among it."""
    found = decompose(rungs, mask_BR)
    out: dict[str, Any] = {"step": step, "tokens": int(found.mask.sum()), "sequences": len(found.mask)}
    for term, value_BR in {"total": found.total, **found.terms}.items():
        value, size = value_BR[found.mask], value_BR[found.mask].abs()
        numbers = (value.mean(), size.mean(), size.quantile(0.99), size.max())
        out |= {
            f"{term}_{how}": n.item()
            for how, n in zip(("mean", "mean_abs", "p99_abs", "max_abs"), numbers, strict=True)
        }
    return out


def keep_until(out: Path, step: int) -> None:
    """Drop rows after `step` from both files: a resumed run measures them again."""
    for path in (out / FILE, out / LAYERS_FILE):
        if path.exists():
            rows = [r for r in read_jsonl(path, ("step",), kind="decomposition") if r["step"] <= step]
            write_text_atomic(path, "".join(json.dumps(r) + "\n" for r in rows))


def append(out: Path, line: dict[str, Any]) -> None:
    """Add one row."""
    append_jsonl(out / FILE, line)


def append_layers(out: Path, step: int, lines: Iterable[dict[str, Any]]) -> None:
    """Add a step's rows of the layers."""
    append_jsonl(out / LAYERS_FILE, *({"step": step} | line for line in lines))
