"""Numbers beside each other: the end of the curves, and paired tests on the evaluations.

    tail      mean, standard deviation over steps, smallest and largest of the last LAST steps of a curve, over the
              finite values; a diverged run records null, so the number of finite steps is part of the result
    paired    run b minus run a on the same problems, per engine and benchmark (quads.evaluation.compare):
              difference of avg@k, percentile interval of the paired bootstrap, two-sided sign-flip permutation p
    Holm      over all tests of one comparison

The first run is the one that all others are compared with. Resampling settings are those of the first run's own
evaluation. Problems must be the same: evaluations record a hash of what was asked and graded, benchmark by benchmark,
and where it differs, or where the number of problems does, the test is refused and the reason stands in its place.
Where a side recorded no hash the test is made and marked as not verified.
Samples of one run do not stand for training seeds: a p value here speaks of these two runs, not of their arms.
Steps follow each other, so the standard deviation over steps is a width of the curve, not an error of its mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from quads.comparison.runs import ComparedRun
from quads.config import Evaluation
from quads.evaluation.compare import compare, holm
from quads.evaluation.summary import tally_of

LAST = 10
CURVES = ("reward", "gap_mean", "gap_max", "k3", "entropy", "response_tokens_mean", "grad_norm", "seconds")
HELD_OUT = "held-out split"
_HELD_OUT_NAMES = ("chain", "held_out")  # as evaluations call it, by the task that was trained on


@dataclass(frozen=True)
class Tail:
    """The `steps` finite values among the last `of` steps of one curve; None without any, sd also for one."""

    mean: float | None
    sd: float | None
    low: float | None
    high: float | None
    steps: int
    of: int


def tail(run: ComparedRun, key: str, last: int = LAST) -> Tail | None:
    """None when no step of the run knows `key`; null and non-finite values are counted, not averaged."""
    if not any(key in step for step in run.steps):
        return None
    window = run.curve(key)[-last:]
    values = window[np.isfinite(window)]
    if not len(values):
        return Tail(None, None, None, None, 0, len(window))
    sd = float(values.std(ddof=1)) if len(values) > 1 else None
    return Tail(float(values.mean()), sd, float(values.min()), float(values.max()), len(values), len(window))


def tails(runs: Sequence[ComparedRun]) -> dict[str, list[dict[str, Any] | None]]:
    """By curve, one entry per run; curves that no run recorded are left out."""
    found = {key: [tail(run, key) for run in runs] for key in CURVES}
    return {k: [asdict(t) if t else None for t in row] for k, row in found.items() if any(row)}


def evaluation_of(runs: Sequence[ComparedRun]) -> str | None:
    """Hash of the evaluation that all runs have; of several the one named last. None when there is no common one."""
    common = [h for h in runs[0].evaluations if all(h in run.evaluations for run in runs)]
    return common[-1] if common else None


def paired_tests(runs: Sequence[ComparedRun]) -> tuple[list[dict[str, Any]], list[str]]:
    """(tests, reasons): one record per engine, benchmark and run after the first; reasons why tests are missing.

    positions: places of run and against in `runs`; two folders may hold one run id.
    """
    lacking = [run for run in runs if not run.evaluations]
    if lacking:
        return [], [
            f"{run.label} has no evaluation: `snakemake {run.experiment}` makes it, or python -m quads.evaluate "
            f"--experiment configs/{run.experiment}.yaml --arm {_arm(run)} --seed {run.result['run']['seed']} "
            f"--train {run.folder} with its --data and --out"
            for run in lacking
        ]
    common = evaluation_of(runs)
    if common is None:
        listed = "; ".join(f"{run.label}: {', '.join(run.evaluations)}" for run in runs)
        return [], [f"no evaluation with the same settings for all runs ({listed}); evaluate them with one experiment"]
    first, others = runs[0], runs[1:]
    tests: list[dict[str, Any]] = []
    reasons: list[str] = []
    for position, other in enumerate(others, start=1):
        for found in _pair(first, other, common):
            if isinstance(found, str):
                reasons.append(found)
            else:
                tests.append(found | {"positions": [position, 0]})
    adjusted = holm({str(i): t["p"] for i, t in enumerate(tests)})
    return [t | {"p_holm": adjusted[str(i)]} for i, t in enumerate(tests)], reasons


def _arm(run: ComparedRun) -> str:
    return str(run.result["run"]["arm"]["name"])


def _pair(first: ComparedRun, other: ComparedRun, common: str) -> list[dict[str, Any] | str]:
    a, b = first.evaluations[common], other.evaluations[common]
    out: list[dict[str, Any] | str] = []
    for engine in a["engines"]:
        if engine not in b["engines"]:
            out.append(f"{other.label} was not evaluated through engine {engine!r}")
            continue
        entries_a, entries_b = _entries(a["engines"][engine]), _entries(b["engines"][engine])
        for name in dict.fromkeys([*entries_a, *entries_b]):
            refusal = _refusal(name, entries_a, entries_b, a, b)
            if refusal:
                out.append(f"{other.label} against {first.label}, engine {engine}, {name}: {refusal}")
            else:
                test = _test(first, other, engine, name, entries_a[name], entries_b[name])
                out.append(test | {"problems_verified": all(_asked(name, a, b))})
    return out


def _entries(engine: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The held-out split stands at the top of an engine's entry, named benchmarks below."""
    found = {HELD_OUT: engine} if "per_problem" in engine else {}
    return found | dict(engine.get("benchmarks", {}))


def _refusal(
    name: str,
    entries_a: Mapping[str, Mapping[str, Any]],
    entries_b: Mapping[str, Mapping[str, Any]],
    a: Mapping[str, Any],
    b: Mapping[str, Any],
) -> str | None:
    """Why there is no paired test, or None."""
    if name not in entries_a or name not in entries_b:
        return "only one of the two runs has it"
    asked = _asked(name, a, b)
    if all(asked) and asked[0] != asked[1]:
        return "the problems are not the same (other questions or answers), so nothing can be paired"
    counts = [len(e[name]["per_problem"]) for e in (entries_a, entries_b)]
    if counts[0] != counts[1]:
        return f"{counts[0]} and {counts[1]} problems: nothing can be paired"
    return None


def _asked(name: str, *evaluations: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Hashes of what each evaluation asked in benchmark `name`; empty where it recorded none."""
    names = _HELD_OUT_NAMES if name == HELD_OUT else (name,)
    return [{k: v for k, v in (e.get("questions") or {}).items() if k in names and v} for e in evaluations]


def _test(
    first: ComparedRun, other: ComparedRun, engine: str, name: str, a: Mapping[str, Any], b: Mapping[str, Any]
) -> dict[str, Any]:
    settings = Evaluation.model_validate(_known(first.evaluations.values()))
    means = [_means(entry) for entry in (b, a)]
    found = compare(
        [means[0]],
        [means[1]],
        margin=settings.noninferiority_margin / 100.0,
        resamples=settings.bootstrap,
        permutations=settings.permutations,
        confidence=settings.confidence,
        seed=settings.seed,
    )
    return {
        "run": other.label,
        "against": first.label,
        "engine": engine,
        "modes": [b["mode"], a["mode"]] if "mode" in a else None,
        "benchmark": name,
        "problems": len(means[0]),
        "run_avg": float(means[0].mean()),
        "against_avg": float(means[1].mean()),
        "difference": found.difference.estimate,
        "low": found.difference.low,
        "high": found.difference.high,
        "confidence": settings.confidence,
        "p": found.p_difference,
        "exact": found.exact,
    }


def _means(entry: Mapping[str, Any]) -> Any:
    """Mean score per problem, float64 [P]; samples whose grading failed are masked there already."""
    if "graded_per_problem" in entry:
        return tally_of(entry).means
    return np.array(entry["per_problem"], dtype=np.float64)


def _known(evaluations: Any) -> dict[str, Any]:
    """Settings of the first evaluation that today's configuration still knows."""
    settings = next(iter(evaluations)).get("evaluation") or {}
    return {k: v for k, v in settings.items() if k in ("bootstrap", "permutations", "confidence", "seed")}
