"""What one program may use. Every field is part of the key of the verdict cache.

    seconds     CPU seconds per test (6 in LiveCodeBench), and one second more of its own time: time on a CPU or asleep,
                never time spent waiting for a busy machine (quads.rewards.code.clock)
    memory_mb   address space of each process, and resident memory of all of them together
    output_mb   standard output, and results of a functional program
    scratch_mb  the private /tmp, and the size of any one file
    processes   processes and threads together
    open_files, stack_mb   as named

Differs from LiveCodeBench, which limits wall time only (6 s) and has no memory limit ("4GB" is a comment there).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of one program; raises ValueError on a value that cannot work."""

    seconds: float = 6.0
    memory_mb: int = 2048
    output_mb: int = 16
    scratch_mb: int = 64
    processes: int = 48
    open_files: int = 256
    stack_mb: int = 128

    def __post_init__(self) -> None:
        if not 0.1 <= self.seconds <= 3600:
            raise ValueError(f"seconds={self.seconds}: expected 0.1 to 3600 CPU seconds per test")
        if self.memory_mb < 128:
            raise ValueError(f"memory_mb={self.memory_mb}: an interpreter with its prelude needs at least 128")
        for name in ("output_mb", "scratch_mb", "processes", "open_files", "stack_mb"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
