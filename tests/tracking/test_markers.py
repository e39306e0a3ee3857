"""Which marker files speak of a store that is gone."""

import json

from quads.markers import lost_markers


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_markers_of_a_deleted_database_are_lost(tmp_path):
    results, database = tmp_path / "results", tmp_path / "results" / "mlflow.db"
    here = {"tracking": True, "uri": f"sqlite:///{database}"}
    store = write(results / "shared" / "tracking-0.json", here)
    run = write(results / "toy" / "mlflow" / "quads-seed0.json", here | {"mlflow_run_id": "1"})
    write(results / "toy" / "mlflow" / "off.json", {"tracking": False, "why": "off"})
    write(results / "toy" / "mlflow" / "server.json", {"tracking": True, "uri": "http://127.0.0.1:5000"})
    write(results / "toy" / "mlflow" / "torn.json", "{")
    write(results / "toy" / "report" / "report.json", here)
    database.write_bytes(b"")
    assert lost_markers(results) == []
    database.unlink()
    assert lost_markers(results) == [store, run]
