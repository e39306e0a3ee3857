"""A stage dies with the command that started it: `make`, `snakemake`, or the shell between them.

    make -> snakemake -> bash -> python -m quads.<stage> -> Ray, engine workers ...

SIGKILL of make or snakemake leaves the rest running: orphans that hold memory and would race the next attempt for the
checkpoints. `watch_parents()` records every ancestor up to and including the topmost make or snakemake, and looks at
them once a second from a daemon thread. When one is gone it ends all descendants of this process and then the process
itself (exit code 143).

Differs from PR_SET_PDEATHSIG, which fires when the parent *thread* ends (Snakemake starts jobs from a thread pool) and
sees one generation only; and from killing the process group, which here is make's own group and holds the neighbouring
training job too. Linux only (/proc). A stage started by hand has no such ancestor and is left alone.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

POLL_S = 1.0
GRACE_S = 3.0
EXIT_CODE = 128 + signal.SIGTERM
RUNNERS = ("make", "gmake", "snakemake")


@dataclass(frozen=True)
class Process:
    """A process id with its start time in clock ticks: ids are reused, the pair is not."""

    pid: int
    started: int


@dataclass(frozen=True)
class _Stat:
    comm: str
    state: str
    parent: int
    started: int


def _stat(pid: int) -> _Stat | None:
    """The needed fields of /proc/PID/stat, or None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The command stands in parentheses and may itself hold spaces and parentheses: split after the last one.
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return _Stat(head.partition("(")[2], fields[0], int(fields[1]), int(fields[19]))


def alive(process: Process) -> bool:
    """Whether that very process still runs. A zombie does not: `kill -0` on one succeeds, so look at the state."""
    stat = _stat(process.pid)
    return stat is not None and stat.started == process.started and stat.state not in "ZX"


def _is_runner(pid: int, comm: str) -> bool:
    if comm in RUNNERS:
        return True
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:4]
    except OSError:
        return False
    # `python -m snakemake` and a script named snakemake run by an interpreter.
    return comm.startswith("python") and any(os.path.basename(w) == b"snakemake" for w in words[1:])


def ancestors_to_runner(pid: int | None = None) -> list[Process]:
    """Ancestors of `pid` (default: this process), nearest first, up to the topmost make or snakemake; [] without."""
    chain: list[Process] = []
    keep = 0
    stat = _stat(pid or os.getpid())
    while stat is not None and stat.parent > 1:
        parent = stat.parent
        stat = _stat(parent)
        if stat is None:
            break
        chain.append(Process(parent, stat.started))
        if _is_runner(parent, stat.comm):
            keep = len(chain)
    return chain[:keep]


def descendants(pid: int) -> set[Process]:
    """All processes below `pid` in the process tree, at this moment."""
    children: dict[int, list[Process]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _stat(int(entry))) is not None:
            children.setdefault(stat.parent, []).append(Process(int(entry), stat.started))
    found: set[Process] = set()
    todo = [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            if child not in found:
                found.add(child)
                todo.append(child.pid)
    return found


def _send(processes: set[Process], number: signal.Signals) -> None:
    for process in processes:
        if alive(process):
            try:
                os.kill(process.pid, number)
            except ProcessLookupError:
                continue  # ended between the two looks


def end_processes(processes: set[Process], grace_s: float = GRACE_S) -> None:
    """SIGTERM, wait up to `grace_s` seconds, SIGKILL what is left."""
    _send(processes, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and any(alive(p) for p in processes):
        time.sleep(0.05)
    _send(processes, signal.SIGKILL)


def _watch(chain: list[Process], poll_s: float) -> None:
    me = os.getpid()
    # A descendant whose own parent ends moves to process 1 and leaves the tree: remember everyone ever seen.
    seen: set[Process] = set()
    while all(alive(p) for p in chain):
        seen = {p for p in seen | descendants(me) if alive(p)}
        time.sleep(poll_s)
    gone = [p.pid for p in chain if not alive(p)]
    log.error("the process that started this stage is gone (pid %s): ending this stage and its children", gone)
    end_processes(seen | descendants(me))
    # Not sys.exit (it would end this thread only) and not SIGTERM to ourselves (a handler may swallow it).
    os._exit(EXIT_CODE)


def watch_parents(poll_s: float = POLL_S) -> threading.Thread | None:
    """Start the watch; call it first thing in a stage. Returns the daemon thread, or None without a runner above."""
    chain = ancestors_to_runner()
    if not chain:
        log.debug("no make or snakemake above this process: nothing to watch")
        return None
    return _start(chain, poll_s)


def watch_parent(poll_s: float = POLL_S, parent: int | None = None) -> threading.Thread:
    """The same watch on the direct parent, whatever it is: for a process that a stage starts.

    `parent` is its id as the parent itself said: a parent that was killed before this call has left this process to
    another one, which would be watched in its place for ever.
    """
    parent = os.getppid() if parent is None else parent
    stat = _stat(parent)
    return _start([Process(parent, stat.started if stat else 0)], poll_s)


def _start(chain: list[Process], poll_s: float) -> threading.Thread:
    """One thread per chain: each look reads all of /proc, and tests call many stages within one process."""
    name = "quads-lifeline " + " ".join(f"{p.pid}@{p.started}" for p in chain)
    for thread in threading.enumerate():
        if thread.name == name:
            return thread
    thread = threading.Thread(target=_watch, args=(chain, poll_s), name=name, daemon=True)
    thread.start()
    return thread
