"""The result files behind a report: read, checked, and kept together with where they came from.

    one Source = one arm with one seed: train/result.json, train/history.jsonl, eval/result.json

Contract: every number in a report comes from a Source, and a Source knows its run id, config hash and files. A
missing, damaged or mismatched file stops the report with the file and the command that rebuilds it; no arm is ever
left out silently.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quads import paths
from quads.config import Arm, Experiment, config_hash, resolve_run
from quads.files import ResultFileError, read_jsonl, read_result, rebuild_command

TRAIN_KEYS = ("run_id", "config_hash", "code_hash", "commit", "steps", "checkpoint", "delta_weight")
EVAL_KEYS = ("run_id", "eval_hash", "engines")
ENGINE_KEYS = ("pass_at_1", "ci_low", "ci_high", "problems", "samples_per_problem", "per_problem", "mode")
BENCHMARK_KEYS = ("pass_at_1", "per_problem", "graded_per_problem", "pass_at_k", "statuses", "failures")
STEP_KEYS = ("reward", "gap_mean", "gap_max", "k3", "ess", "clipped_share", "seconds")


@dataclass(frozen=True)
class Source:
    """One run's files, parsed. `steps` are the training steps 1..N; `start` is step 0: an accuracy only."""

    arm: Arm
    seed: int
    run_id: str
    config_hash: str
    train: dict[str, Any]
    start: dict[str, Any]
    steps: tuple[dict[str, Any], ...]
    eval: dict[str, Any]
    files: tuple[Path, ...]
    parts: tuple[dict[str, Any], ...] = ()  # decomposition during training, a row per measured step

    def curve(self, key: str) -> NDArray[np.float64]:
        """Values of `key` per training step, float64 [steps]; NaN where a step recorded null (not finite)."""
        return np.array([np.nan if s.get(key) is None else float(s[key]) for s in self.steps], dtype=np.float64)

    def per_problem(self, engine: str) -> NDArray[np.float64]:
        """Mean score per problem through `engine`, float64 [P]."""
        return np.array(self.eval["engines"][engine]["per_problem"], dtype=np.float64)


def load_source(results: Path, experiment: Experiment, arm: Arm, seed: int) -> Source:
    """Read and check one run. Raises ResultFileError naming the file and how to rebuild it."""
    run = resolve_run(experiment, arm, seed)
    folder = paths.train_dir(experiment, run, results)
    result_path, history_path = folder / "result.json", folder / "history.jsonl"
    eval_path = paths.eval_dir(experiment, run, results) / "result.json"
    train = read_result(result_path, "training result", TRAIN_KEYS)
    history = read_jsonl(history_path, ("step",), kind="training history", target=result_path)
    evaluation = read_result(eval_path, "evaluation result", EVAL_KEYS)
    for path, found in ((result_path, train["run_id"]), (eval_path, evaluation["run_id"])):
        if found != run.id:
            raise _broken(path, f"is of run {found!r}, expected {run.id!r}")
    check_evaluation(evaluation, experiment, result_path, eval_path)
    _check_history(history, int(train["steps"]), history_path, result_path)
    _check_engines(evaluation, experiment, eval_path)
    extra, parts = _parts(train, result_path)
    return Source(
        arm=arm,
        seed=seed,
        run_id=run.id,
        config_hash=config_hash(run),
        train=train,
        start=history[0],
        steps=tuple(history[1:]),
        eval=evaluation,
        files=(result_path, history_path, eval_path, *extra),
        parts=parts,
    )


def _parts(train: dict[str, Any], target: Path) -> tuple[tuple[Path, ...], tuple[dict[str, Any], ...]]:
    """File and rows of the decomposition that the training result names; nothing where it names none."""
    if train.get("decomposition") is None:
        return (), ()
    path = target.with_name(train["decomposition"])
    return (path,), tuple(read_jsonl(path, ("step", "total_mean_abs"), kind="decomposition", target=target))


def load_sources(results: Path, experiment: Experiment, arms: Sequence[Arm]) -> list[Source]:
    """All runs of the experiment's seeds, arm by arm in the given order."""
    return [load_source(results, experiment, arm, seed) for arm in arms for seed in experiment.seeds]


def check_evaluation(evaluation: Mapping[str, Any], experiment: Experiment, trained: Path, path: Path) -> None:
    """Refuse, by name, an evaluation with other settings or of another training result than the file `trained`.

    Evaluations written before `train_result_sha256` was recorded are not compared with the training result.
    """
    expected = paths.eval_hash(experiment)
    if evaluation["eval_hash"] != expected:
        raise _broken(
            path, f"was evaluated with settings {evaluation['eval_hash']!r}, this experiment's are {expected!r}"
        )
    found = evaluation.get("train_result_sha256")
    if found is not None and found != (here := hashlib.sha256(trained.read_bytes()).hexdigest()):
        raise _broken(path, f"evaluated the training result {found[:12]}, {trained} is {here[:12]}")


def _check_history(history: list[dict[str, Any]], steps: int, path: Path, target: Path) -> None:
    """Steps 0..N once each and in order; accuracy at the start, all recorded keys at every step."""
    found = [row["step"] for row in history]
    if found != list(range(steps + 1)):
        raise _broken(path, f"holds steps {_short(found)}, expected 0 to {steps} once each and in order", target)
    if history[0].get("eval_accuracy") is None:
        raise _broken(path, "step 0 has no eval_accuracy", target)
    for row in history[1:]:
        absent = [k for k in STEP_KEYS if k not in row]
        if absent:
            raise _broken(path, f"step {row['step']} lacks {', '.join(absent)}", target)


def _check_engines(evaluation: dict[str, Any], experiment: Experiment, path: Path) -> None:
    for name in experiment.evaluation.engines:
        entry = evaluation["engines"].get(name)
        if not isinstance(entry, dict) or any(k not in entry for k in ENGINE_KEYS):
            raise _broken(path, f"engine {name!r} is missing or incomplete")
        if len(entry["per_problem"]) != entry["problems"]:
            raise _broken(path, f"engine {name!r}: {len(entry['per_problem'])} of {entry['problems']} problems")
        for benchmark in experiment.evaluation.benchmarks.names:
            found = entry.get("benchmarks", {}).get(benchmark)
            if not isinstance(found, dict) or any(k not in found for k in BENCHMARK_KEYS):
                raise _broken(path, f"engine {name!r}, benchmark {benchmark!r} is missing or incomplete")


def _broken(path: Path, problem: str, target: Path | None = None) -> ResultFileError:
    return ResultFileError(f"{path}: {problem}. Rebuild it with: {rebuild_command(target or path)}")


def _short(values: list[Any]) -> str:
    return str(values) if len(values) <= 8 else f"{values[:3]} ... {values[-2:]} ({len(values)} rows)"
