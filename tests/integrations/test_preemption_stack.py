"""A real run (verl trains, vLLM generates), preempted again and again, ends as if it had not been.

QUADS_PREEMPTIONS kills (default 2) at random steps and at a random moment within the step; seed QUADS_PREEMPTION_SEED.
By turns as a scheduler ends a job (SIGTERM to every process of it, again a moment later, SIGKILL to what is left after
a grace time) and as the kernel ends a process that needs too much memory (SIGKILL to the stage alone).
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import resume_proof

from quads.files import read_jsonl, read_result
from quads.integrations.verl.checkpoints import is_complete
from quads.integrations.verl.launch import MetricsTail
from quads.lifeline import Process, alive

pytestmark = [pytest.mark.stack, pytest.mark.slow]

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
PREEMPTIONS = int(os.environ.get("QUADS_PREEMPTIONS", "2"))
SEED = int(os.environ.get("QUADS_PREEMPTION_SEED", "0"))
STEPS, SAVE_EVERY = 12, 3
KILL_WAIT_S = 30.0  # Slurm's default KillWait
GONE_S = 15.0  # the driver's look at its launcher, its grace time, and a slow machine
EXPERIMENT = f"""
name: tiny
title: A run that is preempted
arms: [quads]
data: {{train_prompts: 144, eval_prompts: 16, calibration_prompts: 16}}
warmup: {{clean_steps: 60, noisy_steps: 2}}
grpo: {{steps: {STEPS}, save_every: {SAVE_EVERY}}}
evaluation: {{samples_per_problem: 2, bootstrap: 100, benchmarks: {{names: []}}}}
"""
PLACES = ("--data", "data", "--model", "model", "--checkpoints", "checkpoints", "--out", "out")
WORDS = ("--experiment", "configs/tiny.yaml", "--arm", "quads", "--seed", "0", *PLACES)


def processes_of(marker: bytes, roots: set[int]) -> set[Process]:
    """What runs now with `marker` in its environment, or below such a process or one of `roots`.

    Both: a process may have overwritten its environment with its title, or have left the tree.
    """
    found: dict[int, tuple[Process, int]] = {}
    marked = set(roots)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            found[int(entry.name)] = Process(int(entry.name), int(fields[19])), int(fields[1])
            if marker in (entry / "environ").read_bytes():
                marked.add(int(entry.name))
        except OSError:
            continue  # ended meanwhile
    while below := {pid for pid, (_, parent) in found.items() if parent in marked} - marked:
        marked |= below
    return {found[pid][0] for pid in marked if pid in found and alive(found[pid][0])}


def send(processes: set[Process], number: signal.Signals) -> None:
    for process in processes:
        if alive(process):
            os.kill(process.pid, number)


class Job:
    """One attempt of the stage, and every process that it has started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.proof = folder, folder / "proof.jsonl"
        self.marker = f"{resume_proof.FILE}={self.proof}".encode()
        env = {**os.environ, resume_proof.FILE: str(self.proof), "PYTHONPATH": f"{Path(__file__).parent}:{ROOT}"}
        attempt = sum(1 for _ in (folder / "out").glob("verl_metrics.*")) + 1
        self.tail = MetricsTail(folder / f"out/verl_metrics.{attempt}.jsonl")
        self.rows: list[dict[str, Any]] = []
        self.saved_before = len(self.proof_rows())
        with (folder / "said.log").open("ab") as said:
            command = [sys.executable, resume_proof.__file__, *WORDS]
            self.process = subprocess.Popen(command, cwd=folder, env=env, stdout=said, stderr=subprocess.STDOUT)
        self.seen, self.looked = set[Process](), 0.0

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: Any) -> None:
        """A test that failed leaves nothing behind either."""
        send(self.look(), signal.SIGKILL)
        self.process.wait(10)

    def proof_rows(self) -> list[dict[str, Any]]:
        return read_jsonl(self.proof) if self.proof.exists() else []

    def look(self) -> set[Process]:
        """All processes of the job that run now."""
        self.looked = time.monotonic()
        now = processes_of(self.marker, {self.process.pid, *(p.pid for p in self.seen if alive(p))})
        self.seen = {p for p in self.seen | now if alive(p)}
        return self.seen

    def said(self) -> str:
        return (self.folder / "said.log").read_text()[-4000:]

    def wait(self, seconds: float, condition: Callable[[], bool], poll_s: float = 0.1) -> bool:
        """Whether `condition` holds within `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(poll_s)
        return True

    def trained(self) -> list[dict[str, Any]]:
        """Records of the steps that this attempt has logged."""
        self.rows += self.tail.read()
        return [r for r in self.rows if "timing_s/step" in r["data"]]

    def reached(self, step: int) -> bool:
        assert self.process.poll() is None, f"ended before step {step}: {self.said()}"
        if time.monotonic() > self.looked + 1.0:  # a look at all of /proc is not free
            self.look()
        return any(r["step"] >= step for r in self.trained())

    def finished(self) -> int:
        """The newest step this attempt has finished: logged, or saved by it with its metrics not yet logged."""
        self.trained()
        saved = [r["step"] for r in self.proof_rows()[self.saved_before :] if r["event"] == "saved"]
        return max([*(r["step"] for r in self.rows), *saved])

    def end_like_a_scheduler(self) -> None:
        for _ in range(2):
            send(self.look(), signal.SIGTERM)
            time.sleep(0.3)
        self.wait(KILL_WAIT_S, lambda: self.process.poll() is not None and not self.look())
        send(self.look(), signal.SIGKILL)


@dataclass(frozen=True)
class Preemption:
    """One kill: the last finished step, the stage's exit code, seconds until nothing ran, what ran on, the engine."""

    how: str
    finished: int
    code: int
    seconds: float
    left: int
    delta_weight: dict[str, Any]


def preempt(folder: Path, step: int, how: str, chance: random.Random) -> Preemption:
    """Start an attempt and kill it after `step`, at a random moment of the next one."""
    with Job(folder) as job:
        assert job.wait(400, lambda: job.reached(step)), f"no step {step}: {job.said()}"
        time.sleep(chance.random() * job.trained()[-1]["data"]["timing_s/step"])
        assert len(job.look()) > 5, "the job is the stage, its driver, Ray's daemons, and workers"
        start = time.monotonic()
        if how == "scheduler":
            job.end_like_a_scheduler()
        else:
            job.process.kill()
        job.process.wait(10)
        job.wait(GONE_S, lambda: not job.look())
        seconds, left = time.monotonic() - start, len(job.look())
        report = read_result(folder / "out/delta_weight.json", "weight comparison")
        return Preemption(how, job.finished(), job.process.returncode, seconds, left, report)


def first_steps(folder: Path) -> list[int]:
    """The step at which each attempt started: what its first log record, the validation before training, names."""
    files = sorted((folder / "out").glob("verl_metrics.*"), key=lambda f: int(f.name.split(".")[1]))
    return [int(MetricsTail(file).read()[0]["step"]) for file in files]


def stage(folder: Path, *words: str) -> None:
    done = subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def preempted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Preemption]]]:
    """The folder of the finished run, and how it was preempted on the way."""
    folder, chance = tmp_path_factory.mktemp("preempted"), random.Random(SEED)
    shutil.copytree(ROOT / "configs/arms", folder / "configs/arms")
    (folder / "configs/tiny.yaml").write_text(EXPERIMENT)
    stage(folder, "quads.prepare", "--experiment", "configs/tiny.yaml", "--out", "data")
    stage(folder, "quads.warmup", "--experiment", "configs/tiny.yaml", "--data", "data", "--out", "model")
    kills = []
    for i, step in enumerate(sorted(chance.sample(range(1, STEPS), PREEMPTIONS))):
        kills.append(preempt(folder, step, ("scheduler", "memory")[i % 2], chance))
        log.info("%s", kills[-1])
    with Job(folder) as job:
        assert job.process.wait(600) == 0, job.said()
    yield folder, kills
    shutil.rmtree(folder, ignore_errors=True)


def test_a_preemption_loses_at_most_one_save_interval(preempted: tuple[Path, list[Preemption]]) -> None:
    folder, kills = preempted
    started = first_steps(folder)
    log.info("finished %s, resumed from %s", [k.finished for k in kills], started[1:])
    assert started[0] == 0 and len(started) == PREEMPTIONS + 1
    for kill, resumed in zip(kills, started[1:], strict=True):
        assert resumed % SAVE_EVERY == 0 and kill.finished - SAVE_EVERY <= resumed <= kill.finished


def test_nothing_of_a_preempted_job_runs_on(preempted: tuple[Path, list[Preemption]]) -> None:
    for kill in preempted[1]:
        assert kill.left == 0 and kill.seconds < KILL_WAIT_S
        # 128 + SIGTERM: the stage unwound by itself, although it was told twice
        assert kill.code == {"scheduler": 143, "memory": -signal.SIGKILL}[kill.how]


def test_the_run_is_complete(preempted: tuple[Path, list[Preemption]]) -> None:
    folder, kills = preempted
    result = read_result(folder / "out/result.json", "training result")
    history = read_jsonl(folder / "out/history.jsonl")
    assert result["steps"] == result["planned_steps"] == STEPS and result["attempts"] == PREEMPTIONS + 1
    assert [row["step"] for row in history] == list(range(STEPS + 1))
    assert all("reward" in row for row in history[1:]) and {"eval_accuracy"} < set(history[0]) | set(history[-1])
    assert is_complete(folder / f"checkpoints/global_step_{STEPS}")
    assert f"global_step_{STEPS}" in Path(result["checkpoint"]).parts
    # compared by every attempt after it has loaded its checkpoint, and at the end
    for report in (*(kill.delta_weight for kill in kills), result["delta_weight"]):
        assert report["different"] == 0 and report["elements"] > 10_000


def test_the_trainer_resumes_with_the_same_bits(preempted: tuple[Path, list[Preemption]]) -> None:
    folder, _ = preempted
    saved: dict[int, dict[str, Any]] = {}
    loaded = []
    for row in read_jsonl(folder / "proof.jsonl"):
        state = {name: row[name] for name in ("log_probs", "parameters", "optimizer")}
        if row["event"] == "saved":
            saved[row["step"]] = state
        else:
            assert state == saved[row["step"]]
            loaded.append(row["step"])
    assert loaded == [step for step in first_steps(folder) if step] and (loaded or PREEMPTIONS < 2)
    assert sorted(saved) == list(range(SAVE_EVERY, STEPS + 1, SAVE_EVERY))
    for name in ("log_probs", "parameters", "optimizer"):  # a step changes each of them: equality says something
        assert len({state[name] for state in saved.values()}) == len(saved)
