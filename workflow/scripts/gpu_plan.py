"""The jobs of gpu_jobs.py: runs of experiments with what they need, and lists of others.

Contract: paths below ROOT as Snakemake would choose them; everything is checked before anything starts. Standard
library and quads.config only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from quads import paths
from quads.config import Experiment, Run, load_arms, load_experiment, resolve_run

TRAIN_S = 3600.0  # a training that has not ended by then hangs


@dataclass
class Job:
    """One process. Done when `target` exists; ready when all of `needs` (targets) exist."""

    name: str
    command: list[str]
    target: Path
    needs: tuple[Path, ...] = ()
    limit: float = 600.0
    trains: bool = False
    gpus: int = 1
    share: float = 0.0  # of each of its GPUs; 0: 1 / slots
    devices: tuple[int, ...] = ()  # where it runs
    process: subprocess.Popen | None = field(default=None, repr=False)
    began: float = 0.0
    seconds: float = 0.0
    tries: int = 0
    status: str = "waiting"  # waiting, running, done, failed, left out


def stage(name: str, **options: object) -> list[str]:
    """Command of one stage of the project."""
    return [sys.executable, "-m", f"quads.{name}", *(w for k, v in options.items() for w in (f"--{k}", str(v)))]


def selected(word: str) -> tuple[Experiment, list[Run]]:
    """EXPERIMENT[:ARM,...[:SEED,...]] -> its runs, seed by seed. Raises SystemExit for an arm or seed it lacks."""
    name, arms, seeds = [*word.split(":"), "", ""][:3]
    experiment = load_experiment(name)
    known = {arm.name: arm for arm in load_arms(experiment, more=True)}
    wanted = arms.split(",") if arms else list(known)
    numbers = [int(s) for s in seeds.split(",")] if seeds else list(experiment.seeds)
    if unknown := [a for a in wanted if a not in known] + [s for s in numbers if s not in experiment.seeds]:
        sys.exit(f"{name} has no {unknown}; arms {list(known)}, seeds {list(experiment.seeds)}")
    return experiment, [resolve_run(experiment, known[arm], seed) for seed in numbers for arm in wanted]


def shared_jobs(experiment: Experiment, results: Path) -> list[Job]:
    """Data, benchmarks and start checkpoint."""
    config = f"configs/{experiment.name}.yaml"
    data, model = paths.data_dir(experiment, results), paths.model_dir(experiment, results)
    benchmarks = paths.benchmarks_dir(experiment, results)
    made = data / "manifest.json"
    warm = stage("warmup", experiment=config, data=data, out=model)
    return [
        Job(f"prepare {experiment.name}", stage("prepare", experiment=config, out=data), made),
        Job(
            f"benchmarks {experiment.name}",
            stage("make_benchmarks", experiment=config, out=benchmarks),
            benchmarks / "manifest.json",
        ),
        Job(f"warmup {experiment.name}", warm, model / "manifest.json", (made,)),
    ]


def run_jobs(experiment: Experiment, run: Run, results: Path) -> list[Job]:
    """Training and evaluation of one run."""
    one = {"experiment": f"configs/{experiment.name}.yaml", "arm": run.arm.name, "seed": run.seed}
    data, model = paths.data_dir(experiment, results), paths.model_dir(experiment, results)
    benchmarks, train = paths.benchmarks_dir(experiment, results), paths.train_dir(experiment, run, results)
    evaluated = paths.eval_dir(experiment, run, results)
    label = f"{experiment.name} {run.arm.name} {run.seed}"
    training = stage(
        "train", **one, data=data, model=model, checkpoints=paths.checkpoint_dir(experiment, run, results), out=train
    )
    cache = paths.samples_dir(experiment, run, results)
    testing = stage("evaluate", **one, data=data, benchmarks=benchmarks, train=train, cache=cache, out=evaluated)
    trained = train / "result.json"
    return [
        Job(f"train {label}", training, trained, (model / "manifest.json",), TRAIN_S, trains=True),
        Job(f"evaluate {label}", testing, evaluated / "result.json", (trained, benchmarks / "manifest.json"), 300.0),
    ]


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


# Keys of a job in a file, and what their values have to be.
KEYS = {
    "name": lambda v: isinstance(v, str) and v != "" and "/" not in v,
    "command": lambda v: _texts(v) and v != [],
    "target": lambda v: isinstance(v, str) and v != "",
    "needs": _texts,
    "gpus": lambda v: type(v) is int and v >= 0,
    "share": lambda v: isinstance(v, int | float) and 0 < v <= 1,
    "limit": lambda v: isinstance(v, int | float) and v > 0,
}
NEEDED = ("name", "command", "target")


def more_jobs(path: Path | None, root: Path) -> list[Job]:
    """Jobs of a file. Raises SystemExit naming what is wrong with it."""
    if path is None:
        return []
    try:
        listed = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{path}: no list of jobs: {error}")
    if not isinstance(listed, list) or not all(isinstance(said, dict) for said in listed):
        sys.exit(f"{path}: need a JSON list of objects with keys {', '.join(KEYS)}")
    found = []
    for said in listed:
        if unknown := sorted(set(said) - set(KEYS)):
            sys.exit(f"{path}: job {said.get('name')} has unknown {unknown}; known: {', '.join(KEYS)}")
        if wrong := [key for key, check in KEYS.items() if (key in said or key in NEEDED) and not check(said.get(key))]:
            sys.exit(f"{path}: job {said.get('name')}: {wrong[0]}={said.get(wrong[0])!r} is not what it should be")
        places = {"target": root / said["target"], "needs": tuple(root / need for need in said.get("needs", ()))}
        found.append(Job(**{**said, **places}))
    return found


def plan(words: list[str], parity: bool, root: Path, more: Path | None = None) -> list[Job]:
    """All jobs in order of preference."""
    results = root / "results"
    first: dict[Path, Job] = {}
    jobs: list[Job] = []
    for word in words:
        experiment, runs = selected(word)
        for job in shared_jobs(experiment, results):
            first.setdefault(job.target, job)
        for run in runs:
            jobs += [job for job in run_jobs(experiment, run, results) if job.target not in {j.target for j in jobs}]
    if parity:
        done = root / "log" / "parity.passed"
        command = (
            f"{sys.executable} -m pytest -m gpu tests/parity -q -o log_cli=true -o log_cli_level=INFO && touch {done}"
        )
        first[done] = Job("parity", ["bash", "-c", command], done)
    # Evaluations first: they are short and free a place for good.
    jobs.sort(key=lambda job: job.trains)
    return [*first.values(), *more_jobs(more, root), *jobs]
