"""One untrusted program in one sandbox: start, watch, kill, account.

    Sandbox.run(job) -> Outcome    fresh process tree; descriptors in memory, nothing on disk at level bwrap

    stdin, stdout, stderr   sealed or plain memory files: no pipe to block on, `os.fstat(0).st_size` is the real size as
                            under a judge's redirect, and a background child that keeps stdout open cannot delay the end
    control pipe            messages of the runner (quads.rewards.code.runner)
    clocks                  CPU time and own time of the tree (quads.rewards.code.clock); never wall time, so a loaded
                            machine does not change a verdict. If a program could not get the CPU for too long, that is
                            "infra", not "timeout"

Outcome.kind: ok | error | timeout | memory | output | stopped | infra. "infra" before the runner's "start" message
means that the sandbox failed; after it only starvation, or a death by the machine's out-of-memory killer, gives
"infra", so a program cannot choose to be masked. Differs from subprocess.run(timeout=...): see above, and the whole
tree is gone when `run` returns.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from quads.rewards.code import clock, launch, seccomp
from quads.rewards.code.limits import Limits

Mode = Literal["stdin", "functional", "official"]
Kind = Literal["ok", "error", "timeout", "memory", "output", "stopped", "infra"]
RUNNER = Path(__file__).with_name("runner.py")
TICK = 0.05
# Own time beyond the CPU limit: reading input, page faults.
SLACK = 1.0
START_LIMIT = 120.0
STDERR_TAIL = 4096
PIPE = 1 << 20


@dataclass(frozen=True)
class Job:
    """What to run. `inputs`: one text for stdin, all texts for official, lists of JSON lines for functional."""

    mode: Mode
    program: str
    inputs: tuple[Any, ...]
    function: str | None = None


@dataclass
class Outcome:
    """What happened. `results[i]`: text of test i (functional, official); `output`: standard output (stdin);
    `pids`: processes seen, as numbered outside; none of them is left.
    """

    kind: Kind
    detail: str = ""
    output: str = ""
    results: dict[int, str] = field(default_factory=dict)
    cpu: float = 0.0
    wall: float = 0.0
    stderr: str = ""
    pids: frozenset[int] = frozenset()


class Sandbox:
    """A level of isolation with its interpreter. Use `open_sandbox`, which proves the level."""

    def __init__(self, level: launch.Level, python: launch.Python) -> None:
        self.level, self.python = level, python
        self.report: dict[str, Any] = {}
        self._source, self._filter = RUNNER.read_bytes(), seccomp.program()

    def run(self, job: Job, limits: Limits, on_result: Callable[[int, str], bool] | None = None) -> Outcome:
        """Run `job`; `on_result(i, text)` may return False to stop early ("stopped"). Thread-safe."""
        begin = time.monotonic()
        try:
            with contextlib.ExitStack() as stack:
                outcome = _Run(self, job, limits, on_result, stack).outcome()
        except (OSError, subprocess.SubprocessError) as error:
            outcome = Outcome("infra", f"the sandbox did not start: {type(error).__name__}: {error}")
        outcome.wall = time.monotonic() - begin
        return outcome


class _Run:
    """One run: descriptors, process, clocks."""

    def __init__(
        self,
        box: Sandbox,
        job: Job,
        limits: Limits,
        on_result: Callable[[int, str], bool] | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self.box, self.job, self.limits, self.on_result, self.stack = box, job, limits, on_result, stack
        self.uid = launch.unprivileged_uid()
        self.messages: dict[int, str] = {}
        self.pieces: list[bytes] = []
        self.end: tuple[Kind, str] | None = None
        self.claim: tuple[Kind, str] | None = None
        self.received, self.started, self.test, self.marked = 0, False, -1, 0.0
        self.oom_kills, self.token = _oom_kills(), secrets.token_hex(8)

    # Descriptors and command.

    def memory(self, name: str, data: bytes | None = None) -> int:
        """A file in memory; with `data`, sealed read-only. Anyone may reopen it (/dev/stdin inside)."""
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.stack.callback(os.close, descriptor)
        if data is not None:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.lseek(descriptor, 0, os.SEEK_SET)
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        return descriptor

    def start(self) -> subprocess.Popen[bytes]:
        limits, bwrap = self.limits, self.box.level == "bwrap"
        folder = "/tmp" if bwrap else self.private_folder()
        job = {
            "mode": self.job.mode,
            "program": self.job.program,
            "function": self.job.function,
            "inputs": [] if self.job.mode == "stdin" else list(self.job.inputs),
            "seconds": limits.seconds,
            "uid": self.uid if bwrap else None,
            "folder": folder,
            "packages": [launch.PACKAGES_INSIDE if bwrap else f"{folder}/packages"],
            "limits": {
                "cpu_seconds": limits.seconds * (1 if self.job.mode == "stdin" else len(self.job.inputs) + 1),
                "memory_mb": limits.memory_mb,
                "scratch_mb": limits.scratch_mb,
                "processes": limits.processes,
                "open_files": limits.open_files,
                "stack_mb": limits.stack_mb,
                "count_processes": self.box.level == "rlimits",
            },
        }
        text = self.job.inputs[0] if self.job.mode == "stdin" else ""
        self.stdin = self.memory("stdin", text.encode("utf-8", "surrogatepass"))
        self.stdout, self.stderr = self.memory("stdout"), self.memory("stderr")
        source, job_file = self.memory("runner", self.box._source), self.memory("job", json.dumps(job).encode())
        self.control, control_in = os.pipe2(os.O_CLOEXEC)
        self.stack.callback(os.close, self.control)
        os.set_blocking(self.control, False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.control, fcntl.F_SETPIPE_SZ, PIPE)
        inner = ["-s", "-c", f"exec(compile(open({source}).read(),'runner','exec'))", str(job_file), str(control_in)]
        try:
            passed, command, environment = self.command(inner, folder)
            return subprocess.Popen(
                command,
                stdin=self.stdin,
                stdout=self.stdout,
                stderr=self.stderr,
                pass_fds=(source, job_file, control_in, *passed),
                env=environment,
                cwd="/" if bwrap else folder,
                start_new_session=True,
                user=None if bwrap else self.uid,
                group=None if bwrap else self.uid,
                extra_groups=None if bwrap or self.uid is None else [],
            )
        finally:
            os.close(control_in)

    def command(self, inner: list[str], folder: str) -> tuple[list[int], list[str], dict[str, str]]:
        python = self.box.python
        if self.box.level != "bwrap":
            environment = {**launch.ENVIRONMENT, "HOME": folder, "TMPDIR": folder, clock.MARK: self.token}
            return [], [*launch.weak_command(self.box.level, python), *inner], environment
        filter_file = None if self.box._filter is None else self.memory("seccomp", self.box._filter)
        arguments = launch.bwrap_arguments(python, self.limits, self.uid, filter_file)
        listing = self.memory("arguments", b"".join(a.encode() + b"\0" for a in arguments))
        passed = [listing] if filter_file is None else [listing, filter_file]
        # The command itself stays outside: old versions of bwrap do not take it from the descriptor.
        return passed, [launch.bwrap(), "--args", str(listing), str(python.executable), *inner], {}

    def private_folder(self) -> str:
        folder = Path(tempfile.mkdtemp(prefix="quads-program-"))
        self.stack.callback(shutil.rmtree, folder, True)
        (folder / "packages").mkdir()
        for package in self.box.python.packages:
            (folder / "packages" / package.name).symlink_to(package)
        if self.uid is not None:
            os.chown(folder, self.uid, self.uid)
        return str(folder)

    # Watching.

    def outcome(self) -> Outcome:
        self.process = self.start()
        self.watch = clock.Stopwatch(self.process.pid)
        self.first_process = -1
        try:
            self.follow()
        finally:
            self.finish()
        kind, detail = self.judge()
        size = self.limits.output_mb << 20
        return Outcome(
            kind,
            detail,
            output=_read(self.stdout, 0, size).decode("utf-8", "replace") if kind in ("ok", "stopped") else "",
            results=self.messages,
            cpu=self.watch.cpu,
            stderr=_tail(self.stderr),
            pids=frozenset(self.watch.seen),
        )

    def follow(self) -> None:
        """Read messages and advance the clocks until the tree ends or breaks a limit."""
        exited = os.pidfd_open(self.process.pid)
        self.stack.callback(os.close, exited)
        poll = select.poll()
        poll.register(exited, select.POLLIN)
        poll.register(self.control, select.POLLIN)
        next_tick, deadline = time.monotonic() + TICK, time.monotonic() + START_LIMIT
        while self.end is None:
            ready = dict(poll.poll(max(0.0, next_tick - time.monotonic()) * 1000))
            if self.control in ready and not self.read_control():
                poll.unregister(self.control)
            if exited in ready:
                self.read_control()
                return
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK
                if self.started:
                    self.check(self.watch.tick(), now)
                elif now > deadline:
                    self.end = ("infra", f"no start after {START_LIMIT:.0f} s")
                if self.started and now > deadline:
                    deadline = now + START_LIMIT

    def check(self, sample: clock.Sample, now: float) -> None:
        """End the run if a limit is broken."""
        limits = self.limits
        if max(self.watch.cpu, self.watch.own) > limits.seconds:
            # This process may have slept since the pipe was read last: the time can belong to the next test.
            self.read_control()
        if self.end is not None:
            return
        wide = 1.0 if clock.HAS_SCHEDSTAT else 10.0
        if self.watch.cpu > limits.seconds:
            self.end = ("timeout", f"more than {limits.seconds:g} CPU seconds")
        elif self.watch.own > (limits.seconds + SLACK) * wide:
            self.end = ("timeout", f"more than {(limits.seconds + SLACK) * wide:g} s, mostly asleep")
        elif now - self.marked > 60 * (limits.seconds + SLACK):
            self.end = ("infra", "starved: the machine gave it no CPU")
        elif sample.resident > (limits.memory_mb + 64) << 20:
            self.end = ("memory", f"more than {limits.memory_mb} MiB in {len(sample.pids)} processes")
        elif os.fstat(self.stdout).st_size > limits.output_mb << 20:
            self.end = ("output", f"more than {limits.output_mb} MiB of output")

    def read_control(self) -> bool:
        """Take what is in the pipe. False at its end."""
        while True:
            try:
                data = os.read(self.control, 1 << 20)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.received += len(data)
            if self.received > (self.limits.output_mb + 1) << 20:
                self.end = ("output", f"more than {self.limits.output_mb} MiB of results")
                return False
            # Pieces of an unfinished line are kept apart: joining them each time would be quadratic.
            first, *rest = data.split(b"\n")
            self.pieces.append(first)
            for piece in rest:
                line, self.pieces = b"".join(self.pieces), [piece]
                self.message(line)

    def message(self, line: bytes) -> None:
        """One message; after "start" all of them are claims of an untrusted program."""
        try:
            name, *values = json.loads(line)
            if not self.started:
                self.started = name == "start"
                self.mark(float(values[0]))
                self.first_process = self.watch.last.pids[1] if len(self.watch.last.pids) > 1 else -1
            elif name == "test" and values[0] == self.test + 1:
                self.test += 1
                self.mark(None)
            elif name == "result" and values[0] == self.test and self.test not in self.messages:
                self.messages[self.test] = str(values[1])
                if self.on_result is not None and not self.on_result(self.test, self.messages[self.test]):
                    self.end = self.end or ("stopped", "")
            elif name == "cpu":
                self.watch.reported(float(values[0]))
            elif name == "end" and values[0] in ("error", "memory", "timeout"):
                self.claim = (values[0], str(values[1])[:500])
        except (ValueError, TypeError, IndexError, RecursionError):
            return

    def mark(self, cpu: float | None) -> None:
        self.marked = time.monotonic()
        self.watch.mark(cpu)

    # The end.

    def finish(self) -> None:
        """Kill what is left of the tree and wait for all of it."""
        inside = None
        if self.first_process > 0 and self.box.level != "rlimits":
            with contextlib.suppress(OSError):
                inside = os.pidfd_open(self.first_process)
        if self.end is not None or self.box.level == "rlimits":
            for pid in reversed(clock.sample(self.process.pid).pids):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            if self.end is not None or not self.started:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.box.level == "rlimits":
            clock.kill_marked(self.token)
        if inside is not None:
            # Process 1 of the namespace is gone only after all the others in it.
            wait = select.poll()
            wait.register(inside, select.POLLIN)
            wait.poll(5000)
            os.close(inside)

    def judge(self) -> tuple[Kind, str]:
        code, stderr = self.process.returncode, _tail(self.stderr)
        number = -code if code < 0 else code - 128 if code > 128 else 0
        if self.end is not None:
            return self.end
        if not self.started:
            return "infra", f"the program was never started (exit status {code}): {stderr[-300:].strip()}"
        if self.watch.cpu > self.limits.seconds + TICK or number == signal.SIGXCPU:
            return "timeout", f"more than {self.limits.seconds:g} CPU seconds"
        if os.fstat(self.stdout).st_size > self.limits.output_mb << 20:
            return "output", f"more than {self.limits.output_mb} MiB of output"
        if self.claim is not None:
            return self.claim
        if number == signal.SIGKILL and _oom_kills() > self.oom_kills:
            return "infra", "killed by the machine's out-of-memory killer"
        if code != 0:
            if "MemoryError" in stderr or "Cannot allocate memory" in stderr:
                return "memory", stderr[-300:].strip()
            name = f"signal {number}" if number else f"exit status {code}"
            return "error", f"{name}: {stderr[-300:].strip()}"
        return "ok", ""


def _read(descriptor: int, offset: int, size: int) -> bytes:
    return b"" if size <= 0 else os.pread(descriptor, size, offset)


def _tail(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    return _read(descriptor, max(0, size - STDERR_TAIL), STDERR_TAIL).decode("utf-8", "replace")


def _oom_kills() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
