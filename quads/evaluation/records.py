"""One line per graded sample, so that an evaluation can be killed, resumed, checked and graded again.

    line 1      {"header": {...}}: checkpoint identity, engine mode, sampling, evaluation hash
    line 2...   one `Record` as a flat JSON object

Contract: `Records.open` returns what is finished; a sample is finished when its whole line is on disk. A line that a
kill cut short is dropped and its sample drawn again. A file whose header differs was made under other conditions: it
is never mixed and never deleted, the error says to move it aside. Resuming gives the same seeds, but an engine may
round differently in another batch composition: a resumed evaluation is equal in distribution, not bit for bit.
Differs from caching by prompt text in that the key is everything that decides a sample.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from quads.evaluation.stats import FloatArray

log = logging.getLogger(__name__)


class RecordsError(RuntimeError):
    """A records file cannot be used; the message says which, why and what to do."""


@dataclass(frozen=True)
class Record:
    """One sample. `logprob_mean` in nats per response token; `score` in [0, 1]."""

    problem: int
    sample: int
    seed: int
    prompt: str
    text: str
    tokens: int
    finish_reason: str
    logprob_mean: float | None
    status: str
    score: float
    extracted: str | None

    @property
    def key(self) -> tuple[int, int]:
        return self.problem, self.sample


def sample_seed(base: int, problem: int, sample: int) -> int:
    """Seed of one sample, 0 <= seed < 2**31: a hash of (evaluation seed, problem, sample), the same for every arm."""
    digest = hashlib.sha256(f"{base}/{problem}/{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


class Records:
    """The append-only file of one engine's samples."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        # through JSON once, so that tuples and lists compare equal to what the file gives back
        self.header: dict[str, Any] = json.loads(json.dumps(header, sort_keys=True))
        self.done: dict[tuple[int, int], Record] = {}

    @classmethod
    def open(cls, path: Path, header: dict[str, Any]) -> Self:
        """Start the file, or take over what an earlier attempt finished. Raises RecordsError when it does not fit."""
        records = cls(path, header)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            records._resume()
        else:
            records._write([json.dumps({"header": records.header}, sort_keys=True)])
        return records

    def _resume(self) -> None:
        raw = self.path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        lines = whole.decode("utf-8").split("\n")[:-1]
        if not lines:  # killed while the header was written
            self.path.unlink()
            self._write([json.dumps({"header": self.header}, sort_keys=True)])
            return
        if len(whole) < len(raw):
            log.warning("%s: dropping a cut last line of %d bytes", self.path, len(raw) - len(whole))
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        self._check_header(lines[0])
        for number, line in enumerate(lines[1:], start=2):
            record = _parse(self.path, number, line)
            if record.key in self.done:
                raise RecordsError(f"{self.path}:{number}: sample {record.key} is there twice; {_aside(self.path)}")
            self.done[record.key] = record
        log.info("%s: %d samples are already finished", self.path, len(self.done))

    def _check_header(self, line: str) -> None:
        try:
            found = json.loads(line)["header"]
        except (ValueError, KeyError, TypeError) as error:
            raise RecordsError(f"{self.path}: the first line is not a header ({error}); {_aside(self.path)}") from None
        if found != self.header:
            keys = sorted(k for k in {*found, *self.header} if found.get(k) != self.header.get(k))
            said = "; ".join(f"{k}: file has {found.get(k)!r}, this run has {self.header.get(k)!r}" for k in keys)
            raise RecordsError(f"{self.path} was made under other conditions ({said}); {_aside(self.path)}")

    def _write(self, lines: list[str]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())

    def missing(self, problems: int, samples: int) -> list[tuple[int, int]]:
        """(problem, sample) pairs still to draw, problem by problem."""
        return [(p, s) for p in range(problems) for s in range(samples) if (p, s) not in self.done]

    def append(self, records: Iterable[Record]) -> None:
        """Write a batch and force it to disk; only then do the samples count as finished."""
        batch = list(records)
        for record in batch:
            if record.key in self.done:
                raise ValueError(f"{self.path}: sample {record.key} is already recorded")
        self._write([json.dumps(asdict(r), sort_keys=True) for r in batch])
        self.done.update((r.key, r) for r in batch)

    def scores(self, problems: int, samples: int) -> FloatArray:
        """Scores float64 [problems, samples]. Raises RecordsError naming the first missing sample."""
        return score_matrix(self.path, list(self.done.values()), problems, samples)


def score_matrix(path: Path, records: Iterable[Record], problems: int, samples: int) -> FloatArray:
    """Scores float64 [problems, samples] of complete records; a hole or an extra sample is an error."""
    by_key = {r.key: r.score for r in records}
    wanted = {(p, s) for p in range(problems) for s in range(samples)}
    if by_key.keys() != wanted:
        missing, extra = sorted(wanted - by_key.keys()), sorted(by_key.keys() - wanted)
        raise RecordsError(
            f"{path}: expected {problems} x {samples} samples; {len(missing)} missing (first {missing[:1]}), "
            f"{len(extra)} unexpected (first {extra[:1]}); run the evaluation again to complete it"
        )
    out = np.array([[by_key[p, s] for s in range(samples)] for p in range(problems)], dtype=np.float64)
    return out


def read_records(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """Header and records of a finished file. Raises RecordsError on a missing file or a damaged line."""
    if not path.is_file():
        raise RecordsError(f"{path} is missing; run the evaluation again")
    text = path.read_text(encoding="utf-8")
    if not text.endswith("\n"):
        raise RecordsError(f"{path}: the last line is cut; run the evaluation again to complete it")
    lines = text.split("\n")[:-1]
    try:
        header = json.loads(lines[0])["header"]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise RecordsError(f"{path}: the first line is not a header ({error}); {_aside(path)}") from None
    return header, [_parse(path, n, line) for n, line in enumerate(lines[1:], start=2)]


def _parse(path: Path, number: int, line: str) -> Record:
    try:
        row = json.loads(line)
        if set(row) != {f.name for f in fields(Record)}:
            raise ValueError(f"keys {sorted(row)}")
        return Record(**row)
    except (ValueError, TypeError) as error:
        raise RecordsError(f"{path}:{number}: not a sample record ({error}); {_aside(path)}") from None


def _aside(path: Path) -> str:
    return f"move it aside (mv {path} {path}.old) and run the evaluation again"
