"""What a set of graded samples says: one entry per benchmark, and the macro average over benchmarks.

    avg@k (= pass@1), unbiased pass@k, maj@k, both intervals, truncation, no-answer and every status, tokens, log-probs

Contract: samples whose grading failed are masked from every accuracy and counted under `failures`; a missing sample is
an error. maj@k votes on the extracted answers of mathematics and chains, not on programs. Shares in [0, 1].
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from quads.config import Evaluation
from quads.evaluation.intervals import Tally, decoding_interval, macro_average, problem_interval
from quads.evaluation.records import Record, score_matrix
from quads.evaluation.stats import Interval, majority_score, pass_at_k
from quads.rewards.types import STATUSES


def summarise(
    name: str, records: Sequence[Record], problems: int, samples: int, evaluation: Evaluation
) -> dict[str, Any]:
    """The entry of one benchmark with problems x samples records."""
    tally = Tally.from_scores(score_matrix(name, records, problems, samples))
    kept = [r for r in records if not r.failed]
    statuses = Counter(r.status for r in records)
    programs = [r for r in kept if r.official is not None]
    return {
        "problems": problems,
        "samples_per_problem": samples,
        "pass_at_1": tally.mean,
        **_both([tally], evaluation),
        "pass_at_k": _pass_at_k(tally),
        "maj_at_k": None if programs else _majority(kept, problems),
        "statuses": {s: statuses[s] for s in STATUSES if statuses[s]},
        "failures": sum(r.failed for r in records),
        "no_answer_share": statuses["no_answer"] / len(records),
        "truncated_share": _mean(r.finish_reason == "length" for r in records),
        "official_share": _mean(r.official == "pass" for r in programs),
        **_tokens(records),
        "logprob_mean": _mean(r.logprob_mean for r in records if r.logprob_mean is not None),
        "per_problem": tally.means.tolist(),
        "graded_per_problem": tally.samples.tolist(),
    }


def macro(entries: Mapping[str, Mapping[str, Any]], evaluation: Evaluation) -> dict[str, Any] | None:
    """Unweighted mean over the benchmarks' avg@k with both intervals; None without benchmarks."""
    if not entries:
        return None
    tallies = [tally_of(entry) for entry in entries.values()]
    return {"benchmarks": list(entries), "average": macro_average(tallies), **_both(tallies, evaluation)}


def tally_of(entry: Mapping[str, Any]) -> Tally:
    """The counts behind a summary's entry."""
    samples_P = np.array(entry["graded_per_problem"], dtype=np.int64)
    return Tally(np.rint(np.array(entry["per_problem"]) * samples_P).astype(np.int64), samples_P)


def _both(tallies: Sequence[Tally], evaluation: Evaluation) -> dict[str, Any]:
    how: dict[str, Any] = {
        "resamples": evaluation.bootstrap,
        "confidence": evaluation.confidence,
        "seed": evaluation.seed,
    }
    return {
        "decoding_interval": _ends(decoding_interval(tallies, **how)),
        "problem_interval": _ends(problem_interval(tallies, **how)),
    }


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _pass_at_k(tally: Tally) -> dict[str, float]:
    """For 1, 2, 4, ... and the number of samples that every problem has."""
    samples = int(tally.samples.min())
    ks = sorted({2**i for i in range(samples.bit_length()) if 2**i <= samples} | {samples})
    counts = list(zip(tally.correct.tolist(), tally.samples.tolist(), strict=True))
    return {str(k): float(np.mean([pass_at_k(c, n, k) for c, n in counts])) for k in ks}


def _majority(records: Sequence[Record], problems: int) -> float:
    votes: list[list[Record]] = [[] for _ in range(problems)]
    for r in records:
        votes[r.problem].append(r)
    return float(np.mean([majority_score([r.extracted for r in v], [r.score for r in v]) for v in votes]))


def _tokens(records: Sequence[Record]) -> dict[str, Any]:
    tokens = [r.tokens for r in records]
    return {
        "tokens_mean": _mean(tokens),
        "tokens_median": float(np.median(tokens)),
        "tokens_p95": float(np.quantile(tokens, 0.95)),
        "tokens_mean_correct": _of(records, lambda r: r.status == "correct"),
        "tokens_mean_rest": _of(records, lambda r: r.status != "correct"),
    }


def _of(records: Iterable[Record], which: Callable[[Record], bool]) -> float | None:
    return _mean(r.tokens for r in records if which(r))


def _mean(values: Iterable[float | None]) -> float | None:
    listed = [float(v) for v in values if v is not None]
    return math.fsum(listed) / len(listed) if listed else None
