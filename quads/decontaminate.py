"""Stage: a training set without the rows that overlap with test sets, and the list of what was removed.

    python -m quads.decontaminate --set dapo_math_17k --against aime24 aime25 hmmt_feb25 --data results/data --out DIR
    -> DIR/{rows.jsonl, report.md, report.json (last)}

Contract: sets are read where quads.fetch wrote them (their hashes are checked while they are read), never from the
network; the same inputs give the same bytes. Rules: quads.data.decontaminate. Rows pass twice, so that a set with
gigabytes of tests does not stand in memory.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from quads.config import ConfigError
from quads.data.benchmarks import iterate, load_spec, names
from quads.data.benchmarks.errors import DataError
from quads.data.benchmarks.store import DEFAULT_OUT, encoded, read_manifest
from quads.data.decontaminate import REASONS, Match, Result, Rules, TestProblems, decontaminate
from quads.files import write_json_atomic, write_text_atomic

log = logging.getLogger(__name__)
Row = dict[str, Any]


def light_rows(name: str, data: Path) -> Iterator[Row]:
    """Rows of a fetched set without their tests: what the rules look at."""
    for row in iterate(name, data):
        row.pop("tests", None)
        yield row


def window_start(against: list[str], data: Path) -> datetime | None:
    """Earliest contest date that a reported code benchmark covers: its window's start, or its oldest problem."""
    starts: list[datetime] = []
    for name in against:
        spec = load_spec(name)
        if spec.window is not None and spec.window.start is not None:
            starts.append(spec.window.start)
        elif spec.window is not None:
            starts += [datetime.fromisoformat(row["date"]) for row in light_rows(name, data)]
    return min(starts, default=None)


def report(name: str, against: list[str], data: Path, tests: TestProblems, result: Result) -> Row:
    """report.json: inputs by hash, rules, counts, every removed row, rows to review."""
    counts = Counter(match.reason for match in result.removed)
    return {
        "set": name,
        "rows_sha256": read_manifest(name, data)["rows_sha256"],
        "against": {test: read_manifest(test, data)["rows_sha256"] for test in against},
        "rules": vars(tests.rules),
        "test_problems": tests.count,
        "distinct_test_problems": len(tests.texts),
        "rows": len(result.kept) + len(result.removed),
        "kept": len(result.kept),
        "removed": {reason: counts[reason] for reason in REASONS},
        "answer_equal": sum(match.answer_equal is True for match in result.removed),
        "kept_with_formulas_only": result.formula_only,
        "removed_rows": [match.to_json() for match in result.removed],
        "review_rows": [match.to_json() for match in result.review],
    }


def _lines(matches: list[Match]) -> list[str]:
    head = ["| row | reason | test problem | answers equal | detail |", "|---|---|---|---|---|"]
    answers = {True: "yes", False: "no", None: "-"}
    body = []
    for m in matches:
        test = f"{m.test_id} ({m.test_set})" if m.test_id else "-"
        detail = m.detail.replace("|", "\\|").replace("\n", " ")
        body.append(f"| {m.id} | {m.reason} | {test} | {answers[m.answer_equal]} | {detail} |")
    return head + body


def markdown(summary: Row, result: Result) -> str:
    """report.md."""
    removed = ", ".join(f"{reason} {count}" for reason, count in summary["removed"].items())
    lines = [
        f"# Decontamination of {summary['set']}",
        "",
        f"{summary['rows']} rows, {summary['kept']} kept, {len(result.removed)} removed ({removed}); "
        f"{summary['answer_equal']} removed rows have the test problem's answer.",
        f"Compared with {summary['distinct_test_problems']} distinct problems of {', '.join(summary['against'])}.",
        f"{summary['kept_with_formulas_only']} kept rows share only formulas with test problems.",
        "",
        "## Removed",
        "",
        *(_lines(result.removed) if result.removed else ["None."]),
        "",
        "## Kept, to be read by a person (similar, same answer)",
        "",
        *(_lines(result.review) if result.review else ["None."]),
    ]
    return "\n".join(lines) + "\n"


def run(name: str, against: list[str], data: Path, out: Path) -> Row:
    """Compare, write, report. Raises DataError."""
    spec = load_spec(name)
    for test in against:
        if load_spec(test).role != "test":
            raise DataError(f"--against {test}: a training set; test sets are {', '.join(names('test'))}")
    (out / "report.json").unlink(missing_ok=True)
    tests = TestProblems([(test, light_rows(test, data)) for test in against], Rules())
    result = decontaminate(
        list(light_rows(name, data)),
        tests,
        source=name,
        is_livecodebench=spec.is_livecodebench,
        window_start=window_start(against, data),
    )
    kept, digest = set(result.kept), hashlib.sha256()
    out.mkdir(parents=True, exist_ok=True)
    part = out / "rows.jsonl.part"
    with part.open("wb") as file:
        for row in iterate(name, data):
            if row["id"] in kept:
                line = encoded(row)
                digest.update(line)
                file.write(line)
    os.replace(part, out / "rows.jsonl")
    summary = {**report(name, against, data, tests, result), "kept_sha256": digest.hexdigest()}
    write_text_atomic(out / "report.md", markdown(summary, result))
    write_json_atomic(out / "report.json", summary)
    return summary


def main(argv: list[str] | None = None) -> int:
    """Parse and run; 1 on a refusal."""
    parser = argparse.ArgumentParser(
        prog="quads.decontaminate", description="Remove training rows that overlap with tests."
    )
    parser.add_argument("--set", required=True, metavar="NAME", help="a fetched training set")
    parser.add_argument("--against", nargs="+", metavar="NAME", help="test sets (default: all pinned ones)")
    parser.add_argument("--data", type=Path, default=DEFAULT_OUT, help="where quads.fetch wrote (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the kept rows and the report")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        summary = run(args.set, args.against or names("test"), args.data, args.out)
    except (DataError, ConfigError) as error:
        log.error("%s: %s", type(error).__name__, error)
        return 1
    log.info("%s: kept %d of %d rows, removed %s", args.set, summary["kept"], summary["rows"], summary["removed"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
