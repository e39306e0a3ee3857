"""verl's per-step log -> the flat history row of this project (pure functions).

verl's file logger writes {"step": n, "data": {metric: value}}; `history_row` picks and renames what the tables,
figures and MLflow read. Step 0 holds only the accuracy of the initial weights in the arm's own engine. Units: seconds,
tokens, natural log. Differs from logging all of verl's ~120 metrics in that a missing required one is an error here,
not a gap in a plot later.
"""

from __future__ import annotations

from typing import Any

_REQUIRED = {
    "reward": "critic/score/mean",
    "gap_mean": "actor/quads/gap_mean",
    "gap_max": "actor/quads/gap_max",
    "gap_p99": "actor/quads/gap_p99",
    "k1": "actor/quads/k1",
    "k3": "actor/quads/k3",
    "ess": "actor/quads/ess",
    "clipped_share": "actor/quads/clipped_share",
    "grad_norm": "actor/grad_norm",
    "lr": "actor/lr",
    "loss": "actor/pg_loss",
    "pg_clipfrac": "actor/pg_clipfrac",
    "entropy": "actor/entropy_loss",
    "response_tokens_mean": "response_length/mean",
    "response_tokens_max": "response_length/max",
    "tokens_per_s": "perf/throughput",
    "seconds": "timing_s/step",
    "seconds_update": "timing_s/update_actor",
    "seconds_sync": "timing_s/update_weights",
}

# Only the inline agent loop reports these (verl's response_length/clip_ratio is relative to the batch's own maximum).
_INLINE = {
    "seconds_rollout": "quads/seconds_generate",
    "truncated_share": "quads/truncated_share",
}
_STATUS = "quads/status/"  # share of samples by grade status, so that a broken grader shows in every step


def eval_accuracy(data: dict[str, Any]) -> float | None:
    """Validation accuracy in a verl log record, if it holds one."""
    found = [v for k, v in data.items() if k.startswith("val-core/") and "/acc/mean@" in k]
    found = found or [v for k, v in data.items() if k.startswith("val-core/") and "/mean@" in k]
    return float(found[0]) if found else None


def history_row(record: dict[str, Any]) -> dict[str, float]:
    """One history row from one verl record. Raises KeyError naming the metrics that are missing."""
    step, data = record["step"], record["data"]
    row: dict[str, float] = {"step": step}
    accuracy = eval_accuracy(data)
    if accuracy is not None:
        row["eval_accuracy"] = accuracy
    if step == 0 or "timing_s/step" not in data:
        return row
    missing = [verl for verl in _REQUIRED.values() if verl not in data]
    if missing:
        raise KeyError(f"verl's record of step {step} lacks {missing}; it has {sorted(data)}")
    found = {ours: float(data[verl]) for ours, verl in _REQUIRED.items()}
    inline = {ours: float(data[verl]) for ours, verl in _INLINE.items() if verl in data}
    statuses = {f"status_{k.removeprefix(_STATUS)}": float(v) for k, v in data.items() if k.startswith(_STATUS)}
    return row | found | inline | statuses


def merge(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Rows by step, later ones (of a resumed attempt) winning; a resumed run's first validation is not step 0's."""
    by_step: dict[int, dict[str, float]] = {}
    for row in rows:
        step = int(row["step"])
        if "reward" in row or step not in by_step:
            by_step[step] = row
    return [by_step[s] for s in sorted(by_step)]
