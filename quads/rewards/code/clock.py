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
import time
from dataclasses import dataclass, field
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
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


@dataclass
class Stopwatch:
    """CPU and own time of a tree since the last mark."""

    root: int
    cpu: float = 0.0
    own: float = 0.0
    last: Sample = field(init=False)
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
        return new

    def mark(self, cpu: float | None = None) -> None:
        """Start both clocks again, with `cpu` seconds of the tree as zero (default: what it has used by now)."""
        self.tick()
        self._cpu_mark = self.last.cpu if cpu is None else cpu
        self.cpu, self.own = max(0.0, self.last.cpu - self._cpu_mark), 0.0

    def final(self, total_cpu: float) -> None:
        """Take the kernel's account of the ended tree, exact where samples have gaps."""
        self.cpu = max(self.cpu, total_cpu - self._cpu_mark)
