"""The multi-node launcher on two virtual nodes of a real Slurm, with real Ray."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from single_machine import SingleMachine

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
COUNT = (
    "import os, ray; ray.init(address=os.environ['QUADS_RAY_ADDRESS'], log_to_driver=False); "
    "print('NODES', sum(n['Alive'] for n in ray.nodes()), 'GPUS', int(ray.cluster_resources()['GPU'])); "
)


def batch(slurm: SingleMachine, folder: Path, *command: str, nodes: int = 2) -> tuple[str, Path]:
    """Submit the launcher around a command; (job id, output file)."""
    out = folder / "out.txt"
    launcher = [sys.executable, "-m", "quads.cluster", "--gpus-per-node", "3", "--cpus-per-node", "4"]
    launcher += ["--object-store", "100000000", "--wait", "90", "--logs", str(folder / "logs"), "--", *command]
    script = folder / "job.sh"
    script.write_text(f"#!/bin/sh\ncd {ROOT}\nexec {shlex.join(launcher)}\n")
    done = slurm.run("sbatch", "--parsable", f"--nodes={nodes}", "--exclusive", f"--output={out}", str(script))
    return done.stdout.strip().partition(";")[0], out


def wait_for(slurm: SingleMachine, job: str, seconds: float = 150) -> str:
    """`ExitCode` of the job (code:signal) once it has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        shown = slurm.run("scontrol", "show", "job", job).stdout
        state = re.search(r"JobState=(\w+)", shown)
        if state and state[1] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            found = re.search(r" ExitCode=(\d+:\d+)", shown)
            assert found, shown
            return found[1]
        time.sleep(0.5)
    raise AssertionError(f"job {job} did not end: {shown}")


def ray_processes() -> set[str]:
    listed = subprocess.run(["ps", "-eo", "pid,stat,args"], capture_output=True, text=True, check=True).stdout
    return {
        line.split()[0]
        for line in listed.splitlines()
        if ("raylet/raylet" in line or "gcs_server" in line) and line.split()[1][0] != "Z"
    }


def test_both_nodes_join_and_the_exit_code_comes_back(slurm: SingleMachine, tmp_path: Path) -> None:
    before = ray_processes()
    job, out = batch(slurm, tmp_path, sys.executable, "-c", COUNT + "raise SystemExit(7)")
    assert wait_for(slurm, job) == "7:0", out.read_text()
    assert "NODES 2 GPUS 6" in out.read_text()
    assert {p.name for p in (tmp_path / "logs").iterdir()} == {"ray-n1.log", "ray-n2.log"}
    assert ray_processes() <= before, "head or worker outlived the job"


def test_a_dead_node_ends_the_command_with_its_name(slurm: SingleMachine, tmp_path: Path) -> None:
    before = ray_processes()
    # The command ends the worker step of node n2 and then waits: the launcher must notice and not wait with it.
    kill = (
        "import os, signal, subprocess, time; "
        "lines = subprocess.run(['ps','-eo','pid,args'],capture_output=True,text=True).stdout.splitlines(); "
        "pids = [int(l.split()[0]) for l in lines if l.split()[1].endswith('srun') and '--nodelist=n2' in l]; "
        "[os.kill(p, signal.SIGKILL) for p in pids]; time.sleep(120)"
    )
    job, out = batch(slurm, tmp_path, sys.executable, "-c", kill)
    assert wait_for(slurm, job) == "1:0", out.read_text()
    assert "ray on n2 ended with exit" in out.read_text()
    assert ray_processes() <= before


def test_a_cancelled_job_leaves_no_ray_behind(slurm: SingleMachine, tmp_path: Path) -> None:
    before = ray_processes()
    flag = tmp_path / "up"
    job, out = batch(slurm, tmp_path, sys.executable, "-c", f"open('{flag}','w'); import time; time.sleep(300)")
    end = time.monotonic() + 90
    while not flag.exists():
        assert time.monotonic() < end, out.read_text()
        time.sleep(0.5)
    slurm.run("scancel", job)
    wait_for(slurm, job)
    end = time.monotonic() + 20
    while ray_processes() - before and time.monotonic() < end:
        time.sleep(0.5)
    assert ray_processes() <= before


def test_outside_an_allocation_the_error_says_so() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    words = ["--gpus-per-node", "1", "--logs", "/tmp/unused", "--", "true"]
    done = subprocess.run(
        [sys.executable, "-m", "quads.cluster", *words], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 1 and "SLURM_JOB_ID is not set" in done.stdout + done.stderr
