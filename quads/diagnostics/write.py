"""A study on disk: STUDY.csv (every row), STUDY.md (mean +- standard deviation over seeds), STUDY.svg/.png, STUDY.json.

The JSON comes last and says where the numbers come from: checkpoint, settings, commit, hardware, versions, notes.
A cell that was not measured is empty in the CSV and a dash in the Markdown, never a zero.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quads import provenance
from quads.diagnostics.context import Context, Row, Study, Table
from quads.files import write_json_atomic, write_text_atomic
from quads.paper.figures import save


def write_study(study: Study, context: Context, out: Path, name: str) -> None:
    """All files of one study of one checkpoint."""
    manifest = context.manifest
    source = {
        "experiment": context.experiment.name,
        "checkpoint_sha256": context.checkpoint_sha256,
        "origin": manifest.get("weight_version", {}),
        "captures": {k: manifest[k] for k in ("prompts_sha256", "calibration_sha256", "versions")},
        "settings": context.settings.model_dump(mode="json"),
        "arms": [arm.model_dump(mode="json") for arm in context.arms],
    }
    write_files(study, source, out, name)


def write_files(study: Study, source: Mapping[str, Any], out: Path, name: str) -> None:
    """All files of one study; source: what its numbers come from, for the JSON."""
    out.mkdir(parents=True, exist_ok=True)
    write_text_atomic(out / f"{name}.csv", to_csv(study.rows))
    write_text_atomic(out / f"{name}.md", to_markdown(study, name))
    save(study.figure, out / name)
    write_json_atomic(
        out / f"{name}.json",
        {
            "study": name,
            **source,
            "rows": len(study.rows),
            "notes": study.notes,
            "commit": provenance.commit(),
            "hardware": provenance.hardware(),
            "versions": provenance.versions("torch", "transformers"),
        },
    )


def to_csv(rows: Sequence[Row]) -> str:
    """CSV with the union of the rows' keys, in order of appearance."""
    fields = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_markdown(study: Study, name: str) -> str:
    """The study's tables, then its notes."""
    parts = [f"# {name}\n"]
    for table in study.tables:
        parts.append(f"## {table.title}\n\n{_markdown_table(study.rows, table)}")
    if study.notes:
        parts.append("## Notes\n\n" + "\n".join(f"- {note}" for note in study.notes) + "\n")
    return "\n".join(parts)


def condense(rows: Sequence[Row], table: Table) -> list[tuple[tuple[object, ...], dict[str, list[float]]]]:
    """(key values, one number per seed and value column); rows without any of the values are left out.

    Rows of one key and one seed are averaged first, so that the spread is over seeds and nothing else.
    """
    grouped: dict[tuple[object, ...], dict[str, dict[object, list[float]]]] = {}
    for row in rows:
        present = {v: row[v] for v in table.values if isinstance(row.get(v), int | float)}
        if not present or any(key not in row for key in table.keys):
            continue
        columns = grouped.setdefault(tuple(row[key] for key in table.keys), {v: {} for v in table.values})
        for value, number in present.items():
            columns[value].setdefault(row.get("seed"), []).append(float(number))
    return [
        (key, {v: [statistics.fmean(numbers) for numbers in seeds.values()] for v, seeds in columns.items()})
        for key, columns in grouped.items()
    ]


def _markdown_table(rows: Sequence[Row], table: Table) -> str:
    lines = ["| " + " | ".join((*table.keys, *table.values)) + " |"]
    lines.append("|" + "---|" * (len(table.keys) + len(table.values)))
    for key, columns in condense(rows, table):
        cells = [*(str(k) for k in key), *(spread(columns[v]) for v in table.values)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def spread(values: Sequence[float]) -> str:
    """mean +- standard deviation over seeds, three significant digits; one value alone; a dash for none."""
    if not values:
        return "-"
    mean = statistics.fmean(values)
    if len(values) == 1 or not math.isfinite(mean):
        return f"{mean:.3g}"
    return f"{mean:.3g} ± {statistics.stdev(values):.1g}"
