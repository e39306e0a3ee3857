"""One line per graded sample: what was asked, what came, and the verdict.

    line 1      {"header": {...}}: run, engine, mode, conditions of generation, hashes of the problems
    line 2...   one `Record` as a flat JSON object, by benchmark, problem and sample

Contract: written whole and atomically from the generation cache (quads.evaluation.generations), so that grading twice
gives the same bytes; progress lives in the cache, not here. Differs from a log in that a file is complete or absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from quads.evaluation.generations import RecordsError
from quads.evaluation.stats import FloatArray
from quads.files import write_text_atomic
from quads.rewards.types import FAILURES


@dataclass(frozen=True)
class Record:
    """One graded sample.

    `status` is the grader's (quads.rewards.types); `official` the second verdict of code benchmarks, by the official
    rules, and None elsewhere. `response` is what the grader saw: the text, or what an adapter made of it.
    """

    benchmark: str
    problem: int
    sample: int
    seed: int
    prompt: str
    text: str
    response: str
    tokens: int
    finish_reason: str
    logprob_mean: float | None
    status: str
    score: float
    extracted: str | None
    official: str | None
    detail: str

    @property
    def failed(self) -> bool:
        """Whether grading failed: such a sample is masked, never wrong."""
        return self.status in FAILURES


def write_records(path: Path, header: dict[str, Any], records: Iterable[Record]) -> None:
    """Write the whole file."""
    lines = [json.dumps({"header": header}, sort_keys=True)]
    lines += [json.dumps(asdict(r), sort_keys=True) for r in records]
    write_text_atomic(path, "".join(line + "\n" for line in lines))


def read_records(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """Header and records of a finished file. Raises RecordsError on anything else."""
    if not path.is_file():
        raise RecordsError(f"{path}: missing; run the evaluation (quads.evaluate) or grade again (quads.regrade)")
    *lines, tail = path.read_text(encoding="utf-8").split("\n")
    if tail or not lines:
        raise RecordsError(f"{path}: cut off; grade again (quads.regrade)")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if number == 1:
                header: dict[str, Any] = row["header"]
                continue
            if set(row) != {f.name for f in fields(Record)}:
                raise ValueError(f"keys {sorted(row)}")
            rows.append(Record(**row))
        except (ValueError, TypeError, KeyError) as error:
            raise RecordsError(f"{path}:{number}: not a graded sample ({error}); grade again (quads.regrade)") from None
    return header, rows


def score_matrix(name: str, records: Iterable[Record], problems: int, samples: int) -> FloatArray:
    """Scores float64 [problems, samples] of one benchmark, NaN where grading failed; a hole or an extra is an error."""
    by_key = {(r.problem, r.sample): np.nan if r.failed else r.score for r in records}
    expected = {(p, s) for p in range(problems) for s in range(samples)}
    if by_key.keys() != expected:
        absent, extra = sorted(expected - by_key.keys()), sorted(by_key.keys() - expected)
        raise RecordsError(
            f"{name}: expected {problems} x {samples} samples; {len(absent)} missing (first {absent[:1]}), "
            f"{len(extra)} unexpected (first {extra[:1]}); run the evaluation again to complete it"
        )
    return np.array([[by_key[p, s] for s in range(samples)] for p in range(problems)], dtype=np.float64)
