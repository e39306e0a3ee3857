"""`snakemake --profile slurm` on a real Slurm: rules, profile and plugin are real, the stages are stand-ins.

A job that fails once and one that is cancelled in the middle are submitted again (`retries` of the profile) and go on
from what their first attempt left; an experiment on two nodes trains on a real Ray cluster.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from single_machine import SingleMachine
from workflow_box import Box, make_box

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
# squeue: the test Slurm keeps no accounts, and the plugin would ask sacct because the command exists.
QUICK = (
    *("--profile", "slurm", "--latency-wait", "5"),
    *("--slurm-init-seconds-before-status-checks", "1", "--slurm-status-command", "squeue"),
)


@pytest.fixture
def box(tmp_path: Path, slurm: SingleMachine) -> Box:
    """A box whose jobs go to the test Slurm."""
    made = make_box(tmp_path / "box")
    (made.folder / "profiles/slurm/site.yaml").write_text("cpu_partition: cpu\ngpu_partition: gpu\n")
    made.environment |= {key: slurm.environment[key] for key in ("SLURM_CONF", "PATH")}
    made.edit("smoke.yaml", runtime={"memory_gib": 1.0})
    return made


def attempts(box: Box, arm: str) -> int:
    found = list(box.folder.glob(f"results/smoke/checkpoints/{arm}-*/attempts.jsonl"))
    return sum(len(path.read_text().splitlines()) for path in found)


def running(slurm: SingleMachine, word: str) -> list[str]:
    """Ids of running jobs whose comment or name holds `word` (the plugin writes rule and wildcards there)."""
    lines = slurm.run("squeue", "-h", "-t", "RUNNING", "-o", "%i|%k|%j").stdout.splitlines()
    return [line.partition("|")[0] for line in lines if word in line]


def wait_until(condition, seconds: float, process: subprocess.Popen) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < end, "the workflow ended or hung"
        time.sleep(0.3)


def test_a_job_that_does_not_end_is_ended_with_the_machine(tmp_path: Path) -> None:
    machine = SingleMachine(tmp_path)
    job = subprocess.Popen(["bash", "-c", "trap '' TERM; sleep 60"], env=machine.environment)
    other = subprocess.Popen(["sleep", "60"])
    try:
        machine.end_jobs()
        assert job.wait(10) == -signal.SIGKILL and other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_failed_and_cancelled_jobs_are_submitted_again(box: Box, slurm: SingleMachine) -> None:
    box.run("--until", "warmup", "make_benchmarks", "--", "smoke")  # locally: one wave of polling less
    (box.folder / "fail-once-bf16").touch()
    (box.folder / "slow-quads").touch()
    log = box.folder / "snakemake.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            box.snakemake(*QUICK, "smoke"),
            cwd=box.folder,
            env=box.environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until(lambda: list(box.folder.glob("results/smoke/checkpoints/quads-*/started")), 240, process)
        (box.folder / "slow-quads").unlink()
        jobs = running(slurm, "quads-seed0")
        if not jobs:  # older Slurm shows no wildcards: then the only running training job is it
            jobs = running(slurm, "train")
        assert len(jobs) == 1, slurm.run("squeue", "-o", "%i %T %k %j").stdout
        slurm.run("scancel", jobs[0])
        assert process.wait(420) == 0, log.read_text()[-4000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert attempts(box, "bf16") == 2, "failed once, then submitted again"
    assert attempts(box, "quads") == 2, "cancelled once, then submitted again"
    assert (box.folder / "results/smoke/report/report.json").is_file()
    assert sum(call.startswith("evaluate") for call in box.executed()) == 2
    assert box.count("smoke") in ({}, {"smoke": 1}), "a second call has nothing left to do"


def test_an_experiment_on_two_nodes_gets_a_ray_cluster(box: Box, slurm: SingleMachine) -> None:
    smoke = yaml.safe_load((box.folder / "configs/smoke.yaml").read_text())
    runtime = {"memory_gib": 1.0, "nodes": 2, "agent_loop": "verl"}
    box.edit("smoke.yaml", runtime=runtime, arms=[smoke["arms"][0]])
    box.run("--until", "warmup", "--", "smoke")
    target = next(name for rule, name in box.plan("--profile", "slurm", "smoke") if rule == "train_nodes")
    box.run(*QUICK, target)
    assert (box.folder / "nodes").read_text() == "2"
    assert len(list(box.folder.glob("results/smoke/train/*/ray/ray-n*.log"))) == 2


def test_the_site_file_decides_partition_and_account(box: Box) -> None:
    site = box.folder / "profiles/slurm/site.yaml"
    site.write_text("account: my_project\ncpu_partition: cpu\ngpu_partition: gpu\ngpu_model: h200\n")
    planned = box.run("-n", "--profile", "slurm", "smoke").stdout
    assert "slurm_partition=cpu" in planned and "slurm_account=my_project" in planned
    box.edit("smoke.yaml", runtime={"device": "cuda", "nodes": 2, "gpus_per_node": 4, "agent_loop": "verl"})
    planned = box.run("-n", "--profile", "slurm", "smoke").stdout
    assert "slurm_partition=gpu" in planned and "gres=gpu:h200:4" in planned and "nodes=2" in planned
    site.write_text("partition: cpu\n")
    failed = box.run("-n", "--profile", "slurm", "smoke", check=False)
    assert failed.returncode and "account, cpu_partition, gpu_model, gpu_partition" in failed.stdout + failed.stderr
