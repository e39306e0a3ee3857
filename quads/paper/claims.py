"""What the paper says, beside what was measured here.

    Table 2    average pass@1 of four benchmarks per arm (percent)
    Figure 8   the ablation: naive, W4A16 QAT only, QAT + RAC
    Figure 7   symmetric QAT mismatches more than asymmetric QAT
    Table 3    share k of compensated channels against the largest log-prob gap

Grades: A abstract, S public summaries of the full text, Q a machine summary of the full text, X derived from those.
The paper gives no intervals. Its benchmark scores are averages over 16 samples of 30 problems, where two arms that
differ by less than about `VISIBLE` points cannot be told apart (decoding noise, 80 % power): such rows count as level.

Contract: a claim is a pair of arms and a direction (or "level"), and its text says no more than what is tested. The
verdict beside it comes from the intervals measured here by the rule in quads.paper.status, and from nothing else: the
interval over problems (or steps), and with two or more seeds also the one over seeds (quads.paper.seeds).
A claim that an arm collapses, or does not, is judged by its runs: reproduced when more than half of the seeds collapse,
or none does.
Differs from comparing absolute numbers, which belong to a 25B model: only differences and directions are judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from quads.config import Evaluation, Experiment
from quads.evaluation.stats import Interval, nested_bootstrap, paired_difference
from quads.paper import seeds, status
from quads.paper.sources import Source
from quads.paper.status import Verdict
from quads.paper.tables import group, mean_per_problem, resampling, tail, too_short

Measure = Literal["pass@1", "gap", "recovered", "collapsed"]
Relation = Literal["greater", "level", "collapses", "holds"]
UNITS: dict[Measure, str] = {"pass@1": "points", "gap": "nats", "recovered": "share", "collapsed": "share"}
MOST = 0.5  # "most of the loss": a share above this

VISIBLE = 2.0  # percentage points
BENCHMARKS = ("LiveCodeBench", "HMMT25", "AIME24", "AIME25")

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
# Rollout throughput: QUADS over FP8 (A), plain W4A4 over QUADS (S: RAC costs 5 to 9 %), plain W4A4 over FP8 (X)
THROUGHPUT = {"quads_over_fp8": (1.16, "A"), "w4a4_over_quads": (1.07, "S"), "w4a4_over_fp8": (1.24, "X")}


def paper_average(row: str) -> tuple[float, str] | None:
    """Average pass@1 in percent that the paper gives for a row, with its grade; None where it gives none."""
    if row in TABLE_2:
        return TABLE_2[row][-1], "Q"
    return (FIGURE_8[row], "Q") if row in FIGURE_8 else None


@dataclass(frozen=True)
class Claim:
    """`greater` has the larger `measure` than `smaller` (arm names), or, for `relation` "level", about the same.

    `paper` is the paper's difference, greater minus smaller, or None. Measure "recovered": the share of the loss of
    `smaller` against bf16 that `greater` recovers; the claim is a share above MOST. Measure "collapsed": the share of
    the seeds of `greater` (the same as `smaller`) that collapse; relation "collapses" or "holds" says which is claimed.
    """

    measure: Measure
    relation: Relation
    greater: str
    smaller: str
    paper: float | None
    grade: str
    text: str


CLAIMS = (
    Claim("collapsed", "collapses", "nvfp4_naive", "nvfp4_naive", None, "A", "naive NVFP4 RL collapses"),
    Claim("collapsed", "holds", "quads", "quads", None, "A", "QUADS does not collapse"),
    Claim("pass@1", "greater", "bf16", "nvfp4_naive", 21.78, "Q", "naive NVFP4 RL ends below BF16"),
    Claim("pass@1", "greater", "quads", "nvfp4_naive", 21.49, "Q", "QUADS ends above naive NVFP4 RL"),
    Claim("pass@1", "greater", "qat_only", "nvfp4_naive", 19.7, "Q", "QAT alone is better than naive"),
    Claim("recovered", "greater", "qat_only", "nvfp4_naive", 0.904, "X", "QAT alone recovers most of the loss"),
    Claim("pass@1", "greater", "quads", "qat_only", 1.8, "Q", "QAT + RAC is better than QAT alone"),
    Claim("pass@1", "level", "bf16", "quads", 0.29, "Q", "QUADS is level with BF16"),
    Claim("pass@1", "level", "bf16", "fp8", 0.27, "Q", "FP8 is level with BF16"),
    Claim("gap", "greater", "nvfp4_naive", "qat_only", None, "A", "QAT lowers the gap"),
    Claim("gap", "greater", "qat_only", "quads", None, "A", "RAC lowers the gap further"),
    Claim("gap", "greater", "quads", "bf16", None, "S", "what remains of the gap stays above BF16's"),
    Claim("gap", "greater", "qat_symmetric", "qat_only", None, "Q", "symmetric QAT mismatches more than asymmetric"),
)


@dataclass(frozen=True)
class Judged:
    """A claim with what was measured here; `here` is None where nothing was, `over_seeds` for fewer than two seeds."""

    claim: Claim
    here: Interval | None
    verdict: Verdict
    runs: tuple[Source, ...]
    over_seeds: Interval | None = None


def judge_claims(sources: Sequence[Source], experiment: Experiment) -> list[Judged]:
    """Every claim, in order, judged by quads.paper.status; the margin of "level" is the experiment's."""
    arms = group(sources)
    return [_judge(claim, arms, experiment) for claim in CLAIMS]


def _judge(claim: Claim, arms: dict[str, list[Source]], experiment: Experiment) -> Judged:
    names = list(dict.fromkeys([claim.greater, claim.smaller, *(["bf16"] if claim.measure == "recovered" else [])]))
    absent = [name for name in names if name not in arms]
    runs = tuple(r for name in names for r in arms.get(name, ()))
    if absent:
        return Judged(claim, None, missing_arms(absent, experiment), runs)
    if claim.measure == "collapsed":
        return _collapse(claim, runs, experiment)
    here, by_seed = _measured(claim, arms, experiment.evaluation)
    if here is None:
        return Judged(claim, None, status.not_run("no finite value in these runs"), runs)

    def rule(value: Interval) -> Verdict:
        if claim.relation == "level":
            return status.level(value, experiment.evaluation.noninferiority_margin)
        return status.greater(value, at_least=MOST if claim.measure == "recovered" else None)

    over = "steps" if claim.measure == "gap" else "problems"
    verdict = status.jointly(rule(here), rule(by_seed) if by_seed else None, over)
    return Judged(claim, here, verdict, runs, by_seed)


def _measured(
    claim: Claim, arms: dict[str, list[Source]], evaluation: Evaluation
) -> tuple[Interval | None, Interval | None]:
    """The claim's quantity over problems (or steps), and over seeds."""
    a, b = arms[claim.greater], arms[claim.smaller]
    if claim.measure == "recovered":
        return recovered(a, b, arms["bf16"], evaluation), seeds.share(a, b, arms["bf16"], evaluation)
    if claim.measure == "gap":
        return gap_difference(a, b, evaluation), gap_over_seeds(a, b, evaluation)
    return paired_points(a, b, evaluation), points_over_seeds(a, b, evaluation)


def _collapse(claim: Claim, runs: tuple[Source, ...], experiment: Experiment) -> Judged:
    found = seeds.collapsed(runs, experiment.evaluation, experiment.diagnostics.collapse)
    count, of = sum(found.values()), len(found)
    why = f"{count} of {of} seeds collapsed"
    if not count and too_short(runs, experiment.diagnostics.collapse):
        fewest = min(len(run.steps) for run in runs)
        needed = experiment.diagnostics.collapse.shortest
        verdict = Verdict("inconclusive", f"{why}, after {fewest} steps; the detector needs {needed}")
    elif claim.relation == "holds":
        verdict = Verdict("reproduced" if not count else "contradicted" if 2 * count > of else "partly", why)
    else:
        verdict = Verdict("reproduced" if 2 * count > of else "partly" if count else "contradicted", why)
    return Judged(claim, Interval(count / of, count / of, count / of), verdict, runs)


def missing_arms(absent: Sequence[str], experiment: Experiment) -> Verdict:
    """What to run to have these arms."""
    if all(name in experiment.more_arms for name in absent):
        return status.not_run(f"snakemake {experiment.name}_all adds {', '.join(absent)}")
    return status.not_run(f"no arm {', '.join(absent)} in this experiment")


def claim_records(judged: Sequence[Judged]) -> list[dict[str, object]]:
    """One flat record per claim: the paper's difference, ours with its interval, the verdict."""
    return [
        {
            "claim": j.claim.text,
            "measure": j.claim.measure,
            "relation": j.claim.relation,
            "unit": UNITS[j.claim.measure],
            "greater": j.claim.greater,
            "smaller": j.claim.smaller,
            "paper_difference": j.claim.paper,
            "paper_grade": j.claim.grade,
            "here_difference": j.here.estimate if j.here else None,
            "here_low": j.here.low if j.here else None,
            "here_high": j.here.high if j.here else None,
            "over_seeds_low": j.over_seeds.low if j.over_seeds else None,
            "over_seeds_high": j.over_seeds.high if j.over_seeds else None,
            "status": j.verdict.word,
            "why": j.verdict.why,
            "run_ids": " ".join(r.run_id for r in j.runs),
        }
        for j in judged
    ]


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
        here = paired_points(runs, against, evaluation) if against and name != "bf16" else None
        difference = round(paper[0] - base[0], 2) if paper and base and name != "bf16" else None
        by_seed = points_over_seeds(runs, against, evaluation) if against and here else None
        verdict = row_verdict(difference, here, evaluation.noninferiority_margin, by_seed, reference=name == "bf16")
        out.append(
            {
                "arm": name,
                "paper_row": arm.paper_row,
                "paper_average": paper[0] if paper else None,
                "paper_grade": paper[1] if paper else None,
                "paper_minus_bf16": difference,
                "here_pass_at_1_own": None if scores is None else 100 * float(scores.mean()),
                "here_minus_bf16": here.estimate if here else None,
                "here_minus_bf16_low": here.low if here else None,
                "here_minus_bf16_high": here.high if here else None,
                "over_seeds_low": by_seed.low if by_seed else None,
                "over_seeds_high": by_seed.high if by_seed else None,
                "status": verdict.word,
                "why": verdict.why,
                "run_ids": " ".join(r.run_id for r in runs),
            }
        )
    return out


def row_verdict(
    paper: float | None, here: Interval | None, margin: float, by_seed: Interval | None, *, reference: bool = False
) -> Verdict:
    """Verdict of an arm's difference to BF16 in points; paper differences below VISIBLE count as level.

    `by_seed` is the interval over seeds, None for one seed.
    """
    if reference:
        return status.REFERENCE
    if here is None:
        return status.not_run("no BF16 arm here to compare with")
    if paper is None:
        return status.NO_CLAIM

    def rule(value: Interval) -> Verdict:
        return status.level(value, margin) if abs(paper) < VISIBLE else status.greater(value, sign=sign)

    sign = 1 if paper > 0 else -1
    return status.jointly(rule(here), rule(by_seed) if by_seed else None)


def points_over_seeds(a: Sequence[Source], b: Sequence[Source], evaluation: Evaluation) -> Interval | None:
    """pass@1 through the own engines, a - b in points, over seeds; None for fewer than two."""
    return seeds.difference(a, b, evaluation, seeds.own_points)


def gap_over_seeds(
    a: Sequence[Source], b: Sequence[Source], evaluation: Evaluation, key: str = "gap_mean"
) -> Interval | None:
    """Mean of `key` over the last steps, a - b in nats, over seeds; None for fewer than two."""
    return seeds.difference(a, b, evaluation, seeds.last_gap(key))


def paired_points(a: Sequence[Source], b: Sequence[Source], evaluation: Evaluation) -> Interval | None:
    """pass@1 through the own engines, a - b in points, paired over problems."""
    x, y = mean_per_problem(a, "own"), mean_per_problem(b, "own")
    if x is None or y is None:
        return None
    return paired_difference(100 * x, 100 * y, **resampling(evaluation))


def recovered(
    arm: Sequence[Source], worst: Sequence[Source], best: Sequence[Source], evaluation: Evaluation
) -> Interval | None:
    """(arm - worst) / (best - worst) of pass@1 through the own engines; percentile bootstrap over problems.

    None where the loss best - worst is not positive in every resample: a share of nothing means nothing.
    """
    means = [mean_per_problem(runs, "own") for runs in (arm, worst, best)]
    if any(m is None for m in means):
        return None
    scores_3P = np.stack([m for m in means if m is not None])
    rng = np.random.default_rng(evaluation.seed)
    problems = scores_3P.shape[1]
    drawn = np.array(
        [scores_3P[:, rng.integers(0, problems, problems)].mean(axis=1) for _ in range(evaluation.bootstrap)]
    )
    loss = drawn[:, 2] - drawn[:, 1]
    if (loss <= 0).any():
        return None
    low, high = np.quantile(
        (drawn[:, 0] - drawn[:, 1]) / loss, [(1 - evaluation.confidence) / 2, (1 + evaluation.confidence) / 2]
    )
    a, w, b = scores_3P.mean(axis=1)
    return Interval(float((a - w) / (b - w)), float(low), float(high))


def gap_difference(
    a: Sequence[Source], b: Sequence[Source], evaluation: Evaluation, key: str = "gap_mean"
) -> Interval | None:
    """`key` over the last steps, a - b in nats, step by step between runs of one seed (they see the same prompts)."""
    others = {r.seed: r for r in b}
    pairs = [(tail(r, key), tail(others[r.seed], key)) for r in a if r.seed in others]
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
