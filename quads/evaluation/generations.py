"""The generation cache: every sample ever drawn under given conditions, so that a kill or a new setting costs nothing.

    DIR/<mode>-<key>[.shard-<i>-of-<n>].jsonl
    line 1      {"header": conditions}; key = the first 16 hex digits of their sha256
    line 2...   one `Generation` as a flat JSON object, ungraded

Conditions are what decides a sample beside its prompt: model hash, engine mode and quantization, temperature, top_p,
base seed, length limit, device, dtype, versions, code of the engine plugin. A sample is found by (problem, sample,
request); `request` is a hash of the prompt's token ids. Number of samples, bootstrap, margins and graders are not
conditions: raising samples 4 -> 8 draws four new ones per problem, and grading again draws none.

Contract: a sample is finished when its whole line is on disk (fsync per batch). A line that a kill cut short is dropped
and drawn again with the same seed. Shards write files of their own and read all files of the key; a sample drawn by two
of them is counted once, the one of the file first in name order. Damage elsewhere is an error with the line number.
Differs from caching whole evaluations in that the sample is the unit. Same seed, other batch: an engine may round
differently, so a resumed run is equal in distribution, and bit for bit only where the engine's batches do not matter.
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

log = logging.getLogger(__name__)

Key = tuple[str, int, str]


class RecordsError(RuntimeError):
    """A file of samples cannot be used; the message says which, why and what to do."""


@dataclass(frozen=True)
class Generation:
    """One sample as the engine gave it. `logprob_mean` in nats per response token; `text` without the end mark."""

    problem: str
    sample: int
    request: str
    seed: int
    prompt: str
    text: str
    tokens: int
    finish_reason: str
    logprob_mean: float | None

    @property
    def key(self) -> Key:
        return self.problem, self.sample, self.request


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count`, 0-based; problems are dealt out by hash, so that shards need not know each other."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """From "i/n" with 0 <= i < n. Raises ValueError."""
        index, _, count = text.partition("/")
        if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
            raise ValueError(f"shard {text!r}: expected i/n with 0 <= i < n, such as 0/4")
        return cls(int(index), int(count))

    def holds(self, problem: str) -> bool:
        """Whether this shard draws the samples of `problem`."""
        return int.from_bytes(hashlib.sha256(problem.encode()).digest()[:8], "little") % self.count == self.index

    @property
    def name(self) -> str:
        """Part of file names."""
        return f"shard-{self.index}-of-{self.count}"


def sample_seed(base: int, problem: str, sample: int) -> int:
    """Seed of one sample, 0 <= seed < 2**31: a hash of (evaluation seed, problem, sample), the same for every arm."""
    digest = hashlib.sha256(f"{base}/{problem}/{sample}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def conditions_key(conditions: dict[str, Any]) -> str:
    """16 hex digits over the conditions."""
    return hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:16]


class Store:
    """The samples of one engine. Reads every file of its key, appends to one."""

    def __init__(self, folder: Path, mode: str, conditions: dict[str, Any], shard: Shard | None) -> None:
        # through JSON once, so that tuples and lists compare equal to what a file gives back
        self.conditions: dict[str, Any] = json.loads(json.dumps(conditions, sort_keys=True))
        self.folder, self.stem = folder, f"{mode}-{conditions_key(self.conditions)}"
        self.path = folder / (f"{self.stem}.{shard.name}.jsonl" if shard else f"{self.stem}.jsonl")
        self.done: dict[Key, Generation] = {}

    @classmethod
    def open(cls, folder: Path, mode: str, conditions: dict[str, Any], shard: Shard | None = None) -> Self:
        """Take over what is there and be ready to append. Raises RecordsError on damage."""
        store = cls(folder, mode, conditions, shard)
        folder.mkdir(parents=True, exist_ok=True)
        if store.path.exists():
            _cut_torn_end(store.path)
        if not store.path.exists() or store.path.stat().st_size == 0:
            store._write([json.dumps({"header": store.conditions}, sort_keys=True)])
        return store._load()

    @classmethod
    def read(cls, folder: Path, mode: str, conditions: dict[str, Any]) -> Self:
        """All finished samples, for grading; writes nothing. Raises RecordsError where there is no file."""
        store = cls(folder, mode, conditions, None)
        if not store.files():
            raise RecordsError(f"{folder} holds no {store.stem}*.jsonl: nothing was generated; run quads.evaluate")
        return store._load()

    @property
    def receipt(self) -> Path:
        """Where the engine that draws into this store's file leaves its receipt."""
        return self.path.with_suffix(".receipt.json")

    def receipts(self) -> list[Path]:
        """Receipts of the engines that drew the samples, in the order of `files`."""
        beside = [p.with_suffix(".receipt.json") for p in self.files()]
        return [p for p in beside if p.is_file()]

    def files(self) -> list[Path]:
        """Files of this key, in name order."""
        names = [self.folder / f"{self.stem}.jsonl", *self.folder.glob(f"{self.stem}.shard-*.jsonl")]
        return sorted(p for p in names if p.is_file())

    def _load(self) -> Self:
        twice = 0
        for path in self.files():
            for generation in _rows(path, self.conditions):
                twice += generation.key in self.done
                self.done.setdefault(generation.key, generation)
        if twice:
            log.warning("%s: %d samples were drawn by two shards; one of each counts", self.stem, twice)
        if self.done:
            log.info("%s: %d samples are already finished", self.stem, len(self.done))
        return self

    def append(self, batch: Iterable[Generation]) -> None:
        """Write a batch and force it to disk; only then do its samples count as finished."""
        rows = list(batch)
        for row in rows:
            if row.key in self.done:
                raise ValueError(f"{self.path}: sample {row.key} is already there")
        self._write([json.dumps(asdict(r), sort_keys=True) for r in rows])
        self.done.update((r.key, r) for r in rows)

    def _write(self, lines: list[str]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(line + "\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())


def _cut_torn_end(path: Path) -> None:
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole < len(raw):
        log.warning("%s: dropping a cut last line of %d bytes", path, len(raw) - whole)
        with path.open("r+b") as file:
            file.truncate(whole)


def _rows(path: Path, conditions: dict[str, Any]) -> list[Generation]:
    """Finished samples of one file; a cut last line is ignored (another shard may be writing it)."""
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    if not lines:
        return []
    try:
        found = json.loads(lines[0])["header"]
    except (ValueError, KeyError, TypeError) as error:
        raise RecordsError(f"{path}: the first line is not a header ({error}); {_aside(path)}") from None
    if found != conditions:
        keys = sorted(k for k in {*found, *conditions} if found.get(k) != conditions.get(k))
        said = "; ".join(f"{k}: file has {found.get(k)!r}, this run has {conditions.get(k)!r}" for k in keys)
        raise RecordsError(f"{path} was made under other conditions ({said}); {_aside(path)}")
    out: dict[Key, Generation] = {}
    for number, line in enumerate(lines[1:], start=2):
        generation = _parse(path, number, line)
        if generation.key in out:
            raise RecordsError(f"{path}:{number}: sample {generation.key} is there twice; {_aside(path)}")
        out[generation.key] = generation
    return list(out.values())


def _parse(path: Path, number: int, line: str) -> Generation:
    try:
        row = json.loads(line)
        if set(row) != {f.name for f in fields(Generation)}:
            raise ValueError(f"keys {sorted(row)}")
        return Generation(**row)
    except (ValueError, TypeError) as error:
        raise RecordsError(f"{path}:{number}: not a sample ({error}); {_aside(path)}") from None


def _aside(path: Path) -> str:
    return f"move it aside (mv {path} {path}.old) and run the evaluation again"
