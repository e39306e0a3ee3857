"""Studies of quads.diagnose as a report reads them, and how a number over a few seeds gets an interval.

    DIR/STUDY.json   who measured what, where       DIR/STUDY.csv   every row, one per seed and case

A study that is not there is None (its cells say which command makes it); one that is there but damaged, of another
experiment or without its rows is an error. Interval over n seeds: mean +- t(n - 1) s / sqrt(n), Student's t, because
three seeds are few; of a difference: the same on differences seed by seed, where both cases had the same prompts.
Differs from the bars in a study's own figure (lowest to highest seed), which claim nothing about further seeds.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quads.evaluation.stats import Interval
from quads.files import ResultFileError, read_result, rebuild_command
from quads.paper.ledger import Entry, Ledger, describe_hardware

KEYS = ("study", "experiment", "checkpoint_sha256", "rows", "notes", "commit", "hardware", "versions")
Value = float | str | None


@dataclass(frozen=True)
class StudyFile:
    """A study: rows with numbers as float and empty cells as None; `key` is its source."""

    name: str
    key: str
    rows: tuple[Mapping[str, Value], ...]
    notes: tuple[str, ...]
    folder: Path

    def by_seed(self, value: str, **where: object) -> dict[int, float]:
        """Seed -> number of column `value` in the rows that match; one row per seed. Raises ValueError otherwise."""
        found: dict[int, float] = {}
        for row in self.rows:
            number = row.get(value)
            if not isinstance(number, float) or any(row.get(k) != v for k, v in where.items()):
                continue
            seed = int(float(str(row["seed"])))
            if seed in found:
                raise ValueError(f"study {self.name}: {value} where {where} has two rows of seed {seed}")
            found[seed] = number
        return found

    def values(self, column: str) -> list[Value]:
        """Distinct values of a column, in order, without empty ones."""
        return list(dict.fromkeys(r[column] for r in self.rows if r.get(column) is not None))


def read_study(folder: Path, name: str, experiment: str, ledger: Ledger) -> StudyFile | None:
    """The study, registered in the ledger; None when it was not run. Raises ResultFileError for a broken one."""
    path, table = folder / f"{name}.json", folder / f"{name}.csv"
    if not path.is_file():
        return None
    said = read_result(path, "study", KEYS)
    if said["study"] != name or said["experiment"] != experiment:
        raise ResultFileError(
            f"{path}: is study {said['study']!r} of experiment {said['experiment']!r}, expected {name!r} of "
            f"{experiment!r}. Rebuild it with: {rebuild_command(path)}"
        )
    if not table.is_file():
        raise ResultFileError(f"{table}: missing. Rebuild it with: {rebuild_command(path)}")
    rows = [_parsed(r) for r in csv.DictReader(io.StringIO(table.read_text(encoding="utf-8")))]
    if len(rows) != int(said["rows"]):
        raise ResultFileError(
            f"{table}: {len(rows)} rows, {path.name} says {said['rows']}. Rebuild it with: {rebuild_command(path)}"
        )
    entry = Entry(
        key=f"study-{name}",
        kind="study",
        title=f"study {name} of {'checkpoint' if 'runs' not in said else 'runs'} {str(said['checkpoint_sha256'])[:12]}",
        link=ledger.relative(path),
        files=ledger.files([path, table]),
        config_hash=folder.name.partition("-")[2],
        commit=str(said["commit"]),
        hardware=describe_hardware(said["hardware"]),
        versions=said["versions"],
        config={k: said[k] for k in ("settings", "arms", "runs") if k in said},
    )
    return StudyFile(name, ledger.add(entry), tuple(rows), tuple(said["notes"]), folder)


def _parsed(row: Mapping[str, Any]) -> dict[str, Value]:
    return {k: _number(v) for k, v in row.items() if k is not None}


def _number(text: str | None) -> Value:
    if text is None or text == "":
        return None
    try:
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else None


def over_seeds(values: Sequence[float], confidence: float) -> Interval | None:
    """Mean and Student interval, infinite for one value (its spread is unknown); None without values."""
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Interval(mean, -math.inf, math.inf)
    half = student_quantile(0.5 + confidence / 2, len(values) - 1)
    half *= statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def paired(a: Mapping[int, float], b: Mapping[int, float], confidence: float) -> Interval | None:
    """Interval of a - b over the seeds that both have."""
    return over_seeds([a[s] - b[s] for s in a if s in b], confidence)


@dataclass(frozen=True)
class Moments:
    """What some studies keep of their seeds: mean, standard deviation (None for one seed) and number."""

    mean: float
    sd: float | None
    count: int

    def interval(self, confidence: float) -> Interval:
        """Student's interval of the mean; infinite for one seed."""
        if self.sd is None or self.count < 2:
            return Interval(self.mean, -math.inf, math.inf)
        half = student_quantile(0.5 + confidence / 2, self.count - 1) * self.sd / math.sqrt(self.count)
        return Interval(self.mean, self.mean - half, self.mean + half)


def welch(a: Moments, b: Moments, confidence: float) -> Interval:
    """Interval of a - b for independent samples of unequal variance (Welch; degrees of freedom rounded down)."""
    difference = a.mean - b.mean
    if a.sd is None or b.sd is None or min(a.count, b.count) < 2:
        return Interval(difference, -math.inf, math.inf)
    parts = [m.sd**2 / m.count for m in (a, b) if m.sd is not None]
    total = sum(parts)
    if total == 0:
        return Interval(difference, difference, difference)
    freedom = total**2 / sum(p**2 / (m.count - 1) for p, m in zip(parts, (a, b), strict=True))
    half = student_quantile(0.5 + confidence / 2, max(1, math.floor(freedom))) * math.sqrt(total)
    return Interval(difference, difference - half, difference + half)


def student_quantile(p: float, freedom: int) -> float:
    """Quantile of Student's t for 0.5 < p < 1, by bisection on the integrated density; relative error below 1e-6.

    With x = sqrt(freedom) tan(u) the density becomes cos(u)**(freedom - 1), so that the range is finite.
    """
    if not 0.5 < p < 1 or freedom < 1:
        raise ValueError(f"student_quantile: needs 0.5 < p < 1 and freedom >= 1, got p={p}, freedom={freedom}")

    def area(end: float, steps: int = 2000) -> float:
        width = end / steps
        total = 1.0 + math.cos(end) ** (freedom - 1)
        total += sum((4 if i % 2 else 2) * math.cos(i * width) ** (freedom - 1) for i in range(1, steps))
        return total * width / 3

    whole = area(math.pi / 2)
    low, high = 0.0, math.pi / 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 + 0.5 * area(middle) / whole < p else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)
