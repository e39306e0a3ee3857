"""The table of arms: one row per arm, every number with its interval and its run ids.

    pass@1       per problem the mean over samples, averaged over seeds; interval: bootstrap over problems
    difference   pass@1 minus the reference arm's, problem by problem; interval: paired bootstrap over problems
    gap          |log pi_trainer - log pi_rollout| on rollout tokens (nats), mean over tokens, then over the last ten
                 steps; interval: bootstrap over steps for one seed, over seeds and then steps for several (the
                 column says which)
    training     verdict of the collapse detector over the whole history (quads.diagnostics.collapse), by seed
    trend        pass@1 at the end minus at the start; the start is one sample per problem, kept as a share only,
                 so its interval is Wilson's and the difference is unpaired (wide)

With two or more seeds, trend and difference also have Student's interval over seeds (paired by seed); the status says
"improves" or "falls" only where both intervals of the trend exclude 0.

Legend: P problems. Shares are in [0, 1] in the CSV and in percent in the Markdown. Several seeds: mean over seeds, and
the standard deviation over seeds in its own column (empty for one seed: the spread is then unknown, not zero).
Differs from a table typed by hand in that words such as "falls" are computed from intervals, never written down.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from quads.config import Arm, Collapse, Evaluation
from quads.diagnostics.collapse import STOPPING, Detector, judge
from quads.evaluation.stats import (
    Interval,
    bootstrap_mean,
    independent_difference,
    nested_bootstrap,
    paired_difference,
    proportion_interval,
)
from quads.paper.sources import Source
from quads.paper.study_files import over_seeds

LAST_STEPS = 10
REFERENCE = "bf16"

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """One arm over its seeds; None where a number does not exist (and never 0 in its place)."""

    arm: Arm
    seeds: tuple[int, ...]
    start: Interval
    own: Interval | None
    bf16: Interval | None
    own_by_seed: tuple[float, ...]
    own_sd_over_seeds: float | None
    trend: Interval | None
    trend_over_seeds: Interval | None
    difference_own: Interval | None
    difference_own_over_seeds: Interval | None
    difference_bf16: Interval | None
    gap_mean: Interval | None
    gap_resampled: str
    gap_max: float | None
    k3: float | None
    ess: float | None
    clipped_share: float | None
    nonfinite_steps: int
    last_steps: int
    delta_weight_different: int | None
    seconds_per_step: float | None
    training: str
    steps: tuple[int, ...]
    status: str
    run_ids: tuple[str, ...]
    config_hashes: tuple[str, ...]
    commits: tuple[str, ...]


def group(sources: Iterable[Source]) -> dict[str, list[Source]]:
    """Sources by arm name, in the order of first appearance."""
    out: dict[str, list[Source]] = {}
    for source in sources:
        out.setdefault(source.arm.name, []).append(source)
    return out


def build_rows(sources: Sequence[Source], evaluation: Evaluation, collapse: Collapse | None = None) -> list[Row]:
    """One row per arm, in the order of `sources`. Without the reference arm among them differences are None."""
    arms = group(sources)
    reference = arms.get(REFERENCE)
    return [_row(runs, reference, evaluation, collapse or Collapse()) for runs in arms.values()]


def too_short(runs: Sequence[Source], collapse: Collapse) -> bool:
    """Whether one of the runs has too few steps for anything to be said of its training."""
    return any(len(run.steps) < collapse.shortest for run in runs)


def few_steps(rows: Sequence[Row], collapse: Collapse) -> str:
    """A warning for the top of a report whose runs are all too short; one arm that stopped early makes none: ""."""
    most = max((n for row in rows for n in row.steps), default=collapse.shortest)
    if most >= collapse.shortest:
        return ""
    return (
        f"These runs trained {most} steps: enough to show that everything works together, too few for any claim. "
        "Accuracies, differences and statuses below say nothing about the method."
    )


def training_words(runs: Sequence[Source], collapse: Collapse) -> str:
    """What the detector says of an arm's runs: once where the seeds agree, else by seed."""
    found = [judge(run.steps, collapse) for run in runs]
    words = [_words(d, run, collapse) for d, run in zip(found, runs, strict=True)]
    if len(set(words)) == 1:
        return words[0]
    if {d.verdict for d in found} == {"collapsed"} and not any(run.train.get("stopped") for run in runs):
        return "collapsed at steps " + ", ".join(str(d.first("collapsed")) for d in found)
    return "; ".join(f"seed {run.seed}: {w}" for run, w in zip(runs, words, strict=True))


def _words(detector: Detector, run: Source, collapse: Collapse) -> str:
    unjudged = detector.verdict == "healthy" and too_short([run], collapse)
    said = "too few steps to judge" if unjudged else detector.words
    return said + (", stopped" if run.train.get("stopped") else "")


def below_start(run: Source, evaluation: Evaluation) -> bool:
    """Whether pass@1 in the own engine ends below the run's own start by more than the interval over problems."""
    if "own" not in run.eval["engines"]:
        return False
    scores = run.per_problem("own")
    start = proportion_interval(float(run.start["eval_accuracy"]), len(scores), evaluation.confidence)
    return independent_difference(bootstrap_mean(scores, **resampling(evaluation)), start).high < 0


def fallen_words(runs: Sequence[Source], evaluation: Evaluation, collapse: Collapse) -> str:
    """Names the seeds that the detector passes although their accuracy fell: the mean over seeds can hide them."""
    passed = [r for r in runs if judge(r.steps, collapse).verdict not in STOPPING and below_start(r, evaluation)]
    return "".join(f"; seed {r.seed} ends below its start" for r in passed)


def mean_per_problem(runs: Sequence[Source], engine: str) -> FloatArray | None:
    """Score per problem averaged over the runs' seeds, float64 [P]; None when the engine was not evaluated."""
    if any(engine not in r.eval["engines"] for r in runs):
        return None
    stacked = [r.per_problem(engine) for r in runs]
    if len({len(s) for s in stacked}) > 1:
        raise ValueError(f"{runs[0].arm.name}: seeds were evaluated on different problem counts; evaluate them again")
    mean: FloatArray = np.mean(stacked, axis=0)
    return mean


def _accuracy(runs: Sequence[Source], engine: str, evaluation: Evaluation) -> Interval | None:
    means = mean_per_problem(runs, engine)
    return None if means is None else bootstrap_mean(means, **resampling(evaluation))


def _difference(
    runs: Sequence[Source], other: Sequence[Source] | None, engine: str, evaluation: Evaluation
) -> Interval | None:
    if other is None or runs[0].arm.name == other[0].arm.name:
        return None
    a, b = mean_per_problem(runs, engine), mean_per_problem(other, engine)
    return None if a is None or b is None else paired_difference(a, b, **resampling(evaluation))


def gap_interval(runs: Sequence[Source], evaluation: Evaluation, key: str = "gap_mean") -> Interval | None:
    """Mean of `key` over the last steps and all seeds; None when no finite value is there."""
    tails = [t[np.isfinite(t)] for t in (tail(r, key) for r in runs)]
    kept = [t for t in tails if t.size]
    return nested_bootstrap(kept, **resampling(evaluation)) if kept else None


def tail(source: Source, key: str) -> FloatArray:
    """Values of `key` over the last ten steps (all of them in a shorter run); NaN where not finite."""
    return source.curve(key)[-LAST_STEPS:]


class Resampling(TypedDict):
    """Keyword arguments of the bootstraps."""

    resamples: int
    confidence: float
    seed: int


def resampling(evaluation: Evaluation) -> Resampling:
    """How an experiment's evaluation section resamples."""
    return Resampling(resamples=evaluation.bootstrap, confidence=evaluation.confidence, seed=evaluation.seed)


def _tail_mean(runs: Sequence[Source], key: str) -> float | None:
    values = np.concatenate([tail(r, key) for r in runs])
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else None


def _row(runs: list[Source], reference: list[Source] | None, evaluation: Evaluation, collapse: Collapse) -> Row:
    own = _accuracy(runs, "own", evaluation)
    problems = int(next(iter(runs[0].eval["engines"].values()))["problems"])
    share = float(np.mean([r.start["eval_accuracy"] for r in runs]))
    start = proportion_interval(share, problems * len(runs), evaluation.confidence)
    trend = independent_difference(own, start) if own else None
    rises = [_pass(r) - float(r.start["eval_accuracy"]) for r in runs] if own else []
    by_seed = over_seeds(rises, evaluation.confidence) if len(rises) > 1 else None
    gaps = np.concatenate([tail(r, "gap_max") for r in runs])
    nonfinite = int(
        sum((~np.isfinite(np.stack([r.curve(k) for k in ("gap_mean", "k3")]))).any(axis=0).sum() for r in runs)
    )
    different = [r.train["delta_weight"] for r in runs]
    return Row(
        arm=runs[0].arm,
        seeds=tuple(r.seed for r in runs),
        start=start,
        own=own,
        bf16=_accuracy(runs, "bf16", evaluation),
        own_by_seed=tuple(_pass(r) for r in runs) if own else (),
        own_sd_over_seeds=_sd([_pass(r) for r in runs]) if own else None,
        trend=trend,
        trend_over_seeds=by_seed,
        difference_own=_difference(runs, reference, "own", evaluation),
        difference_own_over_seeds=_difference_over_seeds(runs, reference, evaluation),
        difference_bf16=_difference(runs, reference, "bf16", evaluation),
        gap_mean=gap_interval(runs, evaluation),
        gap_resampled="steps" if len(runs) == 1 else "seeds and steps",
        gap_max=float(np.nanmax(gaps)) if np.isfinite(gaps).any() else None,
        k3=_tail_mean(runs, "k3"),
        ess=_tail_mean(runs, "ess"),
        clipped_share=_tail_mean(runs, "clipped_share"),
        nonfinite_steps=nonfinite,
        last_steps=min(LAST_STEPS, len(runs[0].steps)),
        delta_weight_different=None
        if any(d is None for d in different)
        else sum(int(d["different"]) for d in different),
        seconds_per_step=_median([float(v) for r in runs for v in r.curve("seconds")]),
        training=training_words(runs, collapse) + fallen_words(runs, evaluation, collapse),
        steps=tuple(len(r.steps) for r in runs),
        status=_status(trend, by_seed, nonfinite),
        run_ids=tuple(r.run_id for r in runs),
        config_hashes=tuple(dict.fromkeys(r.config_hash for r in runs)),
        commits=tuple(dict.fromkeys(str(r.train["commit"]) for r in runs)),
    )


def _pass(run: Source) -> float:
    return float(run.per_problem("own").mean())


def _difference_over_seeds(
    runs: Sequence[Source], other: Sequence[Source] | None, evaluation: Evaluation
) -> Interval | None:
    if other is None or runs[0].arm.name == other[0].arm.name:
        return None
    if any("own" not in r.eval["engines"] for r in (*runs, *other)):
        return None
    against = {r.seed: _pass(r) for r in other}
    found = [_pass(r) - against[r.seed] for r in runs if r.seed in against]
    return over_seeds(found, evaluation.confidence) if len(found) > 1 else None


def _status(trend: Interval | None, by_seed: Interval | None, nonfinite: int) -> str:
    """In words what the arm's own engine shows; computed from the intervals of end minus start."""
    if trend is None:
        word = "own engine not evaluated"
    elif not trend.excludes(0.0):
        word = "no change seen"
    elif by_seed is not None and not by_seed.excludes(0.0):
        word = "inconclusive: interval over seeds holds 0"
    else:
        word = "improves" if trend.estimate > 0 else "falls"
    return word + (f", {nonfinite} steps not finite" if nonfinite else "")


def _sd(values: Sequence[float]) -> float | None:
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def _median(values: Sequence[float]) -> float | None:
    finite = [v for v in values if math.isfinite(v)]
    return float(np.median(finite)) if finite else None


def precision(weight: str, activation: str) -> str:
    """W4A16 style name of a weight and activation format."""
    bits = {"bf16": "16", "fp8": "8", "nvfp4": "4"}
    return f"W{bits[weight]}A{bits[activation]}"


def describe(arm: Arm) -> dict[str, str]:
    """The arm's choices in words: precisions, and which log-probs are the behaviour policy."""
    rac = arm.rollout.rac
    correction = arm.correction
    weights = "" if correction.importance == "none" else f" + {correction.importance} TIS <= {correction.threshold:g}"
    return {
        "trainer": precision(arm.trainer.weight, arm.trainer.activation),
        "rollout": precision(arm.rollout.weight, arm.rollout.activation)
        + (f" + RAC {rac.k:.3g} {rac.granularity} {rac.mask}" if rac else ""),
        "old_log_probs": correction.old_log_probs + weights,
    }


def _ends(name: str, interval: Interval | None) -> dict[str, float | None]:
    if interval is None:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    return {name: interval.estimate, f"{name}_low": interval.low, f"{name}_high": interval.high}


def _seed_ends(name: str, interval: Interval | None) -> dict[str, float | None]:
    ends = (None, None) if interval is None else (interval.low, interval.high)
    return dict(zip((f"{name}_over_seeds_low", f"{name}_over_seeds_high"), ends, strict=True))


def record(row: Row) -> dict[str, object]:
    """The row as flat columns: plain numbers, empty where a number does not exist."""
    return {
        "arm": row.arm.name,
        "title": row.arm.title,
        "paper_row": row.arm.paper_row,
        **describe(row.arm),
        "seeds": " ".join(map(str, row.seeds)),
        **_ends("pass_at_1_start", row.start),
        **_ends("pass_at_1_own", row.own),
        "pass_at_1_own_by_seed": " ".join(f"{share:.6g}" for share in row.own_by_seed),
        "pass_at_1_own_sd_over_seeds": row.own_sd_over_seeds,
        **_ends("pass_at_1_bf16", row.bf16),
        **_ends("end_minus_start_own", row.trend),
        **_seed_ends("end_minus_start_own", row.trend_over_seeds),
        **_ends("difference_to_bf16_arm_own", row.difference_own),
        **_seed_ends("difference_to_bf16_arm_own", row.difference_own_over_seeds),
        **_ends("difference_to_bf16_arm_bf16", row.difference_bf16),
        **_ends("gap_mean", row.gap_mean),
        "gap_interval_over": row.gap_resampled,
        "gap_max": row.gap_max,
        "k3": row.k3,
        "ess": row.ess,
        "clipped_share": row.clipped_share,
        "last_steps": row.last_steps,
        "nonfinite_steps": row.nonfinite_steps,
        "delta_weight_different": row.delta_weight_different,
        "seconds_per_step": row.seconds_per_step,
        "training": row.training,
        "steps": " ".join(map(str, row.steps)),
        "status": row.status,
        "run_ids": " ".join(row.run_ids),
        "config_hashes": " ".join(row.config_hashes),
        "commits": " ".join(row.commits),
    }


def to_csv(records: Sequence[dict[str, object]]) -> str:
    """CSV text with a header line; floats with repr, so that reading gives the same number back."""
    if not records:
        raise ValueError("no rows: a CSV needs at least one record")
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def curve_records(sources: Sequence[Source]) -> list[dict[str, object]]:
    """Long form of all histories: one record per run and step, step 0 with its accuracy only."""
    keys = (*STEP_COLUMNS, "eval_accuracy")
    return [
        {
            "arm": s.arm.name,
            "seed": s.seed,
            "run_id": s.run_id,
            "step": step["step"],
            **{k: step.get(k) for k in keys},
        }
        for s in sources
        for step in (s.start, *s.steps)
    ]


STEP_COLUMNS = (
    *("reward", "gap_mean", "gap_max", "gap_p99", "k1", "k3", "ess", "clipped_share", "entropy", "grad_norm"),
    *("response_tokens_mean", "tokens_per_s", "seconds", "seconds_rollout", "seconds_update", "seconds_sync"),
)
