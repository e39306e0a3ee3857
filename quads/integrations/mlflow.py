"""One MLflow run per arm and seed under one parent per experiment, imported from result files, idempotently.

    key      "<experiment>/<arm>/seed<seed>"          content = sha256 over the files that hold the numbers
    FINISHED run of this key and content              -> it is the current one, also if it was superseded meanwhile
    unfinished run of this key and content            -> completed (a killed import)
    any other current run of this key                 -> quads.superseded = true once the new one is complete

    registered model "quads-<experiment>-<arm>"       one version per imported run: its source is the run's artifact
    folder `model`: quantization manifest, checkpoint.json (where the checkpoint lies), and its files when it is small
    aliases: `seed<n>` the current version of a seed, `newest` the newest current version of any seed

Contract: after an import one run of its key and one version of that key have quads.superseded = false: the one whose
results are on disk, whatever was imported before (A, then B, then A again ends with A, and with two runs). Metric times
are computed from the run's start time, so that logging a metric twice stores it once. The SQLite store is created by
`initialise` only and every access holds a file lock: MLflow's first migration fails in all but one of several processes
that start it together.
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
from dataclasses import dataclass, field
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
class ModelVersion:
    """What is registered: one version of the model `name` per run; `source` is a folder of the run's artifacts."""

    name: str
    title: str
    description: str
    alias: str
    source: str
    tags: Mapping[str, str]


@dataclass(frozen=True)
class Payload:
    """Everything that one run says; `steps` are (step, seconds since the start, metrics).

    artifacts: files by artifact folder; texts: contents by artifact path.
    """

    key: str
    name: str
    tags: Mapping[str, str]
    params: Mapping[str, str]
    steps: Sequence[tuple[int, float, Mapping[str, float]]]
    finals: Mapping[str, float]
    artifacts: Mapping[str, Sequence[Path]]
    datasets: Sequence[Dataset]
    content: str
    texts: Mapping[str, str] = field(default_factory=dict)
    model: ModelVersion | None = None


@dataclass(frozen=True)
class Logged:
    """Where a payload is now: `action` is created, resumed, reused or revived; model and version if registered."""

    run_id: str
    action: str
    experiment_id: str = ""
    model: str | None = None
    version: int | None = None


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
        known = _runs(client, experiment_id, payload.key)
        current = [r for r in known if r.data.tags.get("quads.superseded") == "false"]
        same = [r for r in known if r.data.tags.get("quads.content") == payload.content]
        # a current one first: after A, B, A both imports of A may be there from before this rule
        same.sort(key=lambda r: r not in current)
        finished = [r for r in same if r.info.status == "FINISHED"]
        unfinished = [r for r in same if r in current]
        if finished:
            run, action = finished[0], "reused" if finished[0] in current else "revived"
        else:
            action = "resumed" if unfinished else "created"
            run = unfinished[0] if unfinished else _create(client, experiment_id, parent, payload)
            _fill(client, run, payload)
        for old in current:
            if old.info.run_id != run.info.run_id:
                client.set_tag(old.info.run_id, "quads.superseded", "true")
                if old.info.status != "FINISHED":
                    client.set_terminated(old.info.run_id, status="KILLED")
        if action == "revived":
            client.set_tag(run.info.run_id, "quads.superseded", "false")
        run_id = str(run.info.run_id)
        if payload.model is None:
            return Logged(run_id, action, experiment_id)
        version = _register(client, run_id, payload.key, payload.model)
        return Logged(run_id, action, experiment_id, payload.model.name, version)


def lost_runs(tracking: Tracking, run_ids: Sequence[str]) -> dict[str, str]:
    """Of these MLflow runs those that are not current in the store, with the reason."""
    from mlflow.exceptions import MlflowException

    out = {}
    with _store(tracking, create=False) as (client, _):
        for run_id in run_ids:
            try:
                run = client.get_run(run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                out[run_id] = "not in the store"
                continue
            if run.info.lifecycle_stage != "active":
                out[run_id] = "deleted in the store"
            elif run.data.tags.get("quads.superseded") != "false":
                out[run_id] = "superseded by another import"
    return out


def _runs(client: MlflowClient, experiment_id: str, key: str) -> list[MlflowRun]:
    """All runs of this key, newest first."""
    found: list[MlflowRun] = client.search_runs(
        [experiment_id], f"tags.`quads.key` = '{key}'", order_by=["attributes.start_time DESC"], max_results=10_000
    )
    return found


def _register(client: MlflowClient, run_id: str, key: str, model: ModelVersion) -> int:
    """The version of `model` that belongs to the run: made if it is missing, and current among those of its key."""
    _ensure_model(client, model)
    versions = _versions(client, model.name)
    mine = next((v for v in versions if v.run_id == run_id), None)
    tags = {**model.tags, "quads.key": key, "quads.superseded": "false"}
    if mine is None:
        source = f"runs:/{run_id}/{model.source}"
        mine = client.create_model_version(model.name, source, run_id, tags=tags, description=model.description)
        versions.append(mine)
    for version in versions:
        superseded = "true" if version.version != mine.version else "false"
        if version.tags.get("quads.key") == key and version.tags.get("quads.superseded") != superseded:
            client.set_model_version_tag(model.name, str(version.version), "quads.superseded", superseded)
    client.set_registered_model_alias(model.name, model.alias, str(mine.version))
    current = [v for v in versions if v.tags.get("quads.key") != key and v.tags.get("quads.superseded") == "false"]
    newest = max(int(v.version) for v in [*current, mine])
    client.set_registered_model_alias(model.name, "newest", str(newest))
    return int(mine.version)


def _ensure_model(client: MlflowClient, model: ModelVersion) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(model.name, description=model.title)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _versions(client: MlflowClient, name: str) -> list[Any]:
    """All versions of a registered model."""
    found, token = [], None
    while True:
        page = client.search_model_versions(f"name='{name}'", page_token=token)
        found += list(page)
        token = page.token
        if not token:
            return found


def _parent(client: MlflowClient, experiment_id: str, experiment: str, title: str) -> str:
    """Run id of the experiment's parent; one per experiment, whatever its runs go through."""
    found = [r for r in _runs(client, experiment_id, experiment) if r.data.tags.get("quads.superseded") == "false"]
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
        for file in files:
            client.log_artifact(run_id, str(file), folder)
    for path, text in payload.texts.items():
        client.log_text(run_id, text, path)
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
