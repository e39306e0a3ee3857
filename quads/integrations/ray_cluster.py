"""One Ray cluster inside one Slurm allocation: a head and workers, up for the time of one command.

    hosts = nodes of the allocation        head on hosts[0], one `ray start --block` step per node (srun, in parallel)
    every node has joined  ->  run the command with QUADS_RAY_ADDRESS  ->  end the steps, return its exit code

Contract: the command starts only when all nodes have joined; a node that dies before the command has ended ends the
command, with the node's log in the message; every way out (SIGTERM of a preempted job included) ends head and workers.
TRAPS. Snakemake's job step removes SLURM_* variables except the job id, so the node list is asked for by id. `ray
start` on a busy node takes seconds: joining is polled. Worker ports are left to the system, because two virtual nodes
of a test share one host and Ray's default range would collide.
Differs from `ray start` in a batch script: that cannot tell a slow node from a dead one, and returns its own exit code.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quads.lifeline import descendants, end_processes

log = logging.getLogger("quads.cluster")

ADDRESS = "QUADS_RAY_ADDRESS"
POLL_S = 1.0
TAIL = 2000


class ClusterError(RuntimeError):
    """The cluster did not come up, or lost a node; the message says which and why."""


def allocation(job: str | None = None) -> list[str]:
    """Host names of Slurm job `job` (default: this one's). Raises ClusterError outside an allocation."""
    job = job or os.environ.get("SLURM_JOB_ID")
    if not job:
        raise ClusterError("SLURM_JOB_ID is not set: start this inside a Slurm allocation (salloc, sbatch)")
    nodes = _output("squeue", "-h", "-j", job, "-o", "%N")
    if not nodes:
        raise ClusterError(f"squeue knows no nodes of job {job}; it may have ended")
    return _output("scontrol", "show", "hostnames", nodes).split()


def address_of(host: str) -> str:
    """IP address under which other nodes reach a host: that of its Slurm NodeAddr."""
    words = _output("scontrol", "show", "node", host).split()
    found = [w.partition("=")[2] for w in words if w.startswith("NodeAddr=")]
    name = found[0] if found else host
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ClusterError(f"node {host}: its address {name!r} does not resolve ({error})") from error


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except FileNotFoundError as error:
        raise ClusterError(f"{command[0]} is not on PATH: Slurm's client commands are needed") from error
    except subprocess.CalledProcessError as error:
        raise ClusterError(f"{' '.join(command)}: exit {error.returncode}: {error.stderr.strip()}") from error
    return done.stdout.strip()


@dataclass
class Cluster:
    """Context manager. gpus, cpus: what each node declares to Ray (logical units, also without accelerators)."""

    gpus: int
    cpus: int
    logs: Path
    object_store: int | None = None
    wait_s: float = 300.0
    hosts: list[str] = field(default_factory=allocation)
    steps: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        job = int(os.environ.get("SLURM_JOB_ID", "0"))
        # One cluster per job and host: the port follows from the job.
        self.head = f"{address_of(self.hosts[0])}:{20000 + job % 10000}"
        self.temporary = Path(f"/tmp/quads-ray-job{job}")  # sockets below it: their paths are limited to 107 bytes

    def __enter__(self) -> Cluster:
        self.logs.mkdir(parents=True, exist_ok=True)
        try:
            for index, host in enumerate(self.hosts):
                self._start(host, head=index == 0)
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def _start(self, host: str, head: bool) -> None:
        ip, _, port = self.head.partition(":")
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        ray += [f"--node-ip-address={address_of(host)}", f"--num-gpus={self.gpus}", f"--num-cpus={self.cpus}"]
        ray += ["--min-worker-port=0", "--max-worker-port=0"]
        if self.object_store is not None:
            ray.append(f"--object-store-memory={self.object_store}")
        if head:
            ray += ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self.temporary}"]
        else:
            ray += [f"--address={ip}:{port}"]
        step = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", "--export=ALL", *ray]
        environment = {**os.environ, "RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}
        with (self.logs / f"ray-{host}.log").open("ab") as out:
            self.steps[host] = subprocess.Popen(
                step, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
            )
        log.info("ray %s on %s", "head" if head else "worker", host)
        if head:
            self._wait_for_port()

    def _wait_for_port(self) -> None:
        """A worker that starts before its head is there gives up."""
        ip, _, port = self.head.partition(":")
        end = time.monotonic() + self.wait_s
        while time.monotonic() < end:
            self.check()
            try:
                socket.create_connection((ip, int(port)), timeout=1).close()
                return
            except OSError:
                time.sleep(POLL_S)
        raise ClusterError(
            f"the head did not answer at {self.head} within {self.wait_s:.0f} s{self._tail(self.hosts[0])}"
        )

    def _wait(self) -> None:
        import ray

        end, alive = time.monotonic() + self.wait_s, 0
        ray.init(address=self.head, logging_level=logging.ERROR, log_to_driver=False)
        try:
            while time.monotonic() < end:
                self.check()
                alive = sum(node["Alive"] for node in ray.nodes())
                if alive >= len(self.hosts):
                    log.info(
                        "%d nodes, %s", alive, {k: v for k, v in ray.cluster_resources().items() if k in ("CPU", "GPU")}
                    )
                    return
                time.sleep(POLL_S)
        finally:
            ray.shutdown()
        raise ClusterError(
            f"{alive} of {len(self.hosts)} nodes joined within {self.wait_s:.0f} s; logs: {self.logs}/ray-*.log"
        )

    def check(self) -> None:
        """Raises ClusterError naming the first node whose step has ended."""
        for host, step in self.steps.items():
            if step.poll() is not None:
                raise ClusterError(f"ray on {host} ended with exit {step.returncode}{self._tail(host)}")

    def _tail(self, host: str) -> str:
        path = self.logs / f"ray-{host}.log"
        return f"; the end of {path}:\n{path.read_text(errors='replace')[-TAIL:]}" if path.exists() else ""

    def run(self, command: Sequence[str]) -> int:
        """Exit code of the command (128 + n after signal n). Raises ClusterError when a node dies before it."""
        worker = subprocess.Popen(list(command), env={**os.environ, ADDRESS: self.head})
        try:
            while worker.poll() is None:
                self.check()
                time.sleep(POLL_S)
        finally:
            if worker.poll() is None:
                worker.terminate()  # the training stage ends its own family on SIGTERM
                try:
                    worker.wait(30)
                except subprocess.TimeoutExpired:
                    worker.kill()
                    worker.wait()
        return worker.returncode if worker.returncode >= 0 else 128 - worker.returncode

    def stop(self) -> None:
        """End every step; srun passes the signal on to its node."""
        for step in self.steps.values():
            if step.poll() is None:
                step.send_signal(signal.SIGTERM)
        end = time.monotonic() + 15
        for step in self.steps.values():
            try:
                step.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                step.kill()
                step.wait()
        end_processes(descendants(os.getpid()))
        self.steps.clear()
