"""One writer per folder: a second evaluation (an orphan, a double submission) must not append to the same samples.

Shards lock their own part, so that they run side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quads.evaluation.generations import RecordsError
from quads.files import held


@contextmanager
def locked_folder(folder: Path, part: str = "") -> Iterator[None]:
    """Hold `folder` (or one part of it), making it if needed. Raises RecordsError when another process holds it."""
    in_use = RecordsError(f"{folder} {part}is in use by another evaluation; wait for it or stop it, then run again")
    with held(folder / f".lock{part and '-' + part}", in_use):
        yield
