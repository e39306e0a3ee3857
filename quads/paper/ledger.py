"""Where every number of a report comes from: the list of sources that its cells point to.

    cell --(key)--> entry of sources.json --(path)--> result file;  entry.config: the resolved configuration itself

Two steps from any number to run id, resolved configuration and commit. Kinds: `run` (one arm, one seed), `study`
(quads.diagnose), `bench` (rollout benchmark), `kernels` (kernel benchmark). A key is unique in a report and valid as
an HTML id. Paths are relative to the results folder where they lie below it.
Contract: a cell whose key is not in the ledger stops the report; nothing is cited that was not read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quads.paper.sources import Source

UNKNOWN = "not recorded"


@dataclass(frozen=True)
class Entry:
    """One source. `files` maps a path to the sha256 of what was read; `link` is the file that a reader opens first."""

    key: str
    kind: str
    title: str
    link: str
    files: Mapping[str, str]
    run_id: str = ""
    config_hash: str = ""
    code_hash: str = ""
    commit: str = UNKNOWN
    seed: int | None = None
    hardware: str = UNKNOWN
    versions: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


class Ledger:
    """Entries by key, in order of first use. Raises KeyError naming the key for a source that was never read."""

    def __init__(self, results: Path) -> None:
        self.results = results
        self._entries: dict[str, Entry] = {}

    def add(self, entry: Entry) -> str:
        """Register an entry; its key. Raises ValueError when another source has that key."""
        known = self._entries.get(entry.key)
        if known is not None and known != entry:
            raise ValueError(f"two sources are called {entry.key!r}: {known.link} and {entry.link}")
        self._entries[entry.key] = entry
        return entry.key

    def add_runs(self, sources: Iterable[Source]) -> tuple[str, ...]:
        """One entry per run; their keys."""
        return tuple(self.add(self._run(s)) for s in sources)

    def get(self, key: str) -> Entry:
        """The entry of a key."""
        if key not in self._entries:
            raise KeyError(f"a cell cites the source {key!r}, which was not read; known: {', '.join(self._entries)}")
        return self._entries[key]

    def label(self, key: str) -> str:
        """Short name of a source on paper: S1, S2, ... in order of registration."""
        self.get(key)
        return f"S{list(self._entries).index(key) + 1}"

    def describe(self, entry: Entry) -> str:
        """One line: title, file, config hash, commit."""
        known = [f"config {entry.config_hash}" if entry.config_hash else "", f"commit {entry.commit[:10]}"]
        return f"{entry.title}, {entry.link}, {', '.join(k for k in known if k)}"

    def entries(self) -> list[Entry]:
        """All entries."""
        return list(self._entries.values())

    def relative(self, path: Path) -> str:
        """Path relative to the results folder, or as given where it lies elsewhere."""
        return str(path.relative_to(self.results)) if path.is_relative_to(self.results) else str(path)

    def files(self, paths: Iterable[Path]) -> dict[str, str]:
        """Relative path -> sha256."""
        return {self.relative(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}

    def columns(self, keys: Sequence[str]) -> dict[str, str]:
        """What a CSV says about a cell's sources: keys, files, run ids, config hashes, commits (no repeats)."""
        found = [self.get(k) for k in keys]

        def joined(values: Iterable[str]) -> str:
            return " ".join(dict.fromkeys(v for v in values if v))

        return {
            "sources": " ".join(keys),
            "source_files": joined(e.link for e in found),
            "run_ids": joined(e.run_id for e in found),
            "config_hashes": joined(e.config_hash for e in found),
            "commits": joined(e.commit.replace(" ", "_") for e in found),
        }

    def to_json(self) -> list[dict[str, Any]]:
        """Plain values for sources.json."""
        return [asdict(e) for e in self.entries()]

    def _run(self, source: Source) -> Entry:
        config = source.files[0].with_name("run.json")
        link = config if config.is_file() else source.files[0]
        return Entry(
            key=key_of(source.run_id),
            kind="run",
            title=f"arm {source.arm.name}, seed {source.seed}",
            link=self.relative(link),
            files=self.files(source.files),
            run_id=source.run_id,
            config_hash=source.config_hash,
            code_hash=str(source.train["code_hash"]),
            commit=str(source.train["commit"]),
            seed=source.seed,
            hardware=describe_hardware(source.train.get("hardware"), source.train.get("receipt")),
            versions=source.train.get("versions") or {},
            config=source.train.get("run") or {},
        )


def key_of(name: str) -> str:
    """A name as a key: letters, digits, `-`, `_`; starts with a letter."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")


def _cpu(model: str) -> str:
    """A CPU's name without trade marks and the word Processor: it stands in every row of every table."""
    return re.sub(r"\((R|TM)\)|\bProcessor\b", "", model).replace("  ", " ").strip() or model


def describe_hardware(found: Mapping[str, Any] | None, receipt: Mapping[str, Any] | None = None) -> str:
    """One line about a machine as quads.provenance.hardware records it, and how the engine multiplied."""
    if not found:
        return UNKNOWN
    gpus = [str(g).partition(",")[0] for g in found.get("gpus", [])]
    machine = f"{len(gpus)} x {gpus[0]}" if gpus else f"{found['cores']} cores {_cpu(found['cpu'])}, no GPU"
    backend = (receipt or {}).get("backend")
    return f"{machine}; {backend}" if backend else machine
