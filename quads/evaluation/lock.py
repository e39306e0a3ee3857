"""One writer per folder: a second evaluation (an orphan, a double submission) must not append to the same samples.

Shards lock their own part, so that they run side by side. The lock is the kernel's: it ends with its process, and a
stale file means nothing. Linux; on NFS it needs a server with locks.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quads.evaluation.generations import RecordsError


@contextmanager
def locked_folder(folder: Path, part: str = "") -> Iterator[None]:
    """Hold `folder` (or one part of it), making it if needed. Raises RecordsError when another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".lock{part and '-' + part}").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordsError(
                f"{folder} {part}is in use by another evaluation; wait for it or stop it, then run again"
            ) from None
        yield
