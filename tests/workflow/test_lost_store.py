"""A deleted tracking database: markers that speak of it go, and the runs are imported again, nothing else."""

from __future__ import annotations

import json

import pytest
from workflow_box import Box

pytestmark = pytest.mark.slow


def speak_of(box: Box, database: str) -> list[str]:
    """Let every marker name `database`, as real imports do."""
    root = box.folder / "results"
    markers = [*root.glob("shared/tracking-*.json"), *root.glob("smoke/mlflow/*.json")]
    for path in markers:
        path.write_text(json.dumps({"tracking": True, "uri": f"sqlite:///{database}"}))
    return sorted(str(p.relative_to(box.folder)) for p in markers)


def test_markers_of_a_deleted_database_are_made_again(finished: Box) -> None:
    database = finished.folder / "results/mlflow.db"
    markers = speak_of(finished, "results/mlflow.db")
    database.touch()
    assert finished.count("smoke") == {}
    database.unlink()
    said = finished.run("-n", "smoke").stderr
    assert all(f"{m}: its store is gone" in said for m in markers)
    assert all((finished.folder / m).is_file() for m in markers), "a dry run removes nothing"
    before = finished.executed()
    finished.run("smoke")
    assert [line.split()[0] for line in finished.executed()[len(before) :]] == ["track"] * len(markers)
    assert finished.count("smoke") == {}
