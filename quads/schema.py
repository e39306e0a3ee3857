"""Stage: JSON schema of the YAML files, generated from the configuration models.

    python -m quads.schema --out configs/schema.json

One document with the definitions `Experiment` (configs/*.yaml) and `Arm` (configs/arms/*.yaml), for editors and for
checks outside Python. Differs from the models in what JSON Schema cannot say: rules between fields stay in the models,
which Snakemake uses before it builds the DAG.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from pydantic.json_schema import models_json_schema

from quads.config import Arm, Experiment
from quads.files import write_json_atomic

log = logging.getLogger(__name__)


def schema() -> dict[str, Any]:
    """JSON Schema 2020-12 with both models under `$defs`."""
    _, document = models_json_schema([(Experiment, "validation"), (Arm, "validation")], title="QUADS configuration")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **document}


def main(argv: list[str] | None = None) -> None:
    """Write the schema."""
    parser = argparse.ArgumentParser(prog="python -m quads.schema", description="JSON schema of the YAML files")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    write_json_atomic(arguments.out, schema())
    log.info("wrote %s", arguments.out)


if __name__ == "__main__":
    main()
