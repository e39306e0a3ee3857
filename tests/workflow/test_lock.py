"""SIGKILL of snakemake in the middle of a training: the stage ends, the lock goes, the next run resumes.

Real Snakemake, real lifeline, stand-in stages (workflow_box.py).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from workflow_box import Box


def unlock(box: Box) -> subprocess.CompletedProcess[str]:
    script = box.folder / "workflow/scripts/unlock.py"
    return subprocess.run(
        [sys.executable, str(script)], cwd=box.folder, env=box.environment, capture_output=True, text=True, timeout=60
    )


def locks(box: Box) -> list[Path]:
    return list((box.folder / ".snakemake/locks").glob("*.lock"))


def stages(box: Box) -> list[int]:
    """Ids of live stages that work in the box."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                here = os.readlink(entry / "cwd") == str(box.folder)
                if here and b"quads.train" in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.fixture
def running(box: Box) -> Iterator[tuple[Box, subprocess.Popen[bytes]]]:
    """A box with a snakemake in the middle of a training that would take minutes."""
    (box.folder / "slow").touch()
    with open(box.folder / "out.txt", "wb") as out:
        snakemake = subprocess.Popen(
            box.snakemake("smoke", "--cores", "1"), cwd=box.folder, env=box.environment, stdout=out, stderr=out
        )
    deadline = time.monotonic() + 60
    while not list((box.folder / "results").glob("smoke/checkpoints/*/started")):
        assert time.monotonic() < deadline and snakemake.poll() is None, (box.folder / "out.txt").read_text()
        time.sleep(0.1)
    yield box, snakemake
    for pid in [snakemake.pid, *stages(box)] if snakemake.poll() is None else stages(box):
        os.kill(pid, signal.SIGKILL)
    snakemake.wait()


def test_nothing_to_unlock(box: Box) -> None:
    done = unlock(box)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_killed_run_resumes(running: tuple[Box, subprocess.Popen[bytes]]) -> None:
    box, snakemake = running
    live = unlock(box)
    assert live.returncode == 1 and f"process {snakemake.pid}" in live.stderr and locks(box)

    snakemake.kill()
    snakemake.wait()
    assert locks(box), "a SIGKILL leaves the lock; if not, unlock.py has become needless"
    done = unlock(box)
    assert done.returncode == 0 and "Removed the lock" in done.stdout, done.stderr
    assert not stages(box), "unlock.py must wait for the ending stage"
    assert not locks(box)

    (box.folder / "slow").unlink()
    box.run("smoke")
    assert sum(call == "warmup" for call in box.executed()) == 1
    attempts = {p.parent.name.split("-")[0]: len(p.read_text().splitlines()) for p in checkpoints(box)}
    assert sorted(attempts.values()) == [1, 2], "the interrupted arm has two attempts on one checkpoint folder"


def checkpoints(box: Box) -> list[Path]:
    return list((box.folder / "results/smoke/checkpoints").glob("*/attempts.jsonl"))


def test_a_lock_of_another_machine_stays(box: Box) -> None:
    folder = box.folder / ".snakemake/locks"
    folder.mkdir(parents=True)
    (folder / "0.input.lock").touch()
    (box.folder / ".snakemake/quads-host").write_text(socket.gethostname() + "-other")
    done = unlock(box)
    assert done.returncode == 1 and "-other" in done.stderr and "snakemake --unlock" in done.stderr
    assert locks(box)
