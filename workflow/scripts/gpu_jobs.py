"""Many training runs side by side on a few GPUs, without Snakemake: jobs, a scheduler that outlives a call, results.

    gpu_jobs.py ROOT start EXPERIMENT[:ARM,...[:SEED,...]]... [--jobs FILE.json] [--parity] [--slots N] [--gpus N]
                                                              [--seconds S]
    gpu_jobs.py ROOT wait --seconds S --out DIR      follow it, then pack what is finished
    gpu_jobs.py ROOT stop                            end the scheduler and all its jobs

`start` leaves a scheduler in a session of its own and returns; it runs, in the order given, data and start checkpoint
of each experiment, then per run training and evaluation. A job whose result exists is skipped, so `start` after a kill
or on other words goes on where it was; training itself resumes from its checkpoints. A failed job is tried once more;
when trainings fail four times before any has succeeded, the cause is not the run's own, and the scheduler stops.
`--seconds`: no training of an EXPERIMENT starts after that time. `--jobs`: a list of further jobs, {"name", "command",
"target", and optionally "needs", "gpus", "share", "limit"}, paths relative to ROOT (workflow/scripts/real_size.py
writes such lists). With several `--gpus` every job sees its own alone; `share` is what it takes of each (a run:
1/slots, so that they spread; 1: nobody beside it).

ROOT/results holds what `snakemake` would put under results/, ROOT/log one log per job, state.json and machine.csv
(seconds, GPU percent, GPU MiB, host MiB in use, load). `wait` writes DIR/results.tar.gz (settings, histories, receipts,
evaluation tables, ends of logs) and DIR/records.tar.xz (evaluation samples).
Differs from Snakemake in that it needs nothing but the standard library and quads.config, survives the end of the
command that started it, and keeps going when one arm fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from gpu_plan import Job, plan
from gpu_results import pack, progress, table

POLL_S = 1.0
SPACING_S = 2.0  # between two starts: Ray sessions that start at once race for ports
TRIES = 2
HOPELESS = 4
PLENTY_MIB, PER_RUN_MIB = 100_000, 12_000


class Scheduler:
    """Runs the jobs, at most `slots` at a time; writes log/state.json at every change."""

    def __init__(self, root: Path, jobs: list[Job], slots: int, seconds: float, gpus: int = 1) -> None:
        self.root, self.jobs, self.slots, self.seconds, self.gpus = root, jobs, slots, seconds, gpus
        self.start = self.last = time.time()
        self.hopeless = False
        for job in jobs:
            job.status = "done" if job.target.exists() else "waiting"

    def run(self) -> None:
        """Until every job has ended or nothing can start any more."""
        self.note("scheduler started, pid", os.getpid())
        sampled = 0.0
        while True:
            for job in self.jobs:
                if job.process is not None:
                    self.watch(job)
            self.launch()
            running = [job for job in self.jobs if job.process is not None]
            if time.time() - sampled > 5:
                self.sample(len(running))
                sampled = time.time()
            if not running and not self.startable():
                break
            time.sleep(POLL_S)
        for job in self.jobs:
            job.status = "left out" if job.status == "waiting" else job.status
        names = [job.name for job in self.jobs if job.status == "left out"]
        self.note("scheduler ended", *(["left out:", ", ".join(names)] if names else []))

    def startable(self) -> list[Job]:
        if self.hopeless:
            return []
        late = time.time() - self.start > self.seconds
        waiting = [job for job in self.jobs if job.status == "waiting" and not (late and job.trains)]
        # A job that asks for more GPUs than there are would wait for ever.
        placeable = [job for job in waiting if job.gpus <= self.gpus]
        return [job for job in placeable if all(need.exists() for need in job.needs)]

    def launch(self) -> None:
        """Start at most one job, with some time to the one before it."""
        running = sum(job.process is not None for job in self.jobs)
        if running >= self.slots or time.time() - self.last < SPACING_S:
            return
        # In order; one that finds no room on the GPUs lets smaller ones pass, so a large one waits for a quiet moment.
        placed = ((job, self.place(job)) for job in self.startable() if not job.trains or room())
        job, devices = next(((job, at) for job, at in placed if at is not None), (None, ()))
        if job is None:
            return
        if job.target.exists():  # made by another job since the start
            job.status = "done"
            return
        job.devices = devices
        job.tries += 1
        self.last = job.began = time.time()
        job.status = "running"
        try:
            with self.log(job).open("ab") as log:
                job.process = subprocess.Popen(
                    job.command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                    env=None if self.gpus == 1 else os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))},
                )  # fmt: skip
        except (OSError, ValueError) as error:  # no such program, no such word: the job's fault, not the scheduler's
            job.status = "failed"
            self.note(f"FAILED {job.name}: {error}")
            return
        where = f", GPU {','.join(map(str, devices))}" if self.gpus > 1 else ""
        self.note(f"start {job.name} (try {job.tries}, {running + 1} at once{where})")

    def place(self, job: Job) -> tuple[int, ...] | None:
        """The least used GPUs that have room for the job, or None."""
        if job.gpus > self.gpus:
            return None
        used = dict.fromkeys(range(self.gpus), 0.0)
        for other in self.jobs:
            for device in other.devices if other.process is not None else ():
                used[device] += other.share or 1 / self.slots
        chosen = sorted(used, key=lambda device: used[device])[: job.gpus]
        fits = all(used[device] + (job.share or 1 / self.slots) < 1.001 for device in chosen)
        return tuple(sorted(chosen)) if fits else None

    def watch(self, job: Job) -> None:
        """Notice its end; end it when it is over its limit."""
        assert job.process is not None
        job.seconds = time.time() - job.began
        code = job.process.poll()
        if code is None and job.seconds > job.limit:
            end(job.process)
            code = job.process.poll()
        if code is None:
            return
        job.process = None
        job.status = "done" if job.target.exists() else ("waiting" if job.tries < TRIES else "failed")
        self.note(f"{'done' if job.status == 'done' else f'FAILED ({code})'} {job.name} {job.seconds:.0f} s")
        if job.status == "done":
            return
        tail = self.log(job).read_text(errors="replace").splitlines()[-12:]
        self.note("\n".join(f"    | {line[:300]}" for line in tail))
        failures = sum(j.tries - (j.status == "done") for j in self.jobs if j.trains and j.process is None)
        if failures >= HOPELESS and not any(j.trains and j.status == "done" for j in self.jobs):
            self.hopeless = True
            self.note(f"{failures} failures and no success: stopping everything")
            for other in self.jobs:
                if other.process is not None:
                    end(other.process)

    def log(self, job: Job) -> Path:
        return self.root / "log" / f"{job.name.replace(' ', '_')}.log"

    def note(self, *words: object) -> None:
        """One line to the scheduler's log, and the state."""
        print(f"{time.strftime('%H:%M:%S')} {time.time() - self.start:5.0f} s", *words, flush=True)
        rows = [{k: getattr(j, k) for k in ("name", "status", "tries", "seconds")} for j in self.jobs]
        part = self.root / "log" / "state.json.part"
        part.write_text(json.dumps({"start": self.start, "jobs": rows}, indent=1))
        os.replace(part, self.root / "log" / "state.json")

    def sample(self, running: int) -> None:
        """One line of machine.csv."""
        query = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
        try:
            gpu = (
                subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.split("\n")[0].replace(" ", "")
            )
        except (OSError, subprocess.TimeoutExpired):
            gpu = ","
        total, free = memory_mib()
        with (self.root / "log" / "machine.csv").open("a") as file:
            file.write(f"{time.time() - self.start:.0f},{running},{gpu},{total - free},{os.getloadavg()[0]:.1f}\n")


def memory_mib() -> tuple[int, int]:
    """Total and available memory of the machine."""
    found = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(found[key].split()[0]) // 1024 for key in ("MemTotal", "MemAvailable"))
    return total, free


def room() -> bool:
    """Whether one more training run fits. A virtual machine may show its memory only as it is used: then, yes."""
    total, free = memory_mib()
    return total < PLENTY_MIB or free > PER_RUN_MIB


def end(process: subprocess.Popen) -> None:
    """SIGTERM, which a stage passes on to all it started, then SIGKILL."""
    for number, patience in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(patience)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def alive(root: Path) -> int | None:
    """Pid of the scheduler of this ROOT, if it runs."""
    try:
        pid = int((root / "log" / "scheduler.pid").read_text())
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):  # never started, ended, or a file that is no scheduler's
        return None
    return pid if b"gpu_jobs" in words else None


def check_started(root: Path) -> None:
    """SystemExit where no scheduler was ever started."""
    if not (root / "log" / "scheduler.pid").exists():
        sys.exit(f"{root}: no scheduler was started here; give the ROOT of a `start`, or start one first")


def start(root: Path, args: argparse.Namespace) -> None:
    """Check the words, then leave a scheduler behind."""
    if alive(root):
        sys.exit("a scheduler is running already: wait for it, or stop it")
    jobs = plan(args.runs, args.parity, root, args.jobs)
    if not jobs:
        sys.exit("nothing to do: name an EXPERIMENT, or give --parity or --jobs FILE.json with a job in it")
    (root / "log").mkdir(parents=True, exist_ok=True)
    words = [
        *args.runs,
        *(["--parity"] if args.parity else []),
        "--slots",
        str(args.slots),
        "--seconds",
        str(args.seconds),
        "--gpus",
        str(args.gpus),
        *(["--jobs", str(args.jobs.resolve())] if args.jobs else []),
    ]
    with (root / "log" / "scheduler.log").open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, __file__, str(root), "schedule", *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    (root / "log" / "scheduler.pid").write_text(str(child.pid))
    print(f"{len(jobs)} jobs, {sum(job.target.exists() for job in jobs)} of them done already, {args.slots} at a time")


def wait(root: Path, seconds: float, out: Path) -> int:
    """Print the scheduler's lines until it ends or the time is over; pack; 0 when every job is done, 3 when not."""
    check_started(root)
    out.mkdir(parents=True, exist_ok=True)  # a wrong --out is refused now, not after the wait
    begin, shown = time.time(), 0
    log = root / "log" / "scheduler.log"
    beat = begin
    while True:
        running = alive(root)
        text = log.read_bytes()[shown:] if log.exists() else b""
        if text:
            shown += len(text)
            print(text.decode(errors="replace"), end="", flush=True)
        if running is None or time.time() - begin > seconds:
            break
        if time.time() - beat > 30:
            beat = time.time()
            print(progress(root), flush=True)
        time.sleep(POLL_S)
    print(progress(root))
    pack(root, out)
    print(table(root))
    jobs = states(root)
    if jobs is None:
        print(f"no list of jobs in {root}/log/state.json {'yet' if running else f'; see {log}: it did not get so far'}")
        return 3 if running else 1
    waits = [job["name"] for job in jobs if job["status"] != "done"]
    print(f"{len(jobs) - len(waits)} of {len(jobs)} jobs done, scheduler {'runs on' if running else 'has ended'}")
    return 0 if not waits else 3


def states(root: Path) -> list[dict] | None:
    """What the scheduler says of its jobs, None where it has not (it writes the file whole, after its start)."""
    try:
        jobs = json.loads((root / "log" / "state.json").read_text())["jobs"]
        return [{key: job[key] for key in ("name", "status")} for job in jobs]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:  # nan as well: nothing is later than it
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def main() -> int:
    """Parse and do; a file or folder that cannot be used is one line."""
    args = _parser().parse_args()
    root: Path = args.root.resolve()
    try:
        return act(root, args)
    except OSError as error:
        if args.do == "schedule":  # its log is where one looks for the place
            raise
        sys.exit(f"gpu_jobs.py {args.do}: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    commands = parser.add_subparsers(dest="do", required=True)
    for name in ("start", "schedule"):
        sub = commands.add_parser(name)
        sub.add_argument("runs", nargs="*", help="EXPERIMENT[:ARM,...[:SEED,...]]")
        sub.add_argument("--parity", action="store_true", help="the GPU parity tests beside the runs")
        sub.add_argument("--slots", type=_positive, default=12)
        sub.add_argument("--seconds", type=_seconds, default=3600.0)
        sub.add_argument("--gpus", type=_positive, default=1)
        sub.add_argument("--jobs", type=Path)
    sub = commands.add_parser("wait")
    sub.add_argument("--seconds", type=_seconds, required=True)
    sub.add_argument("--out", type=Path, required=True)
    commands.add_parser("stop")
    return parser


def act(root: Path, args: argparse.Namespace) -> int:
    """One of the words; the exit code."""
    if args.do == "start":
        start(root, args)
    elif args.do == "schedule":
        Scheduler(root, plan(args.runs, args.parity, root, args.jobs), args.slots, args.seconds, args.gpus).run()
    elif args.do == "wait":
        return wait(root, args.seconds, args.out)
    elif pid := alive(root):
        stop(pid)
    else:
        check_started(root)
        print("the scheduler has ended already")
    return 0


def stop(pid: int) -> None:
    """End the scheduler first, so that it starts nothing new, then its jobs."""
    jobs = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and parent(int(p.name)) == pid]
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has just ended; its jobs may not have
    for number in (signal.SIGTERM, signal.SIGKILL):
        for job in jobs:
            try:
                os.killpg(job, number)
            except ProcessLookupError:
                continue
        time.sleep(5)


def parent(pid: int) -> int | None:
    """Parent of a process, None when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
