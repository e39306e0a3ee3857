"""Remove a Snakemake lock that a killed run left in this folder; refuse while anything of a run is alive.

Snakemake removes its lock on every exit but SIGKILL and power loss, and then refuses to start. `snakemake --unlock`
does not look whether anybody is alive; this does: a live `snakemake` of this folder, or a stage that is just ending
(quads.lifeline gives it a few seconds), is reported or waited for. A run on another machine that shares the folder
cannot be seen from here, so the Snakefile notes the machine when a run starts, and a foreign note is refused.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from itertools import pairwise
from pathlib import Path

WAIT_S = 15.0
LOCKS = Path(".snakemake/locks")
HOST = Path(".snakemake/quads-host")


def commands_here() -> dict[int, list[str]]:
    """Process id -> command line of every other process whose working folder is this one."""
    here = os.getcwd()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if os.readlink(entry / "cwd") == here:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                found[int(entry.name)] = [w.decode(errors="replace") for w in words if w]
        except OSError:
            continue  # ended meanwhile, or another user's
    return found


def is_snakemake(words: list[str]) -> bool:
    """`python .../bin/snakemake ...` or `python -m snakemake ...`."""
    return any(os.path.basename(word) == "snakemake" for word in words[:3])


def is_stage(words: list[str]) -> bool:
    """`python -m quads.<stage> ...`."""
    return any(a == "-m" and b.startswith("quads.") for a, b in pairwise(words))


def main() -> None:
    """Exit 0 with the lock gone, or say why not."""
    locks = sorted(LOCKS.glob("*.lock")) if LOCKS.is_dir() else []
    if not locks:
        return
    deadline = time.monotonic() + WAIT_S
    while True:
        here = commands_here()
        running = [pid for pid, words in here.items() if is_snakemake(words)]
        if running:
            sys.exit(
                f"Another snakemake is at work in this folder (process {', '.join(map(str, running))}). "
                f"Wait for it, or stop it with: kill -INT {running[0]}"
            )
        stages = [pid for pid, words in here.items() if is_stage(words)]
        if not stages:
            break
        if time.monotonic() > deadline:
            sys.exit(
                f"A stage of an earlier run still works in this folder (process {', '.join(map(str, stages))}). "
                f"Wait for it, or end it with: kill {' '.join(map(str, stages))}"
            )
        time.sleep(0.5)
    host = HOST.read_text().strip() if HOST.is_file() else socket.gethostname()
    if host != socket.gethostname():
        sys.exit(
            f"This folder is locked by a run that was started on {host}, which cannot be seen from "
            f"{socket.gethostname()}. If it is over, remove the lock with: snakemake --unlock"
        )
    for lock in locks:
        lock.unlink()
    print("Removed the lock of a run that was killed; finished results are kept, training resumes from checkpoints.")


if __name__ == "__main__":
    main()
