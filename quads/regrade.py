"""Stage: grade the samples of an evaluation again, and merge shards. Needs no engine and no checkpoint.

    python -m quads.regrade --experiment configs/toy.yaml --data DIR --benchmarks DIR --cache DIR --out DIR
    -> DIR/{own,bf16}.jsonl, then DIR/result.json, from DIR/generation.json and the generation cache

Two uses. After a change of a grader: same samples, new verdicts. After `quads.evaluate --shard i/n` for every i: the
shards' samples become one result. Both are idempotent.
Differs from evaluating again: nothing is drawn; a missing sample is an error that names the shard.
"""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import closing
from pathlib import Path

from quads import paths
from quads.config import ConfigError, load_experiment
from quads.evaluation.finish import finish
from quads.evaluation.generations import RecordsError
from quads.evaluation.grading import Grading
from quads.evaluation.lock import locked_folder
from quads.evaluation.problems import questions
from quads.files import ResultFileError, read_result, write_json_atomic
from quads.lifeline import watch_parents
from quads.rewards.code import SandboxUnavailableError

log = logging.getLogger("quads.regrade")


def main(argv: list[str] | None = None) -> int:
    """Parse, grade, write; 1 after an error that the message explains."""
    parser = argparse.ArgumentParser(prog="quads.regrade", description="Grade generated samples again; merge shards.")
    parser.add_argument("--experiment", type=Path, required=True, help="configs/NAME.yaml")
    parser.add_argument("--data", type=Path, required=True, help="folder of quads.prepare")
    parser.add_argument("--benchmarks", type=Path, required=True, help="folder of quads.make_benchmarks")
    parser.add_argument("--fetched", type=Path, default=Path("results/data"), help="folder of pinned sets")
    parser.add_argument("--cache", type=Path, required=True, help="generation cache of quads.evaluate")
    parser.add_argument("--out", type=Path, required=True, help="folder of quads.evaluate")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    watch_parents()
    try:
        experiment = load_experiment(args.experiment.stem, configs=args.experiment.parent)
        generation = read_result(
            args.out / "generation.json",
            "generation summary",
            ("eval_hash", "engines"),
            target=args.out / "result.json",
        )
        if generation["eval_hash"] != paths.eval_hash(experiment):
            raise ConfigError(
                f"{args.out} was generated under evaluation settings {generation['eval_hash']}, {args.experiment} now "
                f"has {paths.eval_hash(experiment)}; evaluate again: samples that still fit are taken from the cache"
            )
        grading = Grading(experiment.evaluation.sandbox, args.cache / "verdicts")
        with locked_folder(args.out), closing(grading):
            asked = questions(experiment, args.data, args.benchmarks, args.fetched)
            result = finish(generation, asked, experiment.evaluation, cache=args.cache, grading=grading, out=args.out)
            write_json_atomic(args.out / "result.json", result)
    except (ConfigError, ResultFileError, RecordsError, SandboxUnavailableError) as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
