"""A cell: one number of the paper beside the number here, its verdict and its sources; a table is a list of cells.

    paper, here                        the quantity itself; `here` with its interval
    paper_difference, here_difference  against another row (`against`), where that is what can be compared
    over_seeds                         interval over training seeds of what is judged; None for fewer than two
    verdict                            by quads.paper.status, from `here_difference` or `here`, and `over_seeds`
    sources                            keys of the ledger; empty exactly where nothing was measured here

Units: points and percent are in percent, share in [0, 1], nats, ratio, tokens/s. Contract: a cell with a number has a
source and the other way round; `Cell` refuses anything else, so that no number can be typed in and no source invented.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from quads.evaluation.stats import Interval
from quads.paper.ledger import Ledger
from quads.paper.status import Verdict

Unit = Literal["percent", "points", "share", "nats", "ratio", "tokens/s", "seconds", "relative", "count"]
DIGITS: dict[str, str] = {"percent": "{:.1f}", "points": "{:+.1f}", "share": "{:.2f}", "count": "{:,.0f}"}
MISSING = "-"


@dataclass(frozen=True)
class Cell:
    """See the module docstring. Raises ValueError for a number without a source or a source without a number."""

    row: str
    measure: str
    unit: Unit
    verdict: Verdict
    paper: float | None = None
    grade: str = ""
    here: Interval | None = None
    interval_over: str = ""
    paper_difference: float | None = None
    here_difference: Interval | None = None
    against: str = ""
    seeds: tuple[int, ...] = ()
    sources: tuple[str, ...] = ()
    over_seeds: Interval | None = None

    def __post_init__(self) -> None:
        measured = self.here is not None or self.here_difference is not None
        if measured != bool(self.sources):
            raise ValueError(f"cell {self.row!r}, {self.measure!r}: a number needs a source, and a source a number")
        if not measured and self.verdict.word not in ("not run",):
            raise ValueError(f"cell {self.row!r}, {self.measure!r}: nothing measured, but {self.verdict.word!r}")

    @property
    def difference_unit(self) -> Unit:
        """Unit of the differences."""
        return "points" if self.unit == "percent" else self.unit


@dataclass(frozen=True)
class PaperTable:
    """Cells under one title. `name` is the file stem; `note` says how to read them."""

    name: str
    title: str
    note: str
    cells: tuple[Cell, ...] = field(default_factory=tuple)


# seeds: how many; the CSV lists which
HEADER = ("", "measure", "paper (grade)", "here [interval]", "seeds", "hardware", "status")


def number(value: float | None, unit: str, *, signed: bool = False) -> str:
    """One value in its unit; a dash where it does not exist."""
    if value is None:
        return MISSING
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    form = DIGITS.get(unit, "{:.3g}")
    if signed and not form.startswith("{:+"):
        form = form.replace("{:", "{:+")
    return form.format(value)


def interval(value: Interval | None, unit: str, *, signed: bool = False) -> str:
    """`estimate [low, high]`; one value alone says that its spread is unknown."""
    if value is None:
        return MISSING
    middle = number(value.estimate, unit, signed=signed)
    if math.isinf(value.low) or math.isinf(value.high):
        return f"{middle} [spread unknown]"
    if value.low == value.high == value.estimate:
        return middle
    return f"{middle} [{number(value.low, unit, signed=signed)}, {number(value.high, unit, signed=signed)}]"


def seeds_words(value: Interval | None, unit: str, *, signed: bool = False) -> str:
    """`; over seeds [low, high]`, or nothing for fewer than two seeds."""
    if value is None:
        return ""
    return f"; over seeds [{number(value.low, unit, signed=signed)}, {number(value.high, unit, signed=signed)}]"


def texts(cell: Cell, ledger: Ledger) -> dict[str, str]:
    """The cell in words, by column: row, measure, paper, here, seeds, hardware, status."""
    unit, other = cell.unit, cell.difference_unit
    paper = [] if cell.paper is None else [number(cell.paper, unit)]
    here = [] if cell.here is None else [interval(cell.here, unit)]
    if cell.paper_difference is not None:
        paper.append(f"{number(cell.paper_difference, other, signed=True)} to {cell.against}")
    if cell.here_difference is not None:
        here.append(f"{interval(cell.here_difference, other, signed=True)} to {cell.against}")
    by_seed = seeds_words(cell.over_seeds, other, signed=cell.here_difference is not None)
    said = "; ".join(paper) or MISSING
    return {
        "row": cell.row,
        "measure": f"{cell.measure} ({cell.unit})",
        "paper": f"{said} ({cell.grade})" if cell.grade else said,
        "here": ("; ".join(here) or MISSING) + by_seed,
        "seeds": str(len(cell.seeds) or MISSING),
        "hardware": hardware(cell, ledger),
        "status": str(cell.verdict),
    }


def display_rows(table: PaperTable, ledger: Ledger) -> list[tuple[dict[str, str], tuple[str, ...]]]:
    """What a page shows: the cells in words with their source keys; neighbours that were not run for the same reason,
    with the same measure, share a row (the CSV keeps every cell)."""
    out: list[tuple[dict[str, str], tuple[str, ...]]] = []
    for same, group in groupby(table.cells, key=lambda c: (c.measure, c.verdict, c.grade) if not c.sources else c):
        cells = list(group)
        said = texts(cells[0], ledger)
        if len(cells) > 1 and isinstance(same, tuple):
            papers = [MISSING if c.paper is None else number(c.paper, c.unit) for c in cells]
            said["row"] = " / ".join(c.row for c in cells)
            said["paper"] = " / ".join(papers) + (f" ({cells[0].grade})" if cells[0].grade else "")
        out.append((said, cells[0].sources))
    return out


def hardware(cell: Cell, ledger: Ledger) -> str:
    """Machines of the cell's sources."""
    return " / ".join(dict.fromkeys(ledger.get(k).hardware for k in cell.sources)) or MISSING


def records(table: PaperTable, ledger: Ledger) -> list[dict[str, object]]:
    """Flat records for the CSV: plain numbers, verdict, and the sources with run ids, config hashes and commits."""
    return [_record(table.name, cell, ledger) for cell in table.cells]


def _record(table: str, cell: Cell, ledger: Ledger) -> dict[str, object]:
    def ends(name: str, value: Interval | None) -> dict[str, object]:
        parts = ("", value and value.estimate), ("_low", value and value.low), ("_high", value and value.high)
        return {f"{name}{suffix}": v for suffix, v in parts}

    return {
        "table": table,
        "row": cell.row,
        "measure": cell.measure,
        "unit": cell.unit,
        "paper": cell.paper,
        "paper_difference": cell.paper_difference,
        "paper_grade": cell.grade,
        **ends("here", cell.here),
        **ends("here_difference", cell.here_difference),
        "against": cell.against,
        "interval_over": cell.interval_over,
        "over_seeds_low": cell.over_seeds and cell.over_seeds.low,
        "over_seeds_high": cell.over_seeds and cell.over_seeds.high,
        "seeds": " ".join(map(str, cell.seeds)),
        "hardware": hardware(cell, ledger) if cell.sources else "",
        "status": cell.verdict.word,
        "why": cell.verdict.why,
        **ledger.columns(cell.sources),
    }


def count_words(cells: Sequence[Cell]) -> dict[str, int]:
    """How many cells have each verdict, in the order of quads.paper.status.WORDS, without zeros."""
    from quads.paper.status import WORDS

    found = {word: sum(c.verdict.word == word for c in cells) for word in WORDS}
    return {word: n for word, n in found.items() if n}
