"""Stage: tables, figures and the comparison with the paper, from the result files of an experiment.

    python -m quads.report --experiment configs/toy.yaml [--more-arms] --results results --out DIR
    -> DIR/index.html, the page to open first
       DIR/tables/*.{csv,md,tex}, DIR/figures/*.{svg,png}, DIR/sources.json: the paper's tables beside what is here
       DIR/table.{csv,md}, curves.csv, paper.csv, claims.csv, benchmarks.csv, tests.csv, {reward,gap,accuracy}.{svg,png}
       then DIR/report.json

Step-0 studies (--diagnose), rollout benchmarks (--throughput) and kernel benchmarks (--kernels) are taken in where they
exist; their cells say "not run" and how to run them where they do not. A file that exists but is damaged, or belongs to
another run or setting, is an error. report.json lists every source file with its sha256.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quads import paths
from quads.config import ConfigError, Experiment, load_arms, load_experiment
from quads.files import ResultFileError, write_json_atomic, write_text_atomic
from quads.paper.assemble import Report
from quads.paper.figures import save
from quads.paper.ledger import Ledger
from quads.paper.paper_tables import STUDIES, TRAINED, Inputs
from quads.paper.rollout_bench import read_benches, read_kernel_bars
from quads.paper.sources import Source, load_sources
from quads.paper.study_files import read_study

log = logging.getLogger("quads.report")


def main(argv: list[str] | None = None) -> int:
    """Parse, build, write; 1 after an error that the message explains."""
    parser = argparse.ArgumentParser(prog="quads.report", description="Tables and figures of an experiment.")
    parser.add_argument("--experiment", type=Path, required=True, help="configs/NAME.yaml")
    parser.add_argument("--more-arms", action="store_true", help="also the arms under more_arms")
    parser.add_argument("--results", type=Path, default=Path("results"), help="root of all results")
    parser.add_argument("--diagnose", type=Path, help="folder of studies (default: the experiment's own)")
    parser.add_argument("--throughput", type=Path, help="folder of rollout benchmarks (default: the experiment's own)")
    parser.add_argument("--kernels", type=Path, nargs="*", default=[], help="files of quads.bench.kernels")
    parser.add_argument("--out", type=Path, required=True, help="folder of the report")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    configs = args.experiment.parent
    try:
        experiment = load_experiment(args.experiment.stem, configs=configs)
        arms = load_arms(experiment, configs, more=args.more_arms)
        sources = load_sources(args.results, experiment, arms)
        inputs = read_inputs(
            experiment,
            sources,
            args.results,
            diagnose=args.diagnose or paths.diagnose_dir(experiment, args.results),
            throughput=args.throughput or paths.throughput_dir(experiment, args.results),
            kernels=args.kernels,
        )
        build(inputs, args.out, more=args.more_arms)
    except (ConfigError, ResultFileError) as error:
        log.error("%s", error)
        return 1
    return 0


def read_inputs(
    experiment: Experiment,
    sources: Sequence[Source],
    results: Path,
    *,
    diagnose: Path,
    throughput: Path,
    kernels: Sequence[Path] = (),
) -> Inputs:
    """Read what there is beside the runs. Raises ResultFileError for what is there and broken."""
    ledger = Ledger(results)
    ledger.add_runs(sources)
    return Inputs(
        experiment,
        sources,
        ledger,
        studies={name: read_study(diagnose, name, experiment.name, ledger) for name in (*STUDIES, TRAINED)},
        benches=read_benches(throughput, ledger),
        kernels=[bar for path in kernels for bar in read_kernel_bars(path, ledger)],
    )


def build(x: Inputs, out: Path, *, more: bool = False) -> dict[str, Any]:
    """Write the whole report into `out`; report.json is written last and returned."""
    out.mkdir(parents=True, exist_ok=True)
    report = Report(x, more=more)
    files = report.texts()
    for name, text in files.items():
        write_text_atomic(out / name, text)
    plots = report.plots()
    (out / "figures").mkdir(exist_ok=True)
    images = [str(p.relative_to(out)) for plot in plots for p in save(plot.figure, out / plot.place)]
    listed = sorted([*files, *images])
    write_text_atomic(out / "index.html", report.page(plots, listed, out))
    summary = {
        "experiment": x.experiment.name,
        "files": sorted([*listed, "index.html"]),
        "arms": [r.arm.name for r in report.rows],
        "order_of_mean_gaps": report.order,
        "claims": {c.row: str(c.verdict) for c in report.tables[0].cells},
        "sources": [
            {
                "key": e.key,
                "kind": e.kind,
                "run_id": e.run_id,
                "config_hash": e.config_hash,
                "commit": e.commit,
                "code_hash": e.code_hash,
                "files": dict(e.files),
            }
            for e in x.ledger.entries()
        ],
    }
    write_json_atomic(out / "report.json", summary)
    log.info("report of %d arms in %s", len(report.rows), out)
    return summary


if __name__ == "__main__":
    sys.exit(main())
