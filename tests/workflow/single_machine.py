"""A real Slurm on this machine for tests: munged, slurmctld and virtual nodes with fake GPUs, no systemd, no cgroups.

    with SingleMachine(folder) as slurm:  slurm.environment -> os.environ plus SLURM_CONF and PATH with client shims

The shims set SLURM_CONF again: Snakemake's job step removes every SLURM_* variable from a job's environment, and
then Slurm's clients find no configuration. On a cluster slurm.conf lies in /etc/slurm and nothing is needed.
Needs root (slurmd) and the Debian packages slurm-wlm and munge.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("srun", "sbatch", "squeue", "scontrol", "sinfo", "scancel", "sacct")
CONFIG = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerParameters=bf_interval=5,sched_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
MinJobAge=600
KillWait=5
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
"""


def missing() -> str | None:
    """Why Slurm cannot be started here, or None."""
    if absent := [name for name in DAEMONS if shutil.which(name) is None]:
        return f"{', '.join(absent)} not on PATH (Debian: apt-get install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "slurmd needs root"


class SingleMachine:
    """Context manager; on exit every daemon that it started is ended, and every process of their jobs."""

    def __init__(self, folder: Path, nodes: int = 2, gpus: int = 4, cpus: int = 16, memory_mb: int = 20000) -> None:
        self.folder, self.nodes, self.gpus, self.cpus, self.memory = folder, nodes, gpus, cpus, memory_mb
        self.port = 17000 + 20 * (os.getpid() % 400)
        self.processes: list[subprocess.Popen[bytes]] = []
        binaries = folder / "bin"
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.environment["PATH"] = f"{binaries}:{self.environment['PATH']}"

    def __enter__(self) -> SingleMachine:
        for name in ("state", "log", "munge", "gres", "bin", *(f"spool/n{i}" for i in self._numbers())):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        try:
            self._munge()
            self._configure()
            self._start("slurmctld", "-D", "-c")
            for i in self._numbers():
                self._start("slurmd", "-D", "-N", f"n{i}")
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in reversed(self.processes):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.end_jobs()

    def end_jobs(self) -> None:
        """SIGKILL to what jobs left behind: Slurm's own comes KillWait after a cancellation, from daemons that may have
        ended by then, and Snakemake's handler of SIGTERM can wait for a lock that its own thread holds.
        """
        marker = f"{self.folder}/".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if marker in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except OSError:
                continue  # ended meanwhile

    def run(self, *command: str, check: bool = True, **options: object) -> subprocess.CompletedProcess[str]:
        """A client command, its output as text."""
        return subprocess.run(
            command, env=self.environment, text=True, capture_output=True, check=check, timeout=300, **options
        )

    def _numbers(self) -> range:
        return range(1, self.nodes + 1)

    def _start(self, *command: str) -> None:
        with (self.folder / "log" / f"{command[0]}-{len(self.processes)}.out").open("wb") as out:
            process = subprocess.Popen(command, env=self.environment, stdout=out, stderr=subprocess.STDOUT)
        self.processes.append(process)

    def _munge(self) -> None:
        key = self.folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        # --force: munged refuses sockets below a folder that others may write, such as /tmp
        self._start(
            "munged", "--force", "--foreground", *(f"--{o}={self.folder / 'munge' / f}" for o, f in names.items())
        )
        end = time.monotonic() + 10
        while not (self.folder / "munge" / "socket").exists():
            assert time.monotonic() < end, "munged did not start"
            time.sleep(0.1)

    def _configure(self) -> None:
        host = socket.gethostname().partition(".")[0]
        lines = [CONFIG.format(host=host, port=self.port, folder=self.folder)]
        for i in range(self.gpus):
            # a character device that does nothing (1, 3 is /dev/null): slurmd refuses plain files
            os.mknod(self.folder / "gres" / f"gpu{i}", 0o020666, os.makedev(1, 3))
        gres = f"Name=gpu Type=h200 File={self.folder}/gres/gpu[0-{self.gpus - 1}]\n"
        (self.folder / "gres.conf").write_text(gres)
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        lines += [
            f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={self.port + i} CPUs={self.cpus} "
            f"RealMemory={self.memory} Gres=gpu:h200:{self.gpus} State=UNKNOWN"
            for i in self._numbers()
        ]
        nodes = ",".join(f"n{i}" for i in self._numbers())
        lines += [f"PartitionName={name} Nodes={nodes} MaxTime=INFINITE State=UP" for name in ("cpu", "gpu")]
        lines[-2] += " Default=YES"
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        for name in CLIENTS:
            shim = self.folder / "bin" / name
            shim.write_text(f'#!/bin/sh\nSLURM_CONF={self.folder}/slurm.conf exec {shutil.which(name)} "$@"\n')
            shim.chmod(0o755)

    def _wait(self) -> None:
        end, seen = time.monotonic() + 30, ""
        while time.monotonic() < end:
            seen = self.run("sinfo", "-h", "-N", "-p", "cpu", "-o", "%N %T", check=False).stdout
            if seen.split().count("idle") == self.nodes:
                return
            time.sleep(0.2)
        raise RuntimeError(f"Slurm did not come up within 30 s; nodes: {seen!r}; logs: {self.folder}/log")
