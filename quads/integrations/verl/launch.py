"""Start the driver of one training run, follow its log, and turn it into history rows and progress lines.

Contract: `run_driver` returns when the driver has ended; it raises TrainingError with the last lines of the log
if the driver failed. Everything the driver and its Ray actors print goes to train.log, appended to per attempt.
The driver and all that it started die with this process: every way out of `run_driver` ends them, SIGTERM included, and
for a SIGKILL of this process the driver itself watches its parent (quads.lifeline). The driver shares the lock of the
checkpoint folder and ends last: until then no other attempt can start.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quads.config import Run
from quads.integrations.verl.history import history_row
from quads.integrations.verl.overrides import RunPaths, verl_overrides
from quads.integrations.verl.session import environment
from quads.lifeline import Process, alive, descendants, end_processes

log = logging.getLogger(__name__)

POLL_S = 0.5
TAIL_LINES = 40


class TrainingError(RuntimeError):
    """The driver ended with an error; the message holds its exit status and the end of its log."""


class MetricsTail:
    """New complete lines of a JSONL file that another process appends to."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, 0

    def read(self) -> list[dict[str, Any]]:
        """Records appended since the last call; an unfinished last line waits for the next one."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            chunk = file.read()
        whole = chunk.rfind(b"\n") + 1
        self.offset += whole
        return [json.loads(line) for line in chunk[:whole].splitlines() if line.strip()]


# What is written on the way to the first step, in this order: imports and loading take minutes at real size.
MILESTONES = {
    "surgery.json": "the trainer's model is loaded and its layers are swapped",
    "receipt.json": "the rollout engine has loaded its weights",
    "delta_weight.json": "the engine's weights are compared with the trainer's",
}


class Milestones:
    """One line for every file of MILESTONES that an attempt writes (an earlier attempt's do not count)."""

    def __init__(self, out: Path) -> None:
        self.out, self.begun, self.waiting = out, time.time(), list(MILESTONES)

    def read(self) -> list[str]:
        """What has been reached since the last call, with the seconds since the start."""
        reached = []
        for name in list(self.waiting):
            path = self.out / name
            # File systems keep times more coarsely than the clock does.
            if path.exists() and path.stat().st_mtime >= self.begun - 0.05:
                self.waiting.remove(name)
                reached.append(f"{MILESTONES[name]}, {time.time() - self.begun:.0f} s after the start")
        return reached


def _tail(path: Path, lines: int) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


def _terminate(signum: int, frame: Any) -> None:
    """SIGTERM (a scheduler's way to end a job) unwinds like an exception, so that nothing is left running."""
    # Schedulers send it again (Slurm: when the grace time of a preemption ends); that must not stop the unwinding.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + signum)


def run_driver(
    run: Run,
    paths: RunPaths,
    on_row: Callable[[dict[str, float]], None],
    lock: int,
    more_overrides: Sequence[str] = (),
) -> None:
    """Train `run`; `on_row` gets every history row as soon as verl has logged its step.

    `lock` is the descriptor of the checkpoint folder's lock (quads.files.held), which the driver holds too.
    `more_overrides` are verl's own words after the run's, for benchmarks: what they change is in no hash.
    """
    paths.out.mkdir(parents=True, exist_ok=True)
    attempt = sum(1 for _ in paths.out.glob("verl_metrics.*")) + 1
    metrics = paths.out / f"verl_metrics.{attempt}.jsonl"
    metrics.touch()
    launch, shared = paths.out / "launch.json", environment(run, paths.ray, metrics)
    said = {"overrides": [*verl_overrides(run, paths), *more_overrides], "environment": shared, "launcher": os.getpid()}
    launch.write_text(json.dumps(said, indent=1))
    log_path = paths.out / "train.log"
    with log_path.open("ab") as log_file:
        log_file.write(f"\n===== attempt {attempt}, {time.strftime('%Y-%m-%dT%H:%M:%S%z')} =====\n".encode())
        log_file.flush()
        driver = subprocess.Popen(
            [sys.executable, "-m", "quads.integrations.verl.main", str(launch)],
            stdout=log_file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **shared},
            start_new_session=True,
            pass_fds=(lock,),
        )
    log.info("%s: starting trainer and engine; their words are in %s", run.id, log_path)
    tail, milestones, family = MetricsTail(metrics), Milestones(paths.out), set[Process]()
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        while True:
            ended = driver.poll() is not None
            # A Ray process whose parent has ended leaves the tree: remember everyone ever seen.
            family = {p for p in family | descendants(os.getpid()) if alive(p)}
            for said_so in milestones.read():
                log.info("%s: %s", run.id, said_so)
            for record in tail.read():
                on_row(history_row(record))
            if ended:
                break
            time.sleep(POLL_S)
    finally:
        end_processes(family | descendants(os.getpid()))
        driver.wait()
        signal.signal(signal.SIGTERM, before)
    if driver.returncode != 0:
        raise TrainingError(
            f"training of {run.id} failed with exit status {driver.returncode}; the end of {log_path}:\n"
            + _tail(log_path, TAIL_LINES)
        )


class RaySession:
    """A private, short directory for one Ray session (its sockets' paths are limited to 107 bytes)."""

    PREFIX = "quads-ray-"

    def __enter__(self) -> Path:
        for left in Path("/tmp").glob(f"{self.PREFIX}*-*"):  # of launchers that were killed
            owner = left.name.removeprefix(self.PREFIX).partition("-")[0]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                shutil.rmtree(left, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=f"{self.PREFIX}{os.getpid()}-", dir="/tmp"))
        return self.path

    def __exit__(self, *_: Any) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
