"""Stage: the data set of an experiment.

    python -m quads.prepare --experiment configs/toy.yaml [--fetched results/data] --out DIR
    -> DIR/{train,eval,calibration}.parquet, then DIR/manifest.json

Contract: the same data section gives the same rows and hashes anywhere; the manifest is written last, so a folder
without it is unfinished. Format of the rows: quads.data.build (chains made here), quads.data.sets (pinned sets, read
where quads.decontaminate wrote them).
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from quads.config import ConfigError, load_experiment
from quads.data import build, sets
from quads.files import ResultFileError, write_json_atomic

log = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> None:
    """Parse, build, write."""
    parser = argparse.ArgumentParser(prog="quads.prepare", description="Make the data set of an experiment.")
    parser.add_argument("--experiment", type=Path, required=True, help="configs/NAME.yaml")
    parser.add_argument("--fetched", type=Path, default=Path("results/data"), help="pinned sets (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files and the manifest")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    experiment = load_experiment(args.experiment.stem, configs=args.experiment.parent)
    (args.out / "manifest.json").unlink(missing_ok=True)
    data = experiment.data
    rows = sets.build(data, args.fetched) if data.sets else build.build(data)
    build.write(rows, args.out)
    summary = build.manifest(data, rows, sets.sources(data, args.fetched) if data.sets else None)
    write_json_atomic(args.out / "manifest.json", summary)
    log.info("data %s: %s rows in %s", summary["config_hash"], summary["rows"], args.out)


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, ResultFileError, ValueError, OSError) as error:
        sys.exit(f"quads.prepare: {error}")
