"""The worker pool: limits, retries, recycling, threads, forks, and a clean end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quads.rewards.math.pool import Limits, Pool

ROOT = Path(__file__).resolve().parents[3]


def pool_of(size: int = 1, **limits: float) -> Pool:
    return Pool(size, Limits(**limits))  # type: ignore[arg-type]


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = pool_of(cpu_seconds=1.0, wall_seconds=30.0)
    yield made
    made.close()


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_worker_answers_many_questions(pool: Pool) -> None:
    assert pool.ask("expression", "x+1", "1+x").verdict == "same"
    assert pool.ask("expression", "x+1", "x+2").verdict == "different"
    assert pool.ask("equation", "y=2x+1", "2x-y+1=0").verdict == "same"
    assert pool.ask("expression", "x+", "x").verdict == "unparsed_gold"
    assert pool.ask("expression", "x", "x+").verdict == "unparsed_answer"
    assert pool.started == 1


def test_nothing_starts_before_the_first_question() -> None:
    assert pool_of().started == 0


def test_cpu_time_is_a_timeout_asked_twice() -> None:
    pool = pool_of(cpu_seconds=0.3)
    try:
        start = time.process_time()
        assert pool.ask("burn", "x", "60").verdict == "timeout"
        assert pool.started == 2
        assert time.process_time() - start < 1
        assert pool.ask("expression", "x+1", "1+x").verdict == "same"  # the pool goes on
    finally:
        pool.close()


def test_less_cpu_time_than_the_limit_is_fine(pool: Pool) -> None:
    assert pool.ask("burn", "x", "0.2").verdict == "different"
    assert pool.ask("burn", "x", "0.8").verdict == "different"  # the clock starts anew with each question
    assert pool.ask("burn", "x", "0.8").verdict == "different"
    assert pool.started == 1


def test_memory_is_its_own_verdict() -> None:
    pool = pool_of(memory_bytes=1 << 30)
    try:
        assert pool.ask("fill", "x", str(3 << 30)).verdict == "memory"
        assert pool.ask("fill", "x", str(1 << 20)).verdict == "different"
    finally:
        pool.close()


def test_waiting_without_computing_is_infrastructure() -> None:
    pool = pool_of(cpu_seconds=5.0, wall_seconds=0.5)
    try:
        assert pool.ask("sleep", "x", "30").verdict == "infra_error"
    finally:
        pool.close()


def test_a_killed_worker_is_replaced_and_asked_again(pool: Pool) -> None:
    assert pool.ask("expression", "x", "x+1").verdict == "different"
    worker = pool._idle[0]
    worker.process.send_signal(signal.SIGSEGV)
    worker.process.wait()
    assert pool.ask("expression", "x", "x").verdict == "same"
    assert pool.started == 2


def test_workers_are_recycled_after_a_number_of_questions() -> None:
    pool = pool_of(cases=2)
    try:
        assert [pool.ask("expression", "x", "x").verdict for _ in range(5)] == ["same"] * 5
        assert pool.started == 3
    finally:
        pool.close()


def test_threads_share_the_workers(pool: Pool) -> None:
    questions = [(f"x+{n}", f"{n % 7}+x") for n in range(40)]
    with ThreadPoolExecutor(8) as threads:
        verdicts = list(threads.map(lambda q: pool.ask("expression", *q).verdict, questions))
    assert verdicts == ["same" if n < 7 else "different" for n in range(40)]
    assert pool.started == 1


def test_a_forked_child_starts_its_own_worker(pool: Pool) -> None:
    assert pool.ask("expression", "x", "x").verdict == "same"
    child = os.fork()
    if not child:
        verdict = pool.ask("expression", "x", "x").verdict
        started = pool.started
        pool.close()
        os._exit(0 if (verdict, started) == ("same", 1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.ask("expression", "x", "x").verdict == "same"
    assert pool.started == 1


@pytest.mark.parametrize("ending", ["pass", "os.kill(os.getpid(), 9)"])
def test_no_worker_outlives_its_parent(ending: str) -> None:
    code = (
        "import os\nfrom quads.rewards.math.pool import Pool\npool = Pool(1)\npool.ask('expression', 'x', 'x')\n"
        f"print(pool._idle[0].process.pid, flush=True)\n{ending}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    worker = int(done.stdout)
    deadline = time.monotonic() + 10
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(worker)
