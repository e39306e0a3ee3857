"""The jobs of gpu_jobs.py: runs of experiments with what they need, and lists of others.

Contract: paths below ROOT as Snakemake would choose them; everything is checked before anything starts. Standard
library and quads.config only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quads import paths
from quads.config import ConfigError, Experiment, Run, load_arms, load_experiment, resolve_run

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
    """EXPERIMENT[:ARM,...[:SEED,...]] -> its runs, seed by seed. Raises SystemExit naming what it cannot be."""
    if word.count(":") > 2:
        sys.exit(f"{word}: give EXPERIMENT[:ARM,...[:SEED,...]]")
    name, arms, seeds = [*word.split(":"), "", ""][:3]
    try:
        experiment = load_experiment(name)
        known = {arm.name: arm for arm in load_arms(experiment, more=True)}
        numbered = {str(seed): seed for seed in experiment.seeds}
        wanted = arms.split(",") if arms else list(known)
        numbers = seeds.split(",") if seeds else list(numbered)
        if unknown := [a for a in wanted if a not in known] + [s for s in numbers if s not in numbered]:
            sys.exit(f"{name} has no {unknown}; arms {list(known)}, seeds {list(experiment.seeds)}")
        return experiment, [resolve_run(experiment, known[arm], numbered[s]) for s in numbers for arm in wanted]
    except ConfigError as error:
        sys.exit(f"{word}: {error}")


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


def _path(value: object) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable()


# Keys of a job in a file, how their values are checked, and what they have to be.
KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (lambda v: _path(v) and "/" not in v, "a text without /"),
    "command": (lambda v: isinstance(v, list) and v != [] and all(isinstance(w, str) for w in v), "a list of words"),
    "target": (_path, "a path"),
    "needs": (lambda v: isinstance(v, list) and all(map(_path, v)), "a list of paths"),
    "gpus": (lambda v: type(v) is int and v >= 0, "a whole number from 0"),
    "share": (lambda v: type(v) in (int, float) and 0 < v <= 1, "a number above 0, up to 1"),
    "limit": (lambda v: type(v) in (int, float) and v > 0, "a number of seconds above 0"),
}
NEEDED = ("name", "command", "target")


def more_jobs(path: Path | None, root: Path) -> list[Job]:
    """Jobs of a file. Raises SystemExit naming what is wrong with it."""
    if path is None:
        return []
    try:
        listed = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"{path}: no list of jobs: {error}; workflow/scripts/real_size.py writes one")
    if not isinstance(listed, list) or not all(isinstance(said, dict) for said in listed):
        sys.exit(f"{path}: need a JSON list of objects with keys {', '.join(KEYS)}")
    found = []
    for number, said in enumerate(listed, 1):
        which = f"{path}: job {number} ({said.get('name')!r})"
        if unknown := sorted(set(said) - set(KEYS)):
            sys.exit(f"{which} has unknown {unknown}; known: {', '.join(KEYS)}")
        if absent := [key for key in NEEDED if key not in said]:
            sys.exit(f"{which} lacks {', '.join(absent)}; every job has {', '.join(NEEDED)}")
        for key, (check, words) in KEYS.items():
            if key in said and not check(said[key]):
                sys.exit(f"{which}: {key}={said[key]!r} has to be {words}")
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
