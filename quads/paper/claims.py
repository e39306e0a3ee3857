"""What the paper says, beside what was measured here.

    Table 2    average pass@1 of four benchmarks per arm (percent)
    Figure 8   the ablation: naive, W4A16 QAT only, QAT + RAC
    Figure 7   symmetric QAT mismatches more than asymmetric QAT
    Table 3    share k of compensated channels against the largest log-prob gap

Grades: A abstract, S public summaries of the full text, Q a machine summary of the full text, X derived from those.
The paper gives no intervals. Its benchmark scores are averages over 16 samples of 30 problems, where two arms that
differ by less than about `VISIBLE` points cannot be told apart (decoding noise, 80 % power): such rows count as level.

Contract: a claim is a pair of arms and a direction. The status beside it is computed from an interval measured here;
it speaks of direction at this experiment's scale, never of the paper's absolute numbers, which belong to a 25B model.
Differs from "reproduced yes/no": an interval that holds zero is "not separated here", whatever its middle says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quads.config import Evaluation
from quads.evaluation.stats import Interval, nested_bootstrap, paired_difference
from quads.paper.sources import Source
from quads.paper.tables import group, mean_per_problem, resampling, tail

Measure = Literal["pass@1", "gap"]
Relation = Literal["greater", "level"]

VISIBLE = 2.0  # percentage points

# Table 2: LiveCodeBench, HMMT25, AIME24, AIME25, average (grade Q)
TABLE_2: dict[str, tuple[float, float, float, float, float]] = {
    "BF16 RL": (63.05, 66.04, 83.54, 80.00, 73.15),
    "FP8 RL": (65.27, 63.54, 82.91, 79.79, 72.88),
    "naive NVFP4 RL": (24.25, 48.33, 66.67, 66.25, 51.37),
    "QUADS": (64.79, 62.92, 83.33, 80.42, 72.86),
}
FIGURE_8 = {"W4A16 QAT only": 71.1}
# Table 3: share of channels -> largest log-prob gap in nats (grade Q); 0 % is the naive rollout (grade S, about)
TABLE_3 = {12.5: 0.923, 25.0: 0.901, 50.0: 0.854, 75.0: 0.812, 100.0: 0.759}
GAP_NAIVE, GAP_BF16 = 1.3, 0.74  # grade S, read from a figure
COLLAPSE_STEP = 150  # grade A


def paper_average(row: str) -> tuple[float, str] | None:
    """Average pass@1 in percent that the paper gives for a row, with its grade; None where it gives none."""
    if row in TABLE_2:
        return TABLE_2[row][-1], "Q"
    return (FIGURE_8[row], "Q") if row in FIGURE_8 else None


@dataclass(frozen=True)
class Claim:
    """`greater` has the larger `measure` than `smaller` (arm names), or, for `relation` "level", about the same.

    `paper` is the paper's difference, greater minus smaller, or None.
    """

    measure: Measure
    relation: Relation
    greater: str
    smaller: str
    paper: float | None
    grade: str
    text: str


CLAIMS = (
    Claim("pass@1", "greater", "bf16", "nvfp4_naive", 21.78, "Q", "naive NVFP4 RL collapses"),
    Claim("pass@1", "greater", "quads", "nvfp4_naive", 21.49, "Q", "QUADS does not collapse"),
    Claim("pass@1", "greater", "qat_only", "nvfp4_naive", 19.7, "Q", "QAT alone recovers most of the loss"),
    Claim("pass@1", "greater", "quads", "qat_only", 1.8, "Q", "RAC recovers the rest"),
    Claim("pass@1", "level", "bf16", "quads", 0.29, "Q", "QUADS is level with BF16"),
    Claim("pass@1", "level", "bf16", "fp8", 0.27, "Q", "FP8 is level with BF16"),
    Claim("gap", "greater", "nvfp4_naive", "qat_only", None, "A", "one QDQ path for weights removes their error"),
    Claim("gap", "greater", "qat_only", "quads", None, "A", "RAC removes most of the activation error"),
    Claim("gap", "greater", "quads", "bf16", None, "S", "what remains of the gap stays above BF16's"),
    Claim("gap", "greater", "qat_symmetric", "qat_only", None, "Q", "symmetric QAT mismatches more than asymmetric"),
)


def compare_claims(sources: Sequence[Source], evaluation: Evaluation) -> list[dict[str, object]]:
    """One record per claim: the paper's difference, ours with its interval, and a status computed from it."""
    arms = group(sources)
    return [_compare(claim, arms.get(claim.greater), arms.get(claim.smaller), evaluation) for claim in CLAIMS]


def compare_rows(sources: Sequence[Source], evaluation: Evaluation) -> list[dict[str, object]]:
    """One record per arm: the paper's average beside pass@1 here, both in percent and relative to the BF16 arm."""
    arms = group(sources)
    base = paper_average("BF16 RL")
    out: list[dict[str, object]] = []
    for name, runs in arms.items():
        arm = runs[0].arm
        paper = paper_average(arm.paper_row) if arm.paper_row else None
        scores = mean_per_problem(runs, "own")
        against = arms.get("bf16")
        here = _paired(runs, against, evaluation) if against and name != "bf16" else None
        out.append(
            {
                "arm": name,
                "paper_row": arm.paper_row,
                "paper_average": paper[0] if paper else None,
                "paper_grade": paper[1] if paper else None,
                "paper_minus_bf16": round(paper[0] - base[0], 2) if paper and base and name != "bf16" else None,
                "here_pass_at_1_own": None if scores is None else 100 * float(scores.mean()),
                "here_minus_bf16": here.estimate if here else None,
                "here_minus_bf16_low": here.low if here else None,
                "here_minus_bf16_high": here.high if here else None,
                "status": _row_status(paper[0] - base[0] if paper and base else None, here, name),
                "run_ids": " ".join(r.run_id for r in runs),
            }
        )
    return out


def _row_status(paper: float | None, here: Interval | None, name: str) -> str:
    if name == "bf16":
        return "reference"
    if here is None:
        return "no BF16 arm here to compare with"
    if paper is None:
        return "the paper gives no number; " + _direction(here)
    return judge("level" if abs(paper) < VISIBLE else "greater" if paper > 0 else "smaller", here)


def _direction(here: Interval) -> str:
    if not here.excludes(0.0):
        return "here not separated from BF16"
    return "here above BF16" if here.estimate > 0 else "here below BF16"


def judge(claimed: Literal["greater", "smaller", "level"], here: Interval) -> str:
    """Status of a claim about a difference, from the interval measured here."""
    if not here.excludes(0.0):
        half = (here.high - here.low) / 2
        seen = "no difference seen at this scale" if claimed == "level" else "not separated at this scale"
        return f"{seen} (interval +- {half:.2g})"
    direction = "greater" if here.estimate > 0 else "smaller"
    if claimed == "level":
        return f"differs at this scale: {direction} here, level in the paper"
    return f"{'same' if direction == claimed else 'opposite'} direction at this scale"


def _compare(
    claim: Claim, greater: list[Source] | None, smaller: list[Source] | None, evaluation: Evaluation
) -> dict[str, object]:
    here: Interval | None = None
    absent = [name for name, runs in ((claim.greater, greater), (claim.smaller, smaller)) if runs is None]
    if greater is not None and smaller is not None:
        measure = _paired if claim.measure == "pass@1" else _gap_difference
        here = measure(greater, smaller, evaluation)
    if here is None:
        status = f"not measured here (no {', '.join(absent)})" if absent else "not measured here (no finite value)"
    else:
        status = judge(claim.relation, here)
    return {
        "claim": claim.text,
        "measure": claim.measure,
        "relation": claim.relation,
        "unit": "points" if claim.measure == "pass@1" else "nats",
        "greater": claim.greater,
        "smaller": claim.smaller,
        "paper_difference": claim.paper,
        "paper_grade": claim.grade,
        "here_difference": here.estimate if here else None,
        "here_low": here.low if here else None,
        "here_high": here.high if here else None,
        "status": status,
        "run_ids": " ".join(r.run_id for r in [*(greater or []), *(smaller or [])]),
    }


def _paired(a: Sequence[Source], b: Sequence[Source], evaluation: Evaluation) -> Interval | None:
    """pass@1 through the own engines, a - b in points, paired over problems."""
    x, y = mean_per_problem(a, "own"), mean_per_problem(b, "own")
    if x is None or y is None:
        return None
    return paired_difference(100 * x, 100 * y, **resampling(evaluation))


def _gap_difference(a: Sequence[Source], b: Sequence[Source], evaluation: Evaluation) -> Interval | None:
    """Mean gap of the last steps, a - b in nats, step by step between runs of one seed (they see the same prompts)."""
    others = {r.seed: r for r in b}
    pairs = [(tail(r, "gap_mean"), tail(others[r.seed], "gap_mean")) for r in a if r.seed in others]
    differences = [x - y for x, y in pairs if len(x) == len(y)]
    kept = [d[np.isfinite(d)] for d in differences if np.isfinite(d).any()]
    return nested_bootstrap(kept, **resampling(evaluation)) if kept else None


def order_of_gaps(sources: Sequence[Source]) -> list[str]:
    """Arm names by falling mean gap over the last ten steps; arms without a finite gap are left out."""
    arms = group(sources)
    size: dict[str, float] = {}
    for name, runs in arms.items():
        values = np.concatenate([tail(r, "gap_mean") for r in runs])
        if np.isfinite(values).any():
            size[name] = float(np.nanmean(values))
    return sorted(size, key=lambda n: -size[n])
