"""Warm, killable worker processes for symbolic comparisons, safe to call from any thread.

    ask(operation, gold, answer) -> Reply        one question, at most one retry on a fresh worker

A worker that used up its CPU time was ended by the kernel (timeout); one that ran out of memory says so or was killed
(memory). Both are verdicts about the answer and the same on a busy machine. A worker that vanished otherwise, or
that did not answer within the wall limit although its CPU time was not used up, is infra_error: load is to blame,
not the answer. Whatever failed is asked once more; the second failure counts. Workers are replaced after `cases`
questions and after any failure. They start on first use (subprocess: no fork of this process's threads), and end
with it.

Differs from signal.alarm and from a thread pool: an alarm needs the main thread, a thread cannot be ended. No torch.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

log = logging.getLogger(__name__)

Failure = Literal["timeout", "memory", "grader_error", "infra_error"]
Verdict = Literal["same", "different", "unparsed_gold", "unparsed_answer"] | Failure
FAILED: tuple[Failure, ...] = get_args(Failure)
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Limits:
    """CPU seconds and memory of one question, wall seconds before a stuck worker is given up, questions per worker."""

    cpu_seconds: float = 4.0
    memory_bytes: int = 2 << 30
    wall_seconds: float = 120.0
    start_seconds: float = 180.0
    cases: int = 1000


@dataclass(frozen=True)
class Reply:
    """What the worker said, or why there is no answer."""

    verdict: Verdict
    detail: str = ""


class _GoneError(Exception):
    """The worker ended or did not answer; carries the reply that this means."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.detail)
        self.reply = reply


class Worker:
    """One process and its pipe. Used by one thread at a time."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.cases = 0
        self.buffer = b""
        # Nothing of the surroundings matters to a comparison; one thread keeps it from fighting its neighbours.
        environment = {key: os.environ[key] for key in ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH") if key in os.environ}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "quads.rewards.math.worker", str(limits.cpu_seconds), str(limits.memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
        )
        try:
            self._receive(limits.start_seconds)
        except _GoneError as gone:
            self.kill()
            raise _GoneError(Reply("infra_error", f"no worker: {gone.reply.detail}")) from None

    def ask(self, operation: str, gold: str, answer: str) -> Reply:
        """One question. Raises _GoneError when the worker is no longer usable."""
        self.cases += 1
        line = json.dumps({"operation": operation, "gold": gold, "answer": answer}).encode() + b"\n"
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(line)
        except OSError:
            raise _GoneError(self._ended()) from None
        return self._receive(self.limits.wall_seconds)

    def _receive(self, seconds: float) -> Reply:
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        descriptor = self.process.stdout.fileno()
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise _GoneError(Reply("infra_error", f"no answer within {seconds:g} s of wall time"))
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise _GoneError(self._ended())
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        said = json.loads(line)
        verdict: Verdict = "grader_error" if said["verdict"] == "error" else said["verdict"]
        reply = Reply(verdict, said["detail"])
        if verdict == "memory":
            raise _GoneError(reply)
        return reply

    def _ended(self) -> Reply:
        code = self.process.wait()
        if code == -signal.SIGPROF:
            return Reply("timeout", f"more than {self.limits.cpu_seconds:g} s of CPU time")
        if code == -signal.SIGKILL:
            return Reply("memory", "killed by the system, most likely for its memory")
        return Reply("grader_error", f"the worker ended with code {code}")

    def kill(self) -> None:
        """End the process and collect it."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Pool:
    """At most `size` workers; threads beyond that wait for one."""

    def __init__(self, size: int | None = None, limits: Limits | None = None) -> None:
        self.size = size or max(1, min(8, (os.cpu_count() or 2) // 2))
        self.limits = limits or Limits()
        self._reset()
        # A forked child has neither the lock's owner nor a claim on the parent's workers.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(self.size)
        self._registered = False
        self.started = 0

    def ask(self, operation: str, gold: str, answer: str) -> Reply:
        """The worker's verdict; what fails is asked once more on a fresh worker."""
        with self._places:
            reply = self._try(operation, gold, answer)
            if reply.verdict in FAILED:
                log.warning("symbolic worker: %s (%s), asking once more", reply.verdict, reply.detail)
                reply = self._try(operation, gold, answer)
        return reply

    def _try(self, operation: str, gold: str, answer: str) -> Reply:
        try:
            worker = self._take()
        except _GoneError as gone:
            return gone.reply
        keep = False
        try:
            reply = worker.ask(operation, gold, answer)
            keep = reply.verdict not in FAILED and worker.cases < self.limits.cases
            return reply
        except _GoneError as gone:
            return gone.reply
        finally:
            self._give(worker, keep)

    def _take(self) -> Worker:
        with self._lock:
            if not self._registered:
                atexit.register(self.close)
                self._registered = True
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            worker = Worker(self.limits)
            self.started += 1
        with self._lock:
            self._busy.add(worker)
        return worker

    def _give(self, worker: Worker, keep: bool) -> None:
        with self._lock:
            self._busy.discard(worker)
            if keep:
                self._idle.append(worker)
        if not keep:
            worker.kill()

    def close(self) -> None:
        """End all workers, busy ones too. The pool starts new ones when it is asked again."""
        with self._lock:
            workers, self._idle = [*self._idle, *self._busy], []
        for worker in workers:
            worker.kill()
