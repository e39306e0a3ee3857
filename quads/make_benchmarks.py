"""Stage: the benchmarks that are made offline.

    python -m quads.make_benchmarks --experiment configs/toy.yaml --out DIR
    -> DIR/<name>.parquet for each toy name under evaluation.benchmarks, then DIR/manifest.json

A stage of its own, and not part of quads.prepare, so that no training result depends on it.
Contract: the same data and benchmark sections give the same rows and hashes anywhere; the manifest is written last.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from quads.config import ConfigError, config_hash, load_experiment
from quads.data import build, toy_benchmarks
from quads.files import write_json_atomic

log = logging.getLogger("quads.make_benchmarks")


def main(argv: list[str] | None = None) -> int:
    """Parse, build, write; 1 after an error that the message explains."""
    parser = argparse.ArgumentParser(prog="quads.make_benchmarks", description="Make the offline benchmarks.")
    parser.add_argument("--experiment", type=Path, required=True, help="configs/NAME.yaml")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files and the manifest")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        experiment = load_experiment(args.experiment.stem, configs=args.experiment.parent)
        benchmarks = experiment.evaluation.benchmarks
        rows = toy_benchmarks.build_rows(experiment.data, benchmarks)
    except (ConfigError, ValueError) as error:
        log.error("%s", error)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "manifest.json").unlink(missing_ok=True)
    build.write(rows, args.out)
    manifest = {
        "rows": {name: len(r) for name, r in rows.items()},
        "sha256": {name: build.content_hash(r) for name, r in rows.items()},
        "config": benchmarks.model_dump(mode="json"),
        "config_hash": config_hash(experiment.data, benchmarks),
    }
    write_json_atomic(args.out / "manifest.json", manifest)
    log.info("benchmarks %s: %s rows in %s", manifest["config_hash"], manifest["rows"], args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
