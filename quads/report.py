"""Stage: tables, figures and the comparison with the paper, from the result files of an experiment.

    python -m quads.report --experiment configs/toy.yaml [--more-arms] --results results --out DIR
    -> DIR/table.{csv,md}, curves.csv, paper.csv, claims.csv, benchmarks.csv, tests.csv,
       {reward,gap,accuracy}.{svg,png}, then DIR/report.json

report.json lists every source file with its sha256, so that a number can be followed to the run it came from.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quads.config import ConfigError, Experiment, load_arms, load_experiment
from quads.files import ResultFileError, write_json_atomic, write_text_atomic
from quads.paper import benchmarks, claims, figures, render, render_benchmarks, tables
from quads.paper.sources import Source, load_sources

log = logging.getLogger("quads.report")


def main(argv: list[str] | None = None) -> int:
    """Parse, build, write; 1 after an error that the message explains."""
    parser = argparse.ArgumentParser(prog="quads.report", description="Tables and figures of an experiment.")
    parser.add_argument("--experiment", type=Path, required=True, help="configs/NAME.yaml")
    parser.add_argument("--more-arms", action="store_true", help="also the arms under more_arms")
    parser.add_argument("--results", type=Path, default=Path("results"), help="root of all results")
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    configs = args.experiment.parent
    try:
        experiment = load_experiment(args.experiment.stem, configs=configs)
        arms = load_arms(experiment, configs, more=args.more_arms)
        build(experiment, load_sources(args.results, experiment, arms), args.out)
    except (ConfigError, ResultFileError) as error:
        log.error("%s", error)
        return 1
    return 0


def build(experiment: Experiment, sources: Sequence[Source], out: Path) -> dict[str, Any]:
    """Write the whole report into `out`; report.json is written last and returned."""
    out.mkdir(parents=True, exist_ok=True)
    evaluation = experiment.evaluation
    rows = tables.build_rows(sources, evaluation)
    compared = claims.compare_claims(sources, evaluation)
    order = claims.order_of_gaps(sources)
    scores, tests = benchmarks.benchmark_records(sources, evaluation), benchmarks.comparisons(sources, evaluation)
    sandboxes = sorted({str(s.eval["sandbox"]) for s in sources if s.eval.get("sandbox")})
    texts = {
        "table.csv": tables.to_csv([tables.record(r) for r in rows]),
        "table.md": render.page(
            experiment, rows, compared, order, render_benchmarks.section(scores, tests, evaluation, sandboxes)
        ),
        "curves.csv": tables.to_csv(tables.curve_records(sources)),
        "paper.csv": tables.to_csv(claims.compare_rows(sources, evaluation)),
        "claims.csv": tables.to_csv(compared),
    }
    if scores:
        texts |= {"benchmarks.csv": tables.to_csv(scores), "tests.csv": tables.to_csv(tests)}
    for name, text in texts.items():
        write_text_atomic(out / name, text)
    drawn = {
        "reward": figures.reward_figure(sources, experiment.name),
        "gap": figures.gap_figure(sources, experiment.name),
        "accuracy": figures.accuracy_figure(rows, experiment.name, evaluation.confidence),
    }
    images = [p.name for stem, figure in drawn.items() for p in figures.save(figure, out / stem)]
    summary = {
        "experiment": experiment.name,
        "files": sorted([*texts, *images]),
        "arms": [r.arm.name for r in rows],
        "order_of_mean_gaps": order,
        "sources": [
            {
                "run_id": s.run_id,
                "config_hash": s.config_hash,
                "commit": s.train["commit"],
                "code_hash": s.train["code_hash"],
                "files": {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in s.files},
            }
            for s in sources
        ],
    }
    write_json_atomic(out / "report.json", summary)
    log.info("report of %d arms in %s", len(rows), out)
    return summary


if __name__ == "__main__":
    sys.exit(main())
