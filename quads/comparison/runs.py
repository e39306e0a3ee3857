"""Runs by name: find them under results/, read result.json, history.jsonl, evaluations and MLflow markers.

    RUN = run id | unique beginning of one | <experiment>/<either> | path of a train folder

Contract: a name that fits no run, or several, is an error that lists what there is. A run without an evaluation is a
run: the comparison then says which command makes one. Raises ConfigError (names) and ResultFileError (files).
Differs from quads.paper.sources, which reads all runs of one experiment and needs every one complete: here experiments
may differ, files may have moved, and old results are read as they are, without today's configuration.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quads.config import ConfigError
from quads.files import ResultFileError, read_jsonl, read_result, rebuild_command

# runs by position: run ids are too long for headers, and two folders may hold one id
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
TRAIN_KEYS = ("run", "run_id", "commit", "code_hash", "steps", "delta_weight")


@dataclass(frozen=True)
class ComparedRun:
    """One run. `steps`: history rows 1..N; `evaluations` by evaluation hash; `marker`: where MLflow has it, or None.

    letter: set where another run of the comparison has the same experiment and id, else empty.
    """

    name: str
    experiment: str
    folder: Path
    result: dict[str, Any]
    steps: tuple[dict[str, Any], ...]
    evaluations: dict[str, dict[str, Any]]
    marker: dict[str, Any] | None
    letter: str = ""

    def curve(self, key: str) -> NDArray[np.float64]:
        """Values of `key` per step, float64 [steps]; NaN where a step has none."""
        return np.array([np.nan if s.get(key) is None else float(s[key]) for s in self.steps], dtype=np.float64)

    @property
    def label(self) -> str:
        """Run id, with the experiment in front: one run id may exist in two experiments; and the letter."""
        return f"{self.experiment}/{self.name}" + (f" ({self.letter})" if self.letter else "")


def find_runs(names: Sequence[str], results: Path) -> list[ComparedRun]:
    """The runs called `names`, in this order. Raises ConfigError for fewer than two or for one named twice."""
    folders = [_resolve(name, results) for name in names]
    if len(folders) < 2:
        raise ConfigError(f"a comparison needs two runs or more, got {len(folders)}")
    twice = sorted({f.name for f in folders if [g.resolve() for g in folders].count(f.resolve()) > 1})
    if twice:
        raise ConfigError(f"the same run is named twice: {', '.join(twice)}")
    runs = [load_run(folder) for folder in folders]
    labels = [run.label for run in runs]
    return [
        replace(run, letter=LETTERS[i % len(LETTERS)]) if labels.count(run.label) > 1 else run
        for i, run in enumerate(runs)
    ]


def load_run(folder: Path) -> ComparedRun:
    """Everything that one train folder and its neighbours say. Raises ResultFileError."""
    result = read_result(folder / "result.json", "training result", TRAIN_KEYS)
    _check_run(result, folder / "result.json")
    history = read_jsonl(folder / "history.jsonl", ("step",), kind="training history", target=folder / "result.json")
    home = folder.resolve().parent.parent  # results/<experiment>/train/<run id>
    run_id = str(result["run_id"])
    evaluations = {}
    for path in sorted(home.glob(f"eval/{run_id}-*/result.json")):
        found = read_result(path, "evaluation result", ("run_id", "engines"))
        if found["run_id"] == run_id:
            evaluations[path.parent.name.removeprefix(f"{run_id}-")] = found
    return ComparedRun(
        name=run_id,
        experiment=home.name,
        folder=folder,
        result=result,
        steps=tuple(row for row in history if row["step"] > 0),
        evaluations=evaluations,
        marker=_marker(home, run_id),
    )


def _check_run(result: dict[str, Any], path: Path) -> None:
    """The resolved run must say which arm and seed it is. Raises ResultFileError."""
    run = result["run"]
    arm = run.get("arm") if isinstance(run, dict) else None
    absent = [] if isinstance(arm, dict) and "name" in arm else ["run.arm.name"]
    absent += [] if isinstance(run, dict) and "seed" in run else ["run.seed"]
    if absent:
        raise ResultFileError(
            f"training result {path}: lacks {', '.join(absent)}, so it is not known what was trained. "
            f"Rebuild it with: {rebuild_command(path)}"
        )


def _marker(home: Path, run_id: str) -> dict[str, Any] | None:
    """The newest tracking file of the run that names an MLflow run."""
    files = sorted(home.glob(f"mlflow/{run_id}-*.json"), key=lambda p: p.stat().st_mtime, reverse=True)
    for path in files:
        try:
            marker = read_result(path, "tracking file", ("mlflow_run_id",))
        except ResultFileError:
            continue  # tracking is off, or the import was cut off: then there is no link to show
        return marker
    return None


def _resolve(name: str, results: Path) -> Path:
    """The train folder that `name` means."""
    folder = Path(name)
    if (folder / "result.json").is_file() and (folder / "history.jsonl").is_file():
        return folder
    known = sorted(p.parent for p in results.glob("*/train/*/result.json"))
    exact = [p for p in known if name in (p.name, _label(p))]
    fits = exact or [p for p in known if p.name.startswith(name) or _label(p).startswith(name)]
    if len(fits) == 1:
        return fits[0]
    if fits:
        listed = ", ".join(_label(p) for p in fits)
        raise ConfigError(f"run {name!r} is ambiguous: {listed}; give more of the id, or EXPERIMENT/ID")
    if not known:
        raise ConfigError(f"no finished run under {results}; train first (`snakemake toy`), or give --results")
    labels = [_label(p) for p in known]
    close = difflib.get_close_matches(name, [*labels, *(p.name for p in known)], n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ConfigError(f"unknown run {name!r}{hint}; known under {results}: {', '.join(labels)}")


def _label(folder: Path) -> str:
    return f"{folder.parent.parent.name}/{folder.name}"
