"""Stage: two or more runs side by side.

    python -m quads.compare RUN RUN... [--results results] [--out DIR]

RUN is a run id, a unique beginning of one, EXPERIMENT/ID, or the path of a train folder. The first run is the one that
the others are tested against. The page goes to standard output; --out also writes DIR/compare.{md,svg,png} and, last,
DIR/compare.json. A run without an evaluation, or with other problems, is compared without the tests that need them.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from quads.comparison.page import build, render
from quads.comparison.runs import LETTERS, find_runs
from quads.config import ConfigError
from quads.files import ResultFileError, write_json_atomic, write_text_atomic

log = logging.getLogger("quads.compare")


def main(argv: list[str] | None = None) -> int:
    """Parse, compare, write; 1 after an error that the message explains."""
    parser = argparse.ArgumentParser(prog="quads.compare", description="Runs side by side.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run id, unique prefix, or train folder; two or more")
    parser.add_argument("--results", type=Path, default=Path("results"), help="root of all results")
    parser.add_argument("--out", type=Path, help="folder for compare.json, .md, .svg and .png")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        if len(args.runs) > len(LETTERS):
            raise ConfigError(f"{len(args.runs)} runs: at most {len(LETTERS)} fit on a page")
        runs = find_runs(args.runs, args.results)
        record = build(runs)
    except (ConfigError, ResultFileError) as error:
        log.error("%s", error)
        return 1
    if args.out:
        from quads.comparison.figures import curves_figure
        from quads.paper.figures import save

        args.out.mkdir(parents=True, exist_ok=True)
        save(curves_figure(runs), args.out / "compare")
        write_text_atomic(args.out / "compare.md", render(record, "compare.svg"))
        write_json_atomic(args.out / "compare.json", record)
        log.info("comparison of %d runs in %s", len(runs), args.out)
    sys.stdout.write(render(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
