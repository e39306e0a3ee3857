"""How long a program has worked, whatever else the machine does: read from /proc of a tree of processes.

    cpu       seconds on a CPU of all living processes of the tree and of those they have waited for
    waiting   seconds in which a thread was ready to run and no CPU was free (/proc/PID/task/TID/schedstat)
    own time  wall time minus waiting = time on a CPU + time asleep, what a stopwatch shows on an idle machine

A limit on wall time makes verdicts depend on the load, a limit on CPU time alone lets a sleeping program live for ever:
own time has neither fault. It is integrated tick by tick, each tick's waiting capped by the tick, because threads that
wait at the same time would otherwise be subtracted twice. Where the kernel offers no schedstat, `waiting` is 0 and
own time is wall time (`HAS_SCHEDSTAT` is False and the sandbox widens the limit).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
MARK = "QUADS_PROGRAM"
HAS_SCHEDSTAT = Path("/proc/self/schedstat").exists()


@dataclass(frozen=True)
class Sample:
    """One look at a tree: seconds, bytes of private resident memory, process ids (the root first)."""

    cpu: float
    waiting: float
    resident: int
    pids: tuple[int, ...]


def sample(root: int) -> Sample:
    """Look at process `root` and all its descendants. Processes that end meanwhile are left out."""
    pids, cpu, waiting, resident = [], 0.0, 0.0, 0
    todo = [root]
    while todo:
        pid = todo.pop()
        # OSError: gone between two reads; IndexError: its files are already empty.
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            cpu += sum(map(int, fields[11:15])) / _TICKS
            size = Path(f"/proc/{pid}/statm").read_text().split()
            resident += (int(size[1]) - int(size[2])) * _PAGE
            pids.append(pid)
            for task in os.listdir(f"/proc/{pid}/task"):
                folder = f"/proc/{pid}/task/{task}"
                with contextlib.suppress(OSError, IndexError):
                    todo += map(int, Path(f"{folder}/children").read_text().split())
                    if HAS_SCHEDSTAT:
                        waiting += int(Path(f"{folder}/schedstat").read_text().split()[1]) / 1e9
    return Sample(cpu, waiting, resident, tuple(pids))


def kill_marked(token: str) -> int:
    """Kill every process started with MARK=token in its environment, daemons included; returns how many rounds it took.

    For the level without a pid namespace. Rounds, because a process may fork while the list is read; bounded.
    """
    mark = f"{MARK}={token}".encode()
    for rounds in range(1, 50):
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return rounds
        time.sleep(0.01)
    return rounds


@dataclass
class Stopwatch:
    """CPU and own time of a tree since the last mark."""

    root: int
    cpu: float = 0.0
    own: float = 0.0
    last: Sample = field(init=False)
    seen: set[int] = field(default_factory=set)
    _cpu_mark: float = 0.0
    _at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.last = sample(self.root)

    def tick(self) -> Sample:
        """Take a sample and advance both clocks."""
        now, new = time.monotonic(), sample(self.root)
        passed = now - self._at
        self.own += passed - min(passed, max(0.0, new.waiting - self.last.waiting))
        # Never backwards: the time of a process that ended but was not waited for yet is briefly in no file.
        self.cpu = max(self.cpu, new.cpu - self._cpu_mark)
        self.last, self._at = new, now
        self.seen.update(new.pids)
        return new

    def mark(self, cpu: float | None = None) -> None:
        """Start both clocks again, with `cpu` seconds of the tree as zero (default: what it has used by now)."""
        self.tick()
        self._cpu_mark = self.last.cpu if cpu is None else cpu
        self.cpu, self.own = max(0.0, self.last.cpu - self._cpu_mark), 0.0

    def reported(self, cpu: float) -> None:
        """Take the program's own count at its end: exact where samples have gaps, and it can only add."""
        self.cpu = max(self.cpu, cpu - self._cpu_mark)
