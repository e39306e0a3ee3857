"""A stage and everything below it end when make or snakemake is killed, and only then.

The chain is real: a script called `snakemake` starts a shell, which starts a Python stage, which starts a child of its
own and one that has moved into another session.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quads.lifeline import Process, alive, descendants, end_processes

ROOT = Path(__file__).resolve().parents[2]
STAGE = """
import subprocess, sys, time
from pathlib import Path
from quads.lifeline import watch_parents
here = Path(sys.argv[1])
watched = watch_parents(poll_s=0.1)
child = subprocess.Popen(["sleep", "300"])
# The middle process ends at once, so that its child leaves this process's tree (like a daemon of a real engine).
subprocess.Popen(["bash", "-c", "trap '' TERM; setsid sleep 300 & echo $! > far.pid; sleep 0.5"], cwd=here)
(here / "near.pid").write_text(str(child.pid))
(here / "watched").write_text(str(watched is not None))
(here / "stage.pid").write_text(__import__("os").getpid().__str__())
time.sleep(300)
"""


def process(pid: int) -> Process:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Process(pid, int(fields[19]))


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)


def start(folder: Path, runner: str) -> dict[str, Process]:
    """runner (a script of that name) -> bash -> stage -> children; returns them when all have started.

    Started through a shell that ends, so that no `make` above these tests counts as the stage's runner.
    """
    (folder / "stage.py").write_text(STAGE)
    script = folder / runner
    script.write_text(f"#!/bin/bash\necho $$ > top.pid\nbash -c '{sys.executable} stage.py . ; true'\ntrue\n")
    script.chmod(0o755)
    subprocess.run(["bash", "-c", f"./{runner} &"], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    files = {name: folder / f"{name}.pid" for name in ("top", "near", "far", "stage")}
    wait_for(lambda: all(f.is_file() and f.read_text().strip() for f in files.values()), 20, "the stage starts")
    # Longer than the middle process lives and than the watch needs to see the far one.
    time.sleep(1.0)
    return {name: process(int(file.read_text())) for name, file in files.items()}


@pytest.fixture
def processes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, Process]]:
    found = start(tmp_path, request.param)
    yield found
    for one in found.values():
        if alive(one):
            os.kill(one.pid, signal.SIGKILL)


@pytest.mark.parametrize("processes", ["snakemake", "make"], indirect=True)
def test_all_end_with_the_runner(processes: dict[str, Process]) -> None:
    assert all(alive(p) for p in processes.values())
    os.kill(processes["top"].pid, signal.SIGKILL)
    for name, one in processes.items():
        wait_for(lambda one=one: not alive(one), 8, f"{name} ends")  # type: ignore[misc]


@pytest.mark.parametrize("processes", ["something"], indirect=True)
def test_a_stage_started_by_hand_is_left_alone(processes: dict[str, Process], tmp_path: Path) -> None:
    assert (tmp_path / "watched").read_text() == "False"
    top = processes.pop("top")
    os.kill(top.pid, signal.SIGKILL)
    wait_for(lambda: not alive(top), 5, "the script ends")
    time.sleep(1.0)
    assert all(alive(p) for p in processes.values())


def test_a_parent_killed_before_the_watch_starts_is_missed_by_nobody(tmp_path: Path) -> None:
    """The orphan's parent is another process by then: watching that one would keep the orphan for ever."""
    orphan = (
        "import os, sys, time; from quads.lifeline import watch_parent\n"
        "parent = os.getppid(); open('orphan.pid', 'w').write(str(os.getpid()))\n"
        "while os.getppid() == parent: time.sleep(0.01)\n"
        "watch_parent(0.1, *map(int, sys.argv[1:])); time.sleep(60)"
    )
    file = tmp_path / "orphan.pid"
    for given in (True, False):
        file.unlink(missing_ok=True)
        parent = subprocess.Popen(
            ["bash", "-c", f'{sys.executable} -c "$0" {"$$" if given else ""} & wait', orphan],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        wait_for(lambda: file.is_file() and file.read_text() != "", 20, "the child starts")
        child = process(int(file.read_text()))
        parent.kill()
        parent.wait()
        if given:
            wait_for(lambda child=child: not alive(child), 10, "the orphan ends")  # type: ignore[misc]
        else:
            time.sleep(1.0)
            assert alive(child)  # what the id is for
            os.kill(child.pid, signal.SIGKILL)


def test_a_second_call_on_the_same_parents_starts_no_second_watch() -> None:
    program = (
        "import threading; from quads.lifeline import watch_parent\n"
        "assert watch_parent() is watch_parent() is not watch_parent(parent=1); print(threading.active_count())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.stdout == "3\n", done.stderr


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen(["true"])
    one = process(child.pid)
    wait_for(lambda: not alive(one), 5, "the child ends")
    os.kill(child.pid, 0)  # the id still exists: that is the trap
    child.wait()


def test_a_reused_id_is_another_process() -> None:
    me = process(os.getpid())
    assert alive(me) and not alive(Process(me.pid, me.started + 1))


def test_end_processes_kills_who_ignores_sigterm() -> None:
    child = subprocess.Popen(
        ["bash", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done"], stdout=subprocess.PIPE
    )
    with child.stdout as out:  # type: ignore[union-attr]
        assert out.readline() == b"ready\n"
    end_processes({process(child.pid)} | descendants(child.pid), grace_s=0.3)
    assert child.wait(5) == -signal.SIGKILL
