"""Benchmarks of an evaluation: per arm and benchmark, the macro average, and every arm against BF16.

    benchmark_records   arm x engine x benchmark: avg@k with both intervals, pass@k, maj@k, rates, tokens
    comparisons         arm x engine: macro average, difference to the BF16 arm (paired), p, Holm, non-inferiority

Several seeds: per problem the mean over seeds, with the spread over seeds beside it; counts and rates are pooled.
Intervals of a pooled arm treat its seeds' samples as samples of one policy; the spread says how far that is from true.
Holm runs over the arms of one engine, once for the differences and once for non-inferiority.
Contract: words are computed. "non-inferior" needs the whole interval above minus the margin AND Holm's p at the same
level; the margin is the configuration's. Differs from a ranking: arms that the test does not separate are not ordered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from quads.config import Collapse, Evaluation
from quads.evaluation.compare import Comparison, compare, holm
from quads.evaluation.intervals import Tally, decoding_interval, macro_average, problem_interval
from quads.evaluation.stats import FloatArray, Interval, seed_spread
from quads.evaluation.summary import tally_of
from quads.paper.sources import Source
from quads.paper.tables import REFERENCE, group, resampling, too_short

Record = dict[str, Any]
POINTS = 100.0


def benchmark_records(sources: Sequence[Source], evaluation: Evaluation) -> list[Record]:
    """One record per arm, engine and benchmark; shares in [0, 1], empty where a number does not exist."""
    out = []
    for name, runs in group(sources).items():
        for engine in evaluation.engines:
            for benchmark in evaluation.benchmarks.names:
                entries = [_entries(r, engine)[benchmark] for r in runs]
                out.append({"arm": name, "engine": engine, "benchmark": benchmark, **_pooled(entries, evaluation)})
    return out


def comparisons(sources: Sequence[Source], evaluation: Evaluation, collapse: Collapse | None = None) -> list[Record]:
    """One record per arm and engine. Without a BF16 arm the comparisons are empty; an arm is never non-inferior when
    its runs or the BF16 arm's are too short for the collapse detector.
    """
    if not evaluation.benchmarks.names:
        return []
    arms = group(sources)
    out = []
    for engine in evaluation.engines:
        found = {n: _against(runs, arms.get(REFERENCE), engine, evaluation) for n, runs in arms.items()}
        kept = {n: c for n, c in found.items() if c is not None}
        p_difference = holm({n: c.p_difference for n, c in kept.items()})
        p_noninferior = holm({n: c.p_noninferior for n, c in kept.items()})
        for name, runs in arms.items():
            row = {"arm": name, "engine": engine, **_macro(runs, engine, evaluation)}
            level = (1 - evaluation.confidence) / 2
            row |= _columns(found[name], p_difference.get(name), p_noninferior.get(name), level)
            if row["non_inferiority"] == "non-inferior" and too_short(
                [*runs, *arms[REFERENCE]], collapse or Collapse()
            ):
                row["non_inferiority"] = "not shown"
            out.append({**row, "run_ids": " ".join(r.run_id for r in runs)})
    return out


def _entries(source: Source, engine: str) -> Mapping[str, Any]:
    entries: Mapping[str, Any] = source.eval["engines"][engine]["benchmarks"]
    return entries


def _tally(entries: Sequence[Mapping[str, Any]]) -> Tally:
    """Counts of one benchmark, added over seeds."""
    tallies = [tally_of(e) for e in entries]
    return Tally(sum(t.correct for t in tallies), sum(t.samples for t in tallies))  # type: ignore[arg-type]


def _pooled(entries: Sequence[Mapping[str, Any]], evaluation: Evaluation) -> Record:
    tally = _tally(entries)
    how = resampling(evaluation)
    statuses: Counter[str] = Counter()
    for entry in entries:
        statuses.update(entry["statuses"])
    k = str(min(int(max(e["pass_at_k"], key=int)) for e in entries))
    return {
        "problems": entries[0]["problems"],
        "samples_per_problem": entries[0]["samples_per_problem"],
        "seeds": len(entries),
        "avg_at_k": tally.mean,
        **_ends("decoding", decoding_interval([tally], **how)),
        **_ends("problems", problem_interval([tally], **how)),
        "pass_k": int(k),
        "pass_at_k": _mean([e["pass_at_k"][k] for e in entries]),
        "maj_at_k": _mean([e["maj_at_k"] for e in entries]),
        "truncated_share": _mean([e["truncated_share"] for e in entries]),
        "no_answer_share": _mean([e["no_answer_share"] for e in entries]),
        "grading_failed": sum(e["failures"] for e in entries),
        "statuses": " ".join(f"{s}:{n}" for s, n in sorted(statuses.items())),
        "official_share": _mean([e["official_share"] for e in entries]),
        **{k: _mean([e[k] for e in entries]) for k in ("tokens_mean", "tokens_median", "tokens_p95", "logprob_mean")},
    }


def _means(runs: Sequence[Source], engine: str, evaluation: Evaluation) -> list[FloatArray]:
    """Per benchmark the mean per problem, averaged over seeds."""
    names = evaluation.benchmarks.names
    return [np.mean([tally_of(_entries(r, engine)[name]).means for r in runs], axis=0) for name in names]


def _macro(runs: Sequence[Source], engine: str, evaluation: Evaluation) -> Record:
    names, how = evaluation.benchmarks.names, resampling(evaluation)
    tallies = [_tally([_entries(r, engine)[name] for r in runs]) for name in names]
    spread = seed_spread([float(r.eval["engines"][engine]["macro"]["average"]) for r in runs])
    return {
        "macro_average": macro_average(tallies),
        **_ends("macro_decoding", decoding_interval(tallies, **how)),
        **_ends("macro_problems", problem_interval(tallies, **how)),
        **{f"seeds_{k}": v for k, v in asdict(spread).items() if k != "mean"},
    }


def _against(
    runs: Sequence[Source], reference: Sequence[Source] | None, engine: str, evaluation: Evaluation
) -> Comparison | None:
    if reference is None or runs[0].arm.name == reference[0].arm.name:
        return None
    return compare(
        _means(runs, engine, evaluation),
        _means(reference, engine, evaluation),
        margin=evaluation.noninferiority_margin / POINTS,
        permutations=evaluation.permutations,
        **resampling(evaluation),
    )


def _columns(found: Comparison | None, p: float | None, p_noninferior: float | None, level: float) -> Record:
    verdict = None
    if found is not None and p_noninferior is not None:
        verdict = found.verdict
        if verdict == "non-inferior" and p_noninferior > level:
            verdict = "not shown"
    return {
        **_ends("difference", found.difference if found else None),
        "difference_to_bf16": found.difference.estimate if found else None,
        "p": found.p_difference if found else None,
        "p_exact": found.exact if found else None,
        "p_holm": p,
        "p_noninferior": found.p_noninferior if found else None,
        "p_noninferior_holm": p_noninferior,
        "non_inferiority": verdict,
    }


def _ends(name: str, interval: Interval | None) -> dict[str, float | None]:
    return {
        f"{name}_low": interval.low if interval else None,
        f"{name}_high": interval.high if interval else None,
    }


def _mean(values: Sequence[float | None]) -> float | None:
    kept = [v for v in values if v is not None]
    return float(np.mean(kept)) if kept else None
