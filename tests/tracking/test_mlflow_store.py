"""The import into a real MLflow store on SQLite: once, again, after a kill, after new results, and when broken."""

import dataclasses
import hashlib
import json
import socket
import subprocess
import sys

import pytest
import yaml
from made_up_results import STEPS, made_up_arms, made_up_experiment, write_run

from quads import track
from quads.config import Tracking, resolve_run
from quads.integrations import mlflow as store

pytestmark = pytest.mark.slow  # importing MLflow and its first migration take most of it


@pytest.fixture(scope="module")
def tracking(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlflow")
    tracking = Tracking(uri=f"sqlite:///{folder}/mlflow.db", artifacts=str(folder / "artifacts"))
    store.initialise(tracking)
    return tracking


@pytest.fixture(scope="module")
def client(tracking):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=tracking.uri)


@pytest.fixture
def payload(tmp_path, request):
    """The payload of a made-up run; its key is the test's own, since the store is shared."""
    experiment, arm = made_up_experiment(), made_up_arms()[3]
    train, evaluation = write_run(tmp_path, experiment, arm, 0)
    for engine in ("own", "bf16"):
        (evaluation / f"{engine}.jsonl").write_text('{"header": {}}\n')
    built = track.build_payload(experiment, resolve_run(experiment, arm, 0), train, evaluation)
    return dataclasses.replace(built, key=request.node.name)


def put(tracking, payload):
    return store.log_run(tracking, "made_up", "Made-up numbers", payload)


def runs(client, key):
    (experiment,) = [e for e in client.search_experiments() if e.name == "quads"]
    return client.search_runs([experiment.experiment_id], f"tags.`quads.key` = '{key}'")


def versions(client, run_id=None):
    found = client.search_model_versions("name='quads-made_up-quads'")
    return [v for v in found if run_id in (None, v.run_id)]


def current(client, key):
    return [r for r in runs(client, key) if r.data.tags["quads.superseded"] == "false"]


def test_a_run_arrives_complete(tracking, client, payload):
    logged = put(tracking, payload)
    run = client.get_run(logged.run_id)
    assert logged.action == "created" and run.info.status == "FINISHED"
    assert run.info.run_name == payload.name
    assert run.data.params == dict(payload.params)
    assert run.data.metrics["eval.own.pass_at_1"] == payload.finals["eval.own.pass_at_1"]
    history = client.get_metric_history(logged.run_id, "gap_mean")
    assert [(m.step, m.value) for m in history] == [(s, v["gap_mean"]) for s, _, v in payload.steps[1:]]
    assert history[1].timestamp - history[0].timestamp == 2000
    assert {a.path for a in client.list_artifacts(logged.run_id, "eval")} == {
        f"eval/{n}" for n in ("result.json", "own.jsonl", "bf16.jsonl")
    }
    (dataset,) = run.inputs.dataset_inputs
    assert dataset.dataset.name == "train"
    parent = client.get_run(run.data.tags["mlflow.parentRunId"])
    assert parent.data.tags["quads.kind"] == "experiment" and parent.info.run_name == "made_up"


def test_again_is_found_and_parents_stay_one(tracking, client, payload):
    first, second = put(tracking, payload), put(tracking, payload)
    assert second == dataclasses.replace(first, action="reused")
    assert len(runs(client, payload.key)) == 1
    assert len(runs(client, "made_up")) == 1


def test_a_run_is_one_registered_version_with_its_manifest(tracking, client, payload):
    first, again = put(tracking, payload), put(tracking, payload)
    (version,) = versions(client, first.run_id)
    assert again.version == first.version == version.version
    assert version.source == f"runs:/{first.run_id}/model"
    assert version.tags["quads.run_id"] == payload.name and version.tags["quads.mode"] == "w4a4+rac"
    assert client.get_model_version_by_alias("quads-made_up-quads", "seed0").version == version.version
    assert client.get_model_version_by_alias("quads-made_up-quads", "newest").version == version.version
    names = {a.path for a in client.list_artifacts(first.run_id, "model")}
    assert names == {"model/quantization_manifest.json", "model/checkpoint.json"}
    path = client.download_artifacts(first.run_id, "model/quantization_manifest.json")
    manifest = json.loads(open(path).read())
    assert (
        manifest["digest"] == version.tags["quads.manifest"] == client.get_run(first.run_id).data.tags["quads.manifest"]
    )


def test_earlier_results_become_current_again(tracking, client, payload):
    a, b = payload, dataclasses.replace(payload, content="other")
    first, second, third = put(tracking, a), put(tracking, b), put(tracking, a)
    assert (first.action, second.action, third.action) == ("created", "created", "revived")
    assert third.run_id == first.run_id and third.version == first.version
    assert [r.info.run_id for r in current(client, payload.key)] == [first.run_id]
    assert len(runs(client, payload.key)) == 2
    tags = {v.run_id: v.tags["quads.superseded"] for v in versions(client) if v.tags["quads.key"] == payload.key}
    assert tags == {first.run_id: "false", second.run_id: "true"}
    assert client.get_model_version_by_alias("quads-made_up-quads", "seed0").version == first.version
    assert put(tracking, a).action == "reused"


def test_versions_of_other_seeds_stay_current(tracking, client, payload):
    model = dataclasses.replace(payload.model, name="two-seeds")
    zero = put(tracking, dataclasses.replace(payload, model=model))
    other = dataclasses.replace(model, alias="seed1")
    one = put(tracking, dataclasses.replace(payload, key=f"{payload.key}/seed1", model=other))
    aliases = client.get_registered_model("two-seeds").aliases
    assert {k: int(v) for k, v in aliases.items()} == {
        "seed0": zero.version,
        "seed1": one.version,
        "newest": one.version,
    }
    assert {v.tags["quads.superseded"] for v in client.search_model_versions("name='two-seeds'")} == {"false"}


def test_a_small_checkpoint_travels_and_a_large_one_does_not(tmp_path):
    experiment, arm = made_up_experiment(), made_up_arms()[0]
    train, evaluation = write_run(tmp_path, experiment, arm, 0)
    for engine in ("own", "bf16"):
        (evaluation / f"{engine}.jsonl").write_text('{"header": {}}\n')
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"x" * 2048)
    result = json.loads((train / "result.json").read_text()) | {"checkpoint": str(checkpoint)}
    (train / "result.json").write_text(json.dumps(result))

    def reference(limit):
        tracking = experiment.tracking.model_copy(update={"upload_checkpoint_mib": limit})
        changed = experiment.model_copy(update={"tracking": tracking})
        payload = track.build_payload(changed, resolve_run(changed, arm, 0), train, evaluation)
        return payload.artifacts["model"], json.loads(payload.texts["model/checkpoint.json"])

    files, said = reference(1.0)
    assert [f.name for f in files] == ["model.safetensors"] and said["state"] == "uploaded" and said["bytes"] == 2048
    assert said["sha256"] == {"model.safetensors": hashlib.sha256(b"x" * 2048).hexdigest()}
    files, said = reference(0.001)
    assert files == [] and said["state"] == "referenced" and said["uri"] == checkpoint.as_uri() and said["sha256"] == {}


def test_runs_that_the_store_lost_are_named(tracking, client, payload):
    logged = put(tracking, payload)
    assert store.lost_runs(tracking, [logged.run_id]) == {}
    newer = put(tracking, dataclasses.replace(payload, content="other"))
    client.delete_run(newer.run_id)
    lost = store.lost_runs(tracking, ["f" * 32, logged.run_id, newer.run_id])
    assert lost == {
        "f" * 32: "not in the store",
        logged.run_id: "superseded by another import",
        newer.run_id: "deleted in the store",
    }


def test_check_names_and_mends_files_without_a_run(tmp_path, tracking, payload, caplog):
    values = {"name": "made_up", "title": "t", "arms": ["bf16"], "tracking": tracking.model_dump()}
    (tmp_path / "made_up.yaml").write_text(yaml.safe_dump(values))
    folder = tmp_path / "results" / "made_up" / "mlflow"
    kept, lost = folder / "kept.json", folder / "lost.json"
    folder.mkdir(parents=True)
    for path, run_id in ((kept, put(tracking, payload).run_id), (lost, "0" * 32)):
        path.write_text(json.dumps({"tracking": True, "uri": tracking.uri, "mlflow_run_id": run_id}))
    words = ["check", "--experiment", str(tmp_path / "made_up.yaml"), "--results", str(tmp_path / "results")]
    assert track.main(words) == 1
    assert f"{lost}: MLflow run {'0' * 32} is not in the store" in caplog.text and lost.is_file()
    assert track.main([*words, "--mend"]) == 0
    assert kept.is_file() and not lost.exists()
    assert track.main(words) == 0


def test_new_results_supersede_the_old_run(tracking, client, payload):
    old = put(tracking, payload)
    new = put(tracking, dataclasses.replace(payload, content="other"))
    assert new.action == "created" and new.run_id != old.run_id
    assert [r.info.run_id for r in current(client, payload.key)] == [new.run_id]
    assert client.get_run(old.run_id).data.tags["quads.superseded"] == "true"


@pytest.mark.parametrize("killed_in", ["log_batch", "log_inputs", "log_artifact", "set_terminated"])
def test_a_killed_import_is_completed_not_repeated(tracking, client, payload, monkeypatch, killed_in):
    from mlflow import MlflowClient

    real = getattr(MlflowClient, killed_in)
    calls = {"n": 0}

    def killed(self, *args, **kwargs):
        calls["n"] += 1
        if calls["n"] == 1 and killed_in != "log_batch":
            raise KeyboardInterrupt
        if calls["n"] == 2:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, killed_in, killed)
        with pytest.raises(KeyboardInterrupt):
            put(tracking, payload)
    (left,) = current(client, payload.key)
    assert left.info.status == "RUNNING"
    logged = put(tracking, payload)
    assert (logged.run_id, logged.action) == (left.info.run_id, "resumed")
    assert [v.version for v in versions(client, logged.run_id)] == [logged.version]
    assert len(runs(client, payload.key)) == 1
    assert client.get_run(logged.run_id).info.status == "FINISHED"
    # nothing twice: metric rows are keyed by time, which is computed from the run's start
    assert len(client.get_metric_history(logged.run_id, "gap_mean")) == STEPS
    assert len(client.get_metric_history(logged.run_id, "eval.own.pass_at_1")) == 1
    assert len(client.get_run(logged.run_id).inputs.dataset_inputs) == 1


def test_a_killed_import_of_other_results_is_superseded(tracking, client, payload, monkeypatch):
    from mlflow import MlflowClient

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_inputs", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            put(tracking, payload)
    (left,) = current(client, payload.key)
    new = put(tracking, dataclasses.replace(payload, content="other"))
    assert [r.info.run_id for r in current(client, payload.key)] == [new.run_id]
    assert client.get_run(left.info.run_id).info.status == "KILLED"


def test_a_missing_store_is_not_made_by_log(tmp_path, payload):
    with pytest.raises(store.TrackingError, match=r"gone\.db does not exist.*quads\.track init.*enabled: false"):
        put(Tracking(uri=f"sqlite:///{tmp_path}/gone.db"), payload)
    assert not (tmp_path / "gone.db").exists()


def test_a_damaged_store_stops(tmp_path, payload):
    (tmp_path / "bad.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(store.TrackingError, match=r"bad\.db cannot be used: .*enabled: false"):
        put(Tracking(uri=f"sqlite:///{tmp_path}/bad.db"), payload)


def test_a_dead_server_stops_within_seconds(payload):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(store.TrackingError, match=rf"http://127\.0\.0\.1:{port} cannot be used: .*enabled: false"):
        put(Tracking(uri=f"http://127.0.0.1:{port}"), payload)


def test_processes_that_initialise_together_all_succeed(tmp_path):
    code = (
        "from quads.config import Tracking; from quads.integrations.mlflow import initialise; "
        f"print(initialise(Tracking(uri='sqlite:///{tmp_path}/new.db', artifacts='{tmp_path}/a')))"
    )
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [p.communicate(timeout=300)[0].splitlines()[-1] for p in started]
    assert [p.returncode for p in started] == [0, 0, 0]
    assert len(set(said)) == 1


def test_the_stage_explains_a_broken_store_and_writes_no_marker(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.db").write_bytes(b"this is no database" * 100)
    (tmp_path / "tiny.yaml").write_text("name: tiny\ntitle: Tiny\narms: [bf16]\ntracking: {uri: 'sqlite:///bad.db'}\n")
    assert track.main(["init", "--experiment", "tiny.yaml", "--out", "marker.json"]) == 1
    assert "MLflow store sqlite:///bad.db cannot be used" in caplog.text
    assert not (tmp_path / "marker.json").exists()
