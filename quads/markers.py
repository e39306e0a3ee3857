"""Marker files that speak of a tracking store which is gone. No torch, no MLflow.

    results/shared/tracking-<hash>.json    the store was initialised    {"tracking", "uri", "experiment_id"}
    results/<experiment>/mlflow/<run>.json the run was imported         {"tracking", "uri", "mlflow_run_id", ...}

Snakemake looks at files only: after `rm results/mlflow.db` every marker would still say that its run is tracked and
nothing would be imported again. The workflow asks here before it plans and removes what is false.
Contract: a marker is lost when it names a SQLite file that does not exist. A server cannot be asked without its client;
`python -m quads.track check` does that, and also finds single runs that a store has lost.
"""

from __future__ import annotations

import json
from pathlib import Path

SQLITE = "sqlite:///"


def lost_markers(results: Path) -> list[Path]:
    """Markers below `results` whose SQLite store is missing, sorted; relative stores are looked up from here."""
    found = [*results.glob("shared/tracking-*.json"), *results.glob("*/mlflow/*.json")]
    return sorted(path for path in found if _lost(path))


def _lost(path: Path) -> bool:
    try:
        marker = json.loads(path.read_text(encoding="utf-8"))
        uri = str(marker["uri"])
    except (OSError, ValueError, KeyError, TypeError):
        return False  # tracking is switched off, or no marker of ours
    return uri.startswith(SQLITE) and not Path(uri.removeprefix(SQLITE)).is_file()
