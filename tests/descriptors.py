"""Descriptors of this process, for tests that nothing stays open."""

from __future__ import annotations

import os
from pathlib import Path

OWN = Path("/proc/self/fd")


def open_descriptors() -> dict[int, str]:
    """Number -> what it is: a path, or "pipe:[inode]", "socket:[inode]" and the like."""
    found = {}
    for number in os.listdir(OWN):
        try:
            found[int(number)] = os.readlink(OWN / number)
        except FileNotFoundError:
            continue  # that of the listing itself
    return found


def open_pipes() -> list[str]:
    """The open pipes; unlike files, no other thread of a test process opens any meanwhile (a watch reads /proc)."""
    return sorted(target for target in open_descriptors().values() if target.startswith("pipe:"))


def open_below(folder: Path) -> list[str]:
    """Names of the open files below `folder`, relative to it."""
    paths = (Path(target) for target in open_descriptors().values())
    return sorted(str(path.relative_to(folder)) for path in paths if path.is_relative_to(folder))
