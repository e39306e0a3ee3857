"""Raw rows of parquet and JSONL files, one at a time: files of several GiB never stand in memory as a whole.

    raw_rows(path, columns=None) -> dicts in the order of the file

Contract: a damaged file raises SchemaError naming file and line. `columns` are top-level parquet columns, so that a set
whose solutions weigh gigabytes is read for its problems only. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quads.data.benchmarks.errors import SchemaError

Row = dict[str, Any]
BATCH = 64  # rows; one row of programming problems can weigh 100 MiB


def raw_rows(path: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Rows of one file. Raises SchemaError."""
    if path.suffix == ".parquet":
        yield from _parquet(path, columns)
    elif path.suffix in (".jsonl", ".json"):
        yield from _jsonl(path)
    else:
        raise SchemaError(f"{path}: expected a .parquet or .jsonl file, got {path.suffix or 'no suffix'}")


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        absent = sorted(set(columns or ()) - set(file.schema_arrow.names))
        if absent:
            raise SchemaError(f"{path}: no column(s) {', '.join(absent)}; it has {', '.join(file.schema_arrow.names)}")
        for batch in file.iter_batches(batch_size=BATCH, columns=list(columns) if columns else None):
            yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise SchemaError(f"{path}: not a complete parquet file ({error}); fetch it again") from error


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise SchemaError(f"{path}, line {number}: not valid JSON ({error.msg}); fetch it again") from None
            if not isinstance(row, dict):
                raise SchemaError(f"{path}, line {number}: expected an object, got {type(row).__name__}")
            yield row
