"""Draw, grade and record the samples of one engine; sum them up. No engine and no torch here.

    problems x samples_per_problem -> records (quads.evaluation.records) -> the engine's entry in result.json

Contract: samples are drawn in chunks; a chunk is graded and forced to disk before the next one starts, so that a kill
costs at most one chunk. A grader that fails is a status that is counted, a missing sample is an error.
Differs from evaluating in one call in that the file, not the process, holds the progress.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from quads.config import Evaluation
from quads.evaluation.records import Record, Records, sample_seed
from quads.evaluation.stats import bootstrap_mean, mean_pass_at_k, pass_at_1, problem_means

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """What an engine returns for one request; log-probs in nats, one per token."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


@dataclass(frozen=True)
class Problem:
    """One evaluation prompt: its text for the record, its token ids for the engine, what its grader needs."""

    text: str
    token_ids: tuple[int, ...]
    ground_truth: str
    data_source: str


class Sampler(Protocol):
    """The part of an engine that is needed here."""

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Sample]: ...


class Graded(Protocol):
    """The part of a grade that is recorded."""

    @property
    def score(self) -> float: ...
    @property
    def status(self) -> Any: ...
    @property
    def extracted(self) -> str | None: ...


Grade = Callable[[Problem, str, bool], Graded]


def collect(
    engine: Sampler,
    problems: Sequence[Problem],
    records: Records,
    evaluation: Evaluation,
    *,
    grade: Grade,
    decode: Callable[[list[int]], str],
    chunk: int,
    label: str,
) -> None:
    """Draw what is missing in `records`, `chunk` samples at a time, and log progress with the expected rest in s."""
    todo = records.missing(len(problems), evaluation.samples_per_problem)
    total = len(problems) * evaluation.samples_per_problem
    start = time.monotonic()
    for first in range(0, len(todo), chunk):
        keys = todo[first : first + chunk]
        seeds = [sample_seed(evaluation.seed, *key) for key in keys]
        samples = engine.generate([problems[p].token_ids for p, _ in keys], seeds)
        if len(samples) != len(keys):
            raise RuntimeError(f"{label}: the engine returned {len(samples)} samples for {len(keys)} requests")
        records.append(
            _record(problems[p], p, s, seed, sample, grade, decode)
            for (p, s), seed, sample in zip(keys, seeds, samples, strict=True)
        )
        drawn = first + len(keys)
        spent = time.monotonic() - start
        accuracy = np.mean([r.score for r in records.done.values()])
        log.info(
            "%s %d/%d samples | accuracy so far %.3f | %.0f s, about %.0f s left",
            *(label, len(records.done), total, accuracy, spent, spent / drawn * (len(todo) - drawn)),
        )


def _record(
    problem: Problem,
    index: int,
    sample_index: int,
    seed: int,
    sample: Sample,
    grade: Grade,
    decode: Callable[[list[int]], str],
) -> Record:
    text = decode(sample.token_ids)
    verdict = grade(problem, text, sample.finish_reason == "stop")
    mean = math.fsum(sample.logprobs) / len(sample.logprobs) if sample.logprobs else None
    if mean is not None and not math.isfinite(mean):
        raise ValueError(
            f"problem {index}, sample {sample_index}: log-prob mean is {mean}; the engine's logits are not finite. "
            "Check the checkpoint's weights and the quantization receipt"
        )
    return Record(
        problem=index,
        sample=sample_index,
        seed=seed,
        prompt=problem.text,
        text=text,
        tokens=len(sample.token_ids),
        finish_reason=sample.finish_reason,
        logprob_mean=mean,
        status=str(getattr(verdict.status, "value", verdict.status)),
        score=float(verdict.score),
        extracted=verdict.extracted,
    )


def summarise(records: Records, problems: int, evaluation: Evaluation, *, mode: str) -> dict[str, Any]:
    """The engine's entry in result.json: pass@1 with its interval over problems, pass@k, statuses, lengths."""
    samples = evaluation.samples_per_problem
    scores_PK = records.scores(problems, samples)
    interval = bootstrap_mean(
        problem_means(scores_PK),
        resamples=evaluation.bootstrap,
        confidence=evaluation.confidence,
        seed=evaluation.seed,
    )
    binary = bool(np.isin(scores_PK, (0.0, 1.0)).all())
    rows = list(records.done.values())
    return {
        "mode": mode,
        "pass_at_1": pass_at_1(scores_PK),
        "ci_low": interval.low,
        "ci_high": interval.high,
        "confidence": evaluation.confidence,
        "interval": "bootstrap over problems",
        "problems": problems,
        "samples_per_problem": samples,
        "pass_at_k": {str(k): mean_pass_at_k(scores_PK, k) for k in _powers(samples)} if binary else None,
        "statuses": dict(sorted(Counter(r.status for r in rows).items())),
        "tokens_mean": _mean(r.tokens for r in rows),
        "truncated_share": _mean(r.finish_reason == "length" for r in rows),
        "logprob_mean": _mean(r.logprob_mean for r in rows if r.logprob_mean is not None),
        "per_problem": problem_means(scores_PK).tolist(),
    }


def _powers(samples: int) -> list[int]:
    """1, 2, 4, ... and `samples` itself."""
    return sorted({2**i for i in range(samples.bit_length()) if 2**i <= samples} | {samples})


def _mean(values: Iterable[float]) -> float | None:
    listed = [float(v) for v in values]
    return math.fsum(listed) / len(listed) if listed else None
