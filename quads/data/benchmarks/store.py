"""Fetched sets on disk: built once from raw files, locked by hash, read everywhere.

    DIR/NAME/rows.jsonl      normalised rows, one JSON object a line
    DIR/NAME/manifest.json   written last: pin, file hashes, counts, hash of the rows and of the ids, what was dropped
    LOCKS/NAME.json          hash recorded on the first fetch of a set whose pin holds none; commit it

Hashes cover the rows as sorted JSON, in order: the same whether they came as parquet or JSONL. A pin without
`rows_sha256` could not be computed where the pin was written (no network there): the first fetch records it, and from
then on a change is ChangedHashError, as if it had been pinned. That first fetch itself is trusted as far as its files'
own hashes go; sets with a pinned file sha256 are safe from the start.
Contract: nothing appears under rows.jsonl unless count and hash are right; rows stream, so memory holds one at a time.
No torch, no network (hub.py has it).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from quads.data.benchmarks import hub, livecodebench
from quads.data.benchmarks.checks import Unique
from quads.data.benchmarks.errors import (
    ChangedHashError,
    DuplicateError,
    GoldError,
    NotAvailableError,
    RowCountError,
    RowError,
    StaleError,
)
from quads.data.benchmarks.normalise import columns, normaliser
from quads.data.benchmarks.readers import raw_rows
from quads.data.benchmarks.spec import Spec, load_spec
from quads.files import write_json_atomic

log = logging.getLogger(__name__)
Row = dict[str, Any]
GoldCheck = Callable[[Row], str]
LOCKS = Path("configs/data_locks")
DEFAULT_OUT = Path("results/data")


def encoded(row: Row) -> bytes:
    """A row as the one line that is hashed and written."""
    return json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


class Collector:
    """Normalised rows of one set in order, with counts and what was dropped."""

    def __init__(self, spec: Spec, files: list[tuple[Any, Path]], gold: GoldCheck | None) -> None:
        self.spec, self.files, self.gold = spec, files, gold
        self.raw_count = 0
        self.outside_window = 0
        self.dropped: list[dict[str, str]] = []

    def rows(self) -> Iterator[Row]:
        """Every usable row. Raises RowCountError; for a test set also RowError and DuplicateError."""
        unique, normalise, wanted = Unique(), normaliser(self.spec), columns(self.spec)
        for pin, group in groupby(self.files, key=lambda pair: pair[0]):
            before = self.raw_count
            for _, path in group:
                for raw in raw_rows(path, wanted):
                    number, self.raw_count = self.raw_count, self.raw_count + 1
                    row = self._row(raw, number, normalise, unique)
                    if row is not None:
                        yield row
            self._counted(self.raw_count - before, pin.rows, pin.path)
        self._counted(self.raw_count, self.spec.rows, "all files together")

    def _row(self, raw: Row, number: int, normalise: Callable[[Row, int], Row], unique: Unique) -> Row | None:
        name = f"{self.spec.name}-{number}"
        try:
            if self.spec.window is not None:
                # Before the tests are decoded: most of the bytes of old problems are never unpacked.
                if not self.spec.window.holds(livecodebench.contest_date(raw, name)):
                    self.outside_window += 1
                    return None
            row = normalise(raw, number)
            name = row["id"]
            unique.add(name, self._text(row))
            if self.gold is not None and (problem := self.gold(row)):
                raise GoldError(f"{self.spec.name} {name}: the grader cannot use its gold: {problem}")
            return row
        except (RowError, DuplicateError) as error:
            if self.spec.role == "test":
                raise
            self.dropped.append({"id": name, "reason": error.reason, "detail": str(error)})
            return None

    def _text(self, row: Row) -> str | None:
        """What must not occur twice. Two problems of LiveCodeBench may share a statement: its ids alone count."""
        if self.spec.kind == "math":
            return str(row["problem"])
        return str(row["question"]) if self.spec.role == "train" else None

    def _counted(self, got: int, expected: int | None, what: str) -> None:
        if expected is not None and got != expected:
            raise RowCountError(
                f"{self.spec.name}: {got} rows in {what}, expected {expected} ({self.spec.hub_id} at revision "
                f"{self.spec.revision[:10]}): the copy is cut off, repeats rows or is another version; fetch it again"
            )


def build(
    spec: Spec,
    out: Path = DEFAULT_OUT,
    *,
    local: Path | None = None,
    locks: Path = LOCKS,
    gold: GoldCheck | None = None,
) -> Row:
    """Fetch (or read from `local`), check and write one set to out/NAME; returns its manifest.

    `gold(row)` says why the grader cannot use a row's gold, "" if it can: a test set is refused, a training row is
    dropped.
    Raises DataError of some class; then no rows.jsonl of this call exists.
    """
    folder = out / spec.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").unlink(missing_ok=True)
    files = hub.locate(spec, local)
    collector = Collector(spec, files, gold)
    part = folder / "rows.jsonl.part"
    digest, ids, kept = hashlib.sha256(), hashlib.sha256(), 0
    try:
        with part.open("wb") as file:
            for row in collector.rows():
                line = encoded(row)
                digest.update(line)
                ids.update(row["id"].encode() + b"\n")
                file.write(line)
                kept += 1
            file.flush()
            os.fsync(file.fileno())
        manifest = _manifest(collector, kept, digest.hexdigest(), ids.hexdigest(), gold is not None)
        _check_hash(spec, manifest, locks, "the hub" if local is None else "a local copy")
        os.replace(part, folder / "rows.jsonl")
    finally:
        part.unlink(missing_ok=True)
    write_json_atomic(folder / "manifest.json", manifest)
    return manifest


def _manifest(collector: Collector, kept: int, rows_sha256: str, ids_sha256: str, gold_checked: bool) -> Row:
    spec = collector.spec
    window = spec.window.model_dump(mode="json") if spec.window else None
    published = spec.window.published_rows if spec.window else None
    if published is not None and published != kept:
        log.warning("%s: %d rows in the window, papers report %d", spec.name, kept, published)
    return {
        "name": spec.name,
        "role": spec.role,
        "kind": spec.kind,
        "pin_hash": spec.pin_hash,
        "hub_id": spec.hub_id,
        "revision": spec.revision,
        "licence": spec.licence,
        "files": {path.name: hub.file_sha256(path) for _, path in collector.files},
        "rows_in_files": collector.raw_count,
        "outside_window": collector.outside_window,
        "rows": kept,
        "rows_sha256": rows_sha256,
        "ids_sha256": ids_sha256,
        "window": window,
        "gold_checked": gold_checked,
        "dropped": dict(sorted(Counter(entry["reason"] for entry in collector.dropped).items())),
        "dropped_rows": collector.dropped,
    }


def _check_hash(spec: Spec, manifest: Row, locks: Path, source: str) -> None:
    """Compare with the pin, else with the lock, else record a lock. Raises ChangedHashError."""
    got = manifest["rows_sha256"]
    # Rows that fail the gold check leave a training set, so the hash of one fetched without the check is another.
    key = "rows_sha256" if manifest["gold_checked"] or spec.role == "test" else "rows_sha256_without_gold_check"
    if spec.rows_sha256 is not None and key == "rows_sha256":
        if got != spec.rows_sha256:
            raise ChangedHashError(_changed(spec, got, spec.rows_sha256, f"pinned in {spec.name}.yaml"))
        return
    path = locks / f"{spec.name}.json"
    lock: Row = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if lock and lock["pin_hash"] != spec.pin_hash:
        raise ChangedHashError(
            f"{spec.name}: {path} was recorded under pin {lock['pin_hash']} (revision {lock['revision'][:10]}), now "
            f"{spec.pin_hash} (revision {spec.revision[:10]}); if the change is meant, delete {path} and fetch again"
        )
    if key in lock:
        if got != lock[key]:
            raise ChangedHashError(_changed(spec, got, lock[key], f"recorded in {path} from {lock['recorded_from']}"))
        return
    keep = {k: manifest[k] for k in ("name", "hub_id", "revision", "pin_hash", "rows", "ids_sha256", "files")}
    write_json_atomic(path, {**lock, **keep, key: got, "recorded_from": source})
    log.warning("%s: first fetch, rows_sha256 %s recorded in %s; commit that file", spec.name, got, path)


def _changed(spec: Spec, got: str, expected: str, where: str) -> str:
    return (
        f"{spec.name}: the normalised rows have sha256 {got}, expected {expected} ({where}): problems, answers or "
        f"tests differ from {spec.hub_id} at revision {spec.revision[:10]}; find out why before you use them"
    )


def read_manifest(name: str, directory: Path = DEFAULT_OUT) -> Row:
    """Manifest of a fetched set. Raises NotAvailableError with the fetch command, StaleError under another pin."""
    path, spec = directory / name / "manifest.json", load_spec(name)
    if not path.is_file():
        raise NotAvailableError(f"{name}: not fetched, {path} is missing. What to do: {hub.fetch_command(name)}")
    manifest: Row = json.loads(path.read_text(encoding="utf-8"))
    if manifest["pin_hash"] != spec.pin_hash:
        raise StaleError(
            f"{name}: {path.parent} was fetched under pin {manifest['pin_hash']}, now {spec.pin_hash}; fetch it again"
        )
    return manifest


def iterate(name: str, directory: Path = DEFAULT_OUT) -> Iterator[Row]:
    """Rows of a fetched set, one at a time; the hash is checked as they pass, so read to the end.

    Raises NotAvailableError, StaleError, and ChangedHashError after the last row if the file was edited.
    """
    manifest, digest = read_manifest(name, directory), hashlib.sha256()
    path = directory / name / "rows.jsonl"
    with path.open("rb") as file:
        for line in file:
            digest.update(line)
            yield json.loads(line)
    if digest.hexdigest() != manifest["rows_sha256"]:
        raise ChangedHashError(f"{path} differs from its manifest (sha256 {digest.hexdigest()}); fetch {name} again")


def load(name: str, directory: Path = DEFAULT_OUT) -> list[Row]:
    """All rows of a fetched set, checked. Raises like `iterate`."""
    return list(iterate(name, directory))
