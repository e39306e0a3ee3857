"""Open MLflow's page on the store that the experiments log to.

The address comes from configs/toy.yaml (`tracking.uri`), so that page and log cannot disagree. Differs from `mlflow ui`
in that, which looks into ./mlflow.db.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from quads.config import load_experiment


def main() -> None:
    """Replace this process by the server."""
    parser = argparse.ArgumentParser(description="MLflow's page")
    parser.add_argument("--experiment", type=Path, default=Path("configs/toy.yaml"), help="configs/NAME.yaml")
    parser.add_argument("--port", type=int, default=5000)
    arguments = parser.parse_args()
    tracking = load_experiment(arguments.experiment.stem, arguments.experiment.parent).tracking
    if tracking.uri.startswith("http"):
        sys.exit(f"The experiments log to a server that has its own page: {tracking.uri}")
    database = Path(tracking.uri.removeprefix("sqlite:///"))
    if tracking.uri.startswith("sqlite:///") and not database.is_file():
        sys.exit(f"There is no {database} yet: `make toy` or `make smoke` writes it.")
    print(
        f"MLflow on http://127.0.0.1:{arguments.port} (Ctrl-C ends it); experiment {tracking.experiment!r}", flush=True
    )
    command = ["mlflow", "server", "--backend-store-uri", tracking.uri, "--host", "127.0.0.1", "--workers", "1"]
    os.execvp(command[0], [*command, "--port", str(arguments.port)])


if __name__ == "__main__":
    main()
