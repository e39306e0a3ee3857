"""One MLflow run per arm and seed under one parent per experiment, imported from result files, idempotently.

    key      "<experiment>/<arm>/seed<seed>"          content = sha256 over the files that hold the numbers
    FINISHED run of this key and content              -> nothing to do
    unfinished run of this key and content            -> completed (a killed import)
    any other current run of this key                 -> quads.superseded = true once the new one is complete

Contract: of one key at most one FINISHED run has quads.superseded = false. Metric times are computed from the run's
start time, so that logging a metric twice stores it once. The SQLite store is created by `initialise` only and every
access holds a file lock: MLflow's first migration fails in all but one of several processes that start it together.
Any failure of the store is a TrackingError: results exist as files, but a run that says it is tracked must be.
Differs from logging during training in that a training job needs neither network nor database, and a retried job
leaves one run, not several.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quads.config import Tracking

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run as MlflowRun

log = logging.getLogger(__name__)

_SQLITE = "sqlite:///"
_BATCH = {"metrics": 1000, "params": 100}  # MLflow's limits per request
# read by mlflow; set only where the user did not. Its own retries wait for minutes before they admit a dead server.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "GIT_PYTHON_REFRESH": "quiet",
}


class TrackingError(RuntimeError):
    """The tracking store cannot be used; the message says which, why and what to do."""


@dataclass(frozen=True)
class Dataset:
    """A data set used by a run; `context` is training or evaluation."""

    name: str
    digest: str
    source: str
    context: str


@dataclass(frozen=True)
class Payload:
    """Everything that one run says; `steps` are (step, seconds since the start, metrics)."""

    key: str
    name: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    steps: Sequence[tuple[int, float, Mapping[str, float]]]
    finals: Mapping[str, float]
    artifacts: Mapping[str, Sequence[Path]]
    datasets: Sequence[Dataset]
    content: str


@dataclass(frozen=True)
class Logged:
    """Where a payload is now: `action` is created, resumed or reused."""

    run_id: str
    action: str


def flatten(values: Any, prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted keys with text values; lists and null as JSON-like text."""
    if not isinstance(values, Mapping):
        return {prefix: "null" if values is None else str(values)}
    out: dict[str, str] = {}
    for key, value in values.items():
        out |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return out


def content_hash(files: Sequence[Path]) -> str:
    """sha256 over names and bytes, in order."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def initialise(tracking: Tracking) -> dict[str, str]:
    """Create the store and the MLflow experiment; harmless when they exist. Parent runs come with their first child."""
    with _store(tracking, create=True) as (_, experiment_id):
        return {"uri": tracking.uri, "experiment_id": experiment_id}


def log_run(tracking: Tracking, experiment: str, title: str, payload: Payload) -> Logged:
    """Bring the store to the state in which `payload` is the current run of its key."""
    with _store(tracking, create=False) as (client, experiment_id):
        parent = _parent(client, experiment_id, experiment, title)
        current = _current(client, experiment_id, payload.key)
        same = [r for r in current if r.data.tags.get("quads.content") == payload.content]
        finished = [r for r in same if r.info.status == "FINISHED"]
        if finished:
            run, action = finished[0], "reused"
        else:
            action = "resumed" if same else "created"
            run = same[0] if same else _create(client, experiment_id, parent, payload)
            _fill(client, run, payload)
        for old in current:
            if old.info.run_id != run.info.run_id:
                client.set_tag(old.info.run_id, "quads.superseded", "true")
                if old.info.status != "FINISHED":
                    client.set_terminated(old.info.run_id, status="KILLED")
    return Logged(run.info.run_id, action)


def _current(client: MlflowClient, experiment_id: str, key: str) -> list[MlflowRun]:
    """Runs of this key that nothing supersedes, newest first."""
    found: list[MlflowRun] = client.search_runs(
        [experiment_id],
        f"tags.`quads.key` = '{key}' and tags.`quads.superseded` = 'false'",
        order_by=["attributes.start_time DESC"],
    )
    return found


def _parent(client: MlflowClient, experiment_id: str, experiment: str, title: str) -> str:
    """Run id of the experiment's parent; one per experiment, whatever its runs go through."""
    found = _current(client, experiment_id, experiment)
    if found:
        return str(found[-1].info.run_id)
    tags = {
        "quads.key": experiment,
        "quads.kind": "experiment",
        "quads.superseded": "false",
        "mlflow.note.content": title,
    }
    run = client.create_run(experiment_id, run_name=experiment, tags=tags)
    client.set_terminated(run.info.run_id, status="FINISHED")
    return str(run.info.run_id)


def _create(client: MlflowClient, experiment_id: str, parent: str, payload: Payload) -> MlflowRun:
    spent = max((seconds for _, seconds, _ in payload.steps), default=0.0)
    tags = {
        **payload.tags,
        "quads.key": payload.key,
        "quads.kind": "run",
        "quads.content": payload.content,
        "quads.superseded": "false",
        "mlflow.parentRunId": parent,
    }
    start = int(1000 * (time.time() - spent))
    return client.create_run(experiment_id, start_time=start, run_name=payload.name, tags=tags)


def _fill(client: MlflowClient, run: MlflowRun, payload: Payload) -> None:
    """Params, metrics, data sets, artifacts, then FINISHED. Every part may be there already from a killed import."""
    from mlflow.entities import Dataset as MlflowDataset
    from mlflow.entities import DatasetInput, InputTag, Metric, Param

    run_id, start = run.info.run_id, run.info.start_time
    params = [Param(k, v) for k, v in payload.params.items()]
    for first in range(0, len(params), _BATCH["params"]):
        client.log_batch(run_id, params=params[first : first + _BATCH["params"]])
    last_step, last_s = max(((s, t) for s, t, _ in payload.steps), default=(0, 0.0))
    end = start + int(1000 * last_s)
    metrics = [
        Metric(name, value, start + int(1000 * seconds), step)
        for step, seconds, values in payload.steps
        for name, value in values.items()
        if math.isfinite(value)
    ]
    metrics += [Metric(name, value, end, last_step) for name, value in payload.finals.items() if math.isfinite(value)]
    for first in range(0, len(metrics), _BATCH["metrics"]):
        client.log_batch(run_id, metrics=metrics[first : first + _BATCH["metrics"]])
    inputs = [
        # MLflow cuts no digest itself: more than 36 characters are an error
        DatasetInput(
            MlflowDataset(d.name, d.digest[:36], "local", d.source), [InputTag("mlflow.data.context", d.context)]
        )
        for d in payload.datasets
    ]
    client.log_inputs(run_id, datasets=inputs)
    for folder, files in payload.artifacts.items():
        for path in files:
            client.log_artifact(run_id, str(path), folder)
    client.set_terminated(run_id, status="FINISHED", end_time=end)


@contextmanager
def _store(tracking: Tracking, *, create: bool) -> Iterator[tuple[MlflowClient, str]]:
    """Client and MLflow experiment id, under the store's lock; every failure becomes a TrackingError."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    database = Path(tracking.uri.removeprefix(_SQLITE)) if tracking.uri.startswith(_SQLITE) else None
    if database and not create and not database.is_file():
        raise _error(tracking, f"{database} does not exist", "create it with `python -m quads.track init`")
    try:
        with _locked(database):
            client = MlflowClient(tracking_uri=tracking.uri)
            yield client, _experiment_id(client, tracking)
    except (MlflowException, SQLAlchemyError, OSError) as error:
        cause = " ".join(str(error).split())[:400] or type(error).__name__
        raise _error(tracking, cause, "make it reachable or repair it") from error


def _error(tracking: Tracking, cause: str, remedy: str) -> TrackingError:
    return TrackingError(
        f"MLflow store {tracking.uri} cannot be used: {cause}. What to do: {remedy} and run the same command again, or "
        "set `tracking: {enabled: false}` in the experiment's YAML file. The results themselves are complete files"
    )


@contextmanager
def _locked(database: Path | None) -> Iterator[None]:
    """One process at a time on a SQLite store; a tracking server does its own locking."""
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with database.with_name(database.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _experiment_id(client: MlflowClient, tracking: Tracking) -> str:
    """The MLflow experiment named in the configuration, made with its own artifact folder when it is new."""
    found = client.get_experiment_by_name(tracking.experiment)
    if found is not None:
        if found.lifecycle_stage != "active":
            raise _error(
                tracking,
                f"MLflow experiment {tracking.experiment!r} was deleted",
                f"`mlflow experiments restore -x {found.experiment_id}` or another tracking.experiment",
            )
        return str(found.experiment_id)
    local = Path(tracking.artifacts).resolve().as_uri() if "://" not in tracking.artifacts else tracking.artifacts
    return str(client.create_experiment(tracking.experiment, artifact_location=local))
