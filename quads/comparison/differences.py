"""What is not the same in every run: settings, code, versions, hardware. Values are texts, keys dotted.

Settings are those of the resolved run as it was trained, so that defaults of another release show as they were.
A field that only some runs know (an older or newer release) is shown as "-" where it is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quads.comparison.runs import ComparedRun

UNKNOWN = "-"
_PROVENANCE = ("commit", "code_hash", "versions", "hardware", "attempts")


def flatten(values: Any, prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted keys with text values."""
    if not isinstance(values, Mapping):
        return {prefix: "null" if values is None else str(values)}
    out: dict[str, str] = {}
    for key, value in values.items():
        out |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return out


def differing(columns: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Keys whose texts are not equal in all columns, with one text per column, in order of first appearance."""
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = {key: [column.get(key, UNKNOWN) for column in columns] for key in keys}
    return {key: row for key, row in rows.items() if len(set(row)) > 1}


def settings(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Differences of the resolved configurations."""
    return differing([flatten(run.result["run"]) for run in runs])


def provenance(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Differences of commit, code hash, versions of packages, hardware and number of attempts."""
    return differing([flatten({k: run.result[k] for k in _PROVENANCE if k in run.result}) for run in runs])
