"""Open MLflow's page on the store that the experiments log to.

The address comes from configs/toy.yaml (`tracking.uri`), so that page and log cannot disagree. Differs from `mlflow ui`
in that, which looks into ./mlflow.db.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from quads.config import ConfigError, load_experiment


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text[:6]) < 2**16):
        raise argparse.ArgumentTypeError(f"{text!r} is no port; give a number from 1 to {2**16 - 1}")
    return int(text)


def main() -> None:
    """Replace this process by the server."""
    parser = argparse.ArgumentParser(description="MLflow's page")
    parser.add_argument("--experiment", type=Path, default=Path("configs/toy.yaml"), help="configs/NAME.yaml")
    parser.add_argument("--port", type=_port, default=5000)
    arguments = parser.parse_args()
    try:
        tracking = load_experiment(arguments.experiment.stem, arguments.experiment.parent).tracking
    except ConfigError as error:
        sys.exit(str(error))
    if tracking.uri.startswith("http"):
        sys.exit(f"The experiments log to a server that has its own page: {tracking.uri}")
    database = Path(tracking.uri.removeprefix("sqlite:///"))
    if tracking.uri.startswith("sqlite:///") and not database.is_file():
        sys.exit(f"There is no {database} yet: `make toy` or `make smoke` writes it.")
    print(
        f"MLflow on http://127.0.0.1:{arguments.port} (Ctrl-C ends it); experiment {tracking.experiment!r}", flush=True
    )
    command = ["mlflow", "server", "--backend-store-uri", tracking.uri, "--host", "127.0.0.1", "--workers", "1"]
    try:
        os.execvp(command[0], [*command, "--port", str(arguments.port)])
    except FileNotFoundError:
        sys.exit("There is no program mlflow on PATH; activate the environment that `make env` made.")


if __name__ == "__main__":
    main()
