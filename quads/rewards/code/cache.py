"""Verdicts that need not be computed again: one SQLite file, shared by threads and processes.

    key = sha256 of: grader version, program, task (kind, tests, function), limits, sandbox level, Python version
          inside, packages inside with their versions, whether the official emulation ran

Anything that can change a verdict is part of the key, so nothing is ever invalidated by hand. Failures of the grader
(infra, grader error) are not stored. Differs from a cache keyed by the problem's id: an edited test misses.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

NAME = "verdicts.sqlite"


def key(parts: dict[str, Any]) -> str:
    """Hash of plain data; equal data in any order of its fields gives equal keys."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class VerdictCache:
    """`folder`/verdicts.sqlite. Raises sqlite3.Error if the file is none of ours."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / NAME
        self._lock = threading.Lock()
        self._database = sqlite3.connect(self.path, timeout=60, check_same_thread=False, isolation_level=None)
        self._database.execute("create table if not exists verdicts (key text primary key, verdict text not null)")

    def get(self, name: str) -> dict[str, Any] | None:
        """The stored verdict, None if there is none."""
        with self._lock:
            row = self._database.execute("select verdict from verdicts where key = ?", (name,)).fetchone()
        return None if row is None else dict(json.loads(row[0]))

    def put(self, name: str, verdict: dict[str, Any]) -> None:
        """Store; a second writer of the same key wins (it has computed the same)."""
        with self._lock:
            self._database.execute("insert or replace into verdicts values (?, ?)", (name, json.dumps(verdict)))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._database.close()
