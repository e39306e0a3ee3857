# SPDX-License-Identifier: Apache-2.0
"""Several engines, each in its own process, and rounds in which one after the other works while the rest is idle.

    start    one process per description; they start one by one, or together where time counts more than their start
    rounds   per round, in random order of engines: per shape one prompt-only and one whole run, then one weight update

Contract: only one engine works at any time, so that what a ratio compares was measured within seconds on the same
machine, and drift of the machine hits all alike. Requests of a round are the same for all engines. An engine that fails
is left out with all its numbers and its reason is kept; the others go on.
Needs memory for all engines at once: give fewer modes where that is too much (a ratio needs two).
"""

from __future__ import annotations

import json
import logging
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quads.bench.rollout_plan import Engine, Shape

log = logging.getLogger(__name__)
COMMAND = (sys.executable, "-m", "quads.integrations.vllm.bench")
GRACE_S = 10.0


class EngineFailedError(RuntimeError):
    """An engine's process said so, ended, or did not answer in time."""


class StoppedError(Exception):
    """SIGTERM: whole rounds are kept, the begun one is not."""


def stop(*_: object) -> None:
    """Signal handler."""
    raise StoppedError("stopped by a signal")


@dataclass(frozen=True)
class Measurement:
    """One engine in one round and shape. Seconds; bytes. `prefill` makes one token per request, `whole` all."""

    engine: str
    round: int
    shape: Shape
    prefill: float
    whole: float
    prefill_memory: int
    whole_memory: int

    @property
    def decode(self) -> float:
        """Seconds for the tokens after the first."""
        return self.whole - self.prefill


@dataclass(frozen=True)
class Sync:
    """One weight update of one engine."""

    engine: str
    round: int
    seconds: float
    bytes: int
    memory: int


class Worker:
    """One engine's process and the pipes to it."""

    def __init__(self, engine: Engine, command: Sequence[str] = COMMAND, limit_s: float = 600.0) -> None:
        self.engine, self.limit_s = engine, limit_s
        self._buffer = b""
        # A session of its own: a signal to this group must not end engines whose numbers are still wanted. They end
        # with their input, or when this process is gone.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self.send(engine.to_dict())

    def send(self, what: dict[str, Any]) -> None:
        """One line to the process. Raises EngineFailedError when it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineFailedError(f"its process ended with code {self._process.wait()}") from None

    def answer(self) -> dict[str, Any]:
        """The next line from the process. Raises EngineFailedError with the reason."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + self.limit_s
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise EngineFailedError(f"no answer within {self.limit_s:.0f} s")
            part = os.read(descriptor, 1 << 16)
            if not part:
                raise EngineFailedError(f"its process ended with code {self._process.wait()}; see the log above")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise EngineFailedError(said["error"])
        return said

    def ask(self, **what: Any) -> dict[str, Any]:
        """Send and wait."""
        self.send(what)
        return self.answer()

    def close(self) -> None:
        """Close its pipes, which asks it to end."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # unsent words of an ended process

    def end(self) -> None:
        """Close and wait; SIGTERM, then SIGKILL when it does not end."""
        self.close()
        for harder in (self._process.terminate, self._process.kill):
            try:
                self._process.wait(GRACE_S)
                return
            except subprocess.TimeoutExpired:
                harder()
        self._process.wait()


class Fleet:
    """All engines of one benchmark; a context manager that ends their processes."""

    def __init__(self, command: Sequence[str] = COMMAND, limit_s: float = 600.0) -> None:
        self.command, self.limit_s = command, limit_s
        self.workers: list[Worker] = []
        self.started: dict[str, dict[str, Any]] = {}  # what each engine said when it was ready
        self.failed: dict[str, str] = {}
        self.measured: list[Measurement] = []
        self.syncs: list[Sync] = []

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.close()
        for worker in self.workers:
            worker.end()

    def start(self, engines: Sequence[Engine], *, together: bool = False) -> None:
        """Start every engine and wait until it is ready; those that fail are noted and left out."""
        groups = [list(engines)] if together else [[engine] for engine in engines]
        for group in groups:
            new = []
            for engine in group:
                worker = Worker(engine, self.command, self.limit_s)
                self.workers.append(worker)
                new.append(worker)
            for worker in new:
                try:
                    said = self.started[worker.engine.name] = worker.answer()
                    log.info("%s: ready after %.1f s, %s", worker.engine.name, said["seconds"], said["backend"])
                except EngineFailedError as error:
                    self._drop(worker, error)

    def warm_up(self, wanted: Sequence[Shape]) -> None:
        """Every shape once with a short response: kernels are compiled, caches allocated."""
        for worker in list(self.workers):
            try:
                for shape in wanted:
                    few = min(shape.response, 4)
                    worker.ask(do="generate", batch=shape.batch, prompt=shape.prompt, response=few, seed=0)
            except EngineFailedError as error:
                self._drop(worker, error)

    def rounds(self, wanted: Sequence[Shape], count: int, *, until: float | None = None, seed: int = 0) -> int:
        """At most `count` whole rounds, none but the first begun after `until` (time.monotonic); how many were made.

        StoppedError ends it too, at the last whole round.
        """
        draw = random.Random(seed)
        for number in range(count):
            if number and until is not None and time.monotonic() > until:
                log.warning("time is over: %d of %d rounds", number, count)
                return number
            try:
                self._round(draw.sample(self.workers, len(self.workers)), wanted, number)
            except StoppedError:
                log.warning("stopped: %d of %d rounds", number, count)
                self.measured = [m for m in self.measured if m.round < number]
                self.syncs = [s for s in self.syncs if s.round < number]
                return number
            log.info("round %d of %d", number + 1, count)
        return count

    def _round(self, order: Sequence[Worker], wanted: Sequence[Shape], number: int) -> None:
        for worker in order:
            try:
                self._turn(worker, wanted, number)
            except EngineFailedError as error:
                self._drop(worker, error)

    def _turn(self, worker: Worker, wanted: Sequence[Shape], number: int) -> None:
        name = worker.engine.name
        for i, shape in enumerate(wanted):
            request = {"do": "generate", "batch": shape.batch, "prompt": shape.prompt, "seed": 1 + number * 1000 + i}
            first = worker.ask(**request, response=1)
            whole = worker.ask(**request, response=shape.response)
            memory = first["memory_bytes"], whole["memory_bytes"]
            self.measured.append(Measurement(name, number, shape, first["seconds"], whole["seconds"], *memory))
        if not worker.engine.stock:
            said = worker.ask(do="sync")
            self.syncs.append(Sync(name, number, said["seconds"], said["bytes"], said["memory_bytes"]))

    def _drop(self, worker: Worker, error: EngineFailedError) -> None:
        name = worker.engine.name
        log.error("%s is left out: %s", name, error)
        self.failed[name] = str(error)
        self.workers.remove(worker)
        self.measured = [m for m in self.measured if m.engine != name]
        self.syncs = [s for s in self.syncs if s.engine != name]
        worker.end()
