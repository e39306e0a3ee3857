"""Stage: fetch, check and normalise pinned data sets, once, on a machine with network.

    python -m quads.fetch --set aime24 --out results/data            -> results/data/aime24/{rows.jsonl, manifest.json}
    python -m quads.fetch --set all --out results/data               every set but those that are LiveCodeBench itself
    python -m quads.fetch --set aime24 --out results/data --local PATH   from files that somebody copied
    python -m quads.fetch --list

Contract: one folder per set, its manifest last; any refusal (quads.data.benchmarks.errors) is one message and exit
status 1, and leaves the other sets untouched. HF_HUB_OFFLINE, HF_HOME and HF_TOKEN mean what they mean to the hub.
Golds are checked with the graders that training and evaluation use; --skip-gold-check is noted in the manifest.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from quads.config import ConfigError
from quads.data.benchmarks import build, load_spec, names
from quads.data.benchmarks.errors import DataError, NotAvailableError
from quads.data.benchmarks.store import DEFAULT_OUT, LOCKS

log = logging.getLogger(__name__)


def gold_problem(row: dict[str, Any]) -> str:
    """Why the grader cannot grade against a normalised row, or ""."""
    if "tests" in row:
        from quads.rewards.code.task import Task

        try:
            Task.parse(row["tests"], row["func_name"])
        except ValueError as error:
            return str(error)
        return ""
    from quads.rewards.math import validate_gold

    return validate_gold(row["answer"], row["answer_type"])


def chosen(words: list[str]) -> list[str]:
    """Set names for the words of --set. Raises DataError naming the known ones."""
    if words == ["all"]:
        return [name for name in names() if not load_spec(name).is_livecodebench]
    return [load_spec(word).name for word in words]


def table() -> str:
    """One line per pinned set."""
    lines = [f"{'set':24} {'role':6} {'rows':>7}  {'licence':18.18} hub id at revision"]
    for spec in map(load_spec, names()):
        where = f"{spec.hub_id}@{spec.revision[:10]}"
        lines.append(f"{spec.name:24} {spec.role:6} {spec.rows:7}  {spec.licence:18.18} {where}")
    return "\n".join(lines)


def fetch(words: list[str], out: Path, local: Path | None, locks: Path, check_gold: bool) -> None:
    """Build every chosen set. Raises DataError, ConfigError."""
    sets = chosen(words)
    for name in sets:
        copy = local
        if local is not None and len(sets) > 1:
            # Several sets name their file alike: from one flat folder a set could be read as another one.
            copy = local / name
            if not copy.exists():
                raise NotAvailableError(
                    f"{name}: with several sets, --local needs one folder per set: {copy} is missing"
                )
        spec = load_spec(name)
        manifest = build(spec, out, local=copy, locks=locks, gold=gold_problem if check_gold else None)
        log.info("%s: %d rows, %d dropped, in %s", name, manifest["rows"], len(manifest["dropped_rows"]), out / name)


def main(argv: list[str] | None = None) -> int:
    """Parse and fetch; 1 on a refusal."""
    parser = argparse.ArgumentParser(prog="quads.fetch", description="Fetch and check pinned data sets.")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME", help="set names, or all")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder for one folder per set (%(default)s)")
    parser.add_argument("--local", type=Path, help="folder (or the one file) with a copy of the hub's files")
    parser.add_argument("--locks", type=Path, default=LOCKS, help="where first hashes are recorded (%(default)s)")
    parser.add_argument("--skip-gold-check", action="store_true", help="do not ask the graders about every gold")
    parser.add_argument("--list", action="store_true", help="print the pinned sets and stop")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    if args.list:
        print(table())
        return 0
    if not args.set:
        parser.error("give --set NAME, --set all or --list")
    try:
        fetch(args.set, args.out, args.local, args.locks, not args.skip_gold_check)
    except (DataError, ConfigError) as error:
        log.error("%s: %s", type(error).__name__, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
