"""From generated samples to result.json: grade, write one records file per engine, sum up. Needs no engine.

    generation.json + generation cache + questions  ->  DIR/<engine>.jsonl, then the dict that result.json holds

The last step of quads.evaluate, all of quads.regrade, and the merge of shards: it reads every shard's file, so running
it once or five times gives the same bytes. A missing sample names the shard that owes it.
Contract: verdicts depend on the samples only; questions that differ from the generated ones are refused, never mixed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quads.config import Evaluation
from quads.evaluation.generations import RecordsError, Store
from quads.evaluation.grading import Grading
from quads.evaluation.problems import Question
from quads.evaluation.records import Record, write_records
from quads.evaluation.sampling import Wanted, missing, wanted
from quads.evaluation.summary import macro, summarise

log = logging.getLogger(__name__)


def questions_hash(questions: Sequence[Question]) -> dict[str, str]:
    """sha256 over what is asked and how it is graded, by benchmark."""
    digests: dict[str, Any] = {}
    for q in questions:
        line = json.dumps([q.id, [dict(m) for m in q.messages], q.grader, q.truth, q.adapter, q.answer_type])
        digests.setdefault(q.benchmark, hashlib.sha256()).update(line.encode() + b"\n")
    return {name: digest.hexdigest() for name, digest in digests.items()}


def all_wanted(requests: Mapping[str, str], questions: Sequence[Question]) -> list[Wanted]:
    """Every sample of the evaluation."""
    return wanted(requests, {q.id: q.samples for q in questions})


def finish(
    generation: Mapping[str, Any],
    questions: Sequence[Question],
    evaluation: Evaluation,
    *,
    cache: Path,
    grading: Grading,
    out: Path,
) -> dict[str, Any]:
    """Grade and sum up every engine of `generation`. Raises RecordsError where samples are missing or others."""
    found, expected = generation["questions"], questions_hash(questions)
    if found != expected:
        names = sorted(k for k in {*found, *expected} if found.get(k) != expected.get(k))
        raise RecordsError(
            f"{out}: the samples were drawn for other problems of {', '.join(names)}; evaluate again (quads.evaluate)"
        )
    engines = {
        name: _engine(name, entry, generation, questions, evaluation, cache, grading, out)
        for name, entry in generation["engines"].items()
    }
    kept = {k: v for k, v in generation.items() if k not in ("engines", "requests")}
    return {**kept, "sandbox": grading.level, "engines": engines}


def _engine(
    name: str,
    entry: Mapping[str, Any],
    generation: Mapping[str, Any],
    questions: Sequence[Question],
    evaluation: Evaluation,
    cache: Path,
    grading: Grading,
    out: Path,
) -> dict[str, Any]:
    store = Store.read(cache, entry["mode"], entry["conditions"])
    todo = all_wanted(generation["requests"], questions)
    absent = missing(store, todo)
    if absent:
        raise RecordsError(
            f"{store.stem}: {len(absent)} of {len(todo)} samples are missing, the first of {absent[0].problem}; run "
            "quads.evaluate again, with --shard for the shard that did not finish"
        )
    by_id = {q.id: q for q in questions}
    items = [(by_id[w.problem], store.done[w.problem, w.sample, w.request]) for w in todo]
    records = [
        Record(
            benchmark=q.benchmark,
            problem=q.index,
            sample=g.sample,
            seed=g.seed,
            prompt=g.prompt,
            text=g.text,
            response=verdict.response,
            tokens=g.tokens,
            finish_reason=g.finish_reason,
            logprob_mean=g.logprob_mean,
            status=verdict.grade.status,
            score=verdict.grade.score,
            extracted=verdict.grade.extracted,
            official=verdict.official,
            detail=verdict.grade.detail,
        )
        for (q, g), verdict in zip(items, grading.grade(items), strict=True)
    ]
    header = {k: generation[k] for k in ("run_id", "questions")} | {"engine": name, "conditions": entry["conditions"]}
    write_records(out / f"{name}.jsonl", header, records)
    return {"mode": entry["mode"], "receipt": entry["receipt"], **_summary(records, questions, evaluation)}


def _summary(records: Sequence[Record], questions: Sequence[Question], evaluation: Evaluation) -> dict[str, Any]:
    """The held-out split, which is asked first, at the top level; benchmarks and their macro average below."""
    entries = {}
    for name in dict.fromkeys(q.benchmark for q in questions):
        asked = [q for q in questions if q.benchmark == name]
        own = [r for r in records if r.benchmark == name]
        try:
            entries[name] = summarise(name, own, len(asked), asked[0].samples, evaluation)
        except ValueError as error:
            raise RecordsError(f"{name}: {error}") from None
    own = entries.pop(questions[0].benchmark)
    low, high = own["problem_interval"]
    top = {**own, "ci_low": low, "ci_high": high, "confidence": evaluation.confidence}
    return {**top, "benchmarks": entries, "macro": macro(entries, evaluation)}
