"""Stage: where the rollout/trainer gap comes from, measured on one checkpoint without training.

    python -m quads.diagnose capture --experiment configs/toy.yaml --model DIR --data DIR --out CAPTURES
    python -m quads.diagnose STUDY   --experiment configs/toy.yaml --model DIR --data DIR --captures CAPTURES --out DIR
    -> DIR/STUDY.{csv,md,svg,png}, then DIR/STUDY.json

`capture` runs every engine mode that the studies need, one after the other in this process; a study runs the trainer's
side only, in seconds on the toy. --model is any Hugging Face MoE checkpoint that quads.layers knows; --prompts gives
prompts of your own (.jsonl with `prompt` or `input_ids`), and without calibration.parquet in --data the static masks
are calibrated on the first prompts. Differs from the numbers logged in training: one fixed set of tokens, every
precision asked about it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quads.config import ConfigError, Experiment, load_arms, load_experiment
from quads.diagnostics import STUDIES
from quads.files import ResultFileError
from quads.integrations.vllm.generate import EngineError, prepare_environment
from quads.lifeline import watch_parents

log = logging.getLogger("quads.diagnose")


def main(argv: list[str] | None = None) -> int:
    """Parse, measure, write; 1 after an error that the message explains."""
    parser = argparse.ArgumentParser(prog="quads.diagnose", description="Step-0 diagnostics of the log-prob gap.")
    parser.add_argument("what", choices=("capture", *STUDIES), help="capture first, then any study")
    parser.add_argument("--experiment", type=Path, required=True, help="configs/NAME.yaml")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face checkpoint folder")
    parser.add_argument("--data", type=Path, help="folder of quads.prepare (eval.parquet, calibration.parquet)")
    parser.add_argument("--prompts", type=Path, help=".jsonl or .parquet in place of DATA/eval.parquet")
    parser.add_argument("--captures", type=Path, help="folder of `capture`")
    parser.add_argument("--modes", nargs="+", help="capture only these modes (ids as in the file names)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    watch_parents()
    try:
        configs = args.experiment.parent
        experiment = load_experiment(args.experiment.stem, configs=configs)
        arms = load_arms(experiment, configs, more=True)
        prepare_environment(experiment.runtime)
        if args.what == "capture":
            capture(experiment, arms, args)
        else:
            study(experiment, arms, args)
    except (ConfigError, ResultFileError, EngineError) as error:
        log.error("%s", error)
        return 1
    return 0


def capture(experiment: Experiment, arms: list[Any], args: argparse.Namespace) -> None:
    """Run the engines. Raises ConfigError when there are no prompts."""
    from quads.diagnostics import capture as captures
    from quads.diagnostics.prompts import calibration_ids, load_prompts
    from quads.integrations.vllm.score import ScoringEngine

    source = args.prompts or (args.data / "eval.parquet" if args.data else None)
    if source is None:
        raise ConfigError("no prompts: give --prompts FILE or --data DIR")
    prompts = load_prompts(source, args.model, experiment.grpo.max_prompt_tokens)

    def start(mode: captures.EngineMode, dtype: str, masks: Path | None, checkpoint: Path) -> ScoringEngine:
        receipt = args.out / f"receipt-{mode.id}-{dtype}.json"
        return ScoringEngine(
            checkpoint, mode.mode, experiment, masks=masks, skip=mode.skip, receipt=receipt, dtype=dtype
        )

    modes = captures.engine_modes(arms, experiment.diagnostics)
    if unknown := sorted(set(args.modes or ()) - set(modes)):
        raise ConfigError(f"unknown mode(s) {', '.join(unknown)}; known: {', '.join(modes)}")
    captures.capture_all(
        {name: mode for name, mode in modes.items() if not args.modes or name in args.modes},
        prompts,
        calibration_ids(args.data, prompts),
        args.model,
        experiment,
        args.out,
        start=start,
        versions={name: version(name) for name in ("vllm", "torch", "transformers")},
    )


def study(experiment: Experiment, arms: list[Any], args: argparse.Namespace) -> None:
    """Run one study. Raises ConfigError without captures."""
    if args.captures is None:
        raise ConfigError(f"study {args.what} needs --captures, the folder of `python -m quads.diagnose capture`")
    from quads.diagnostics.context import Context
    from quads.diagnostics.studies import STUDIES as FUNCTIONS
    from quads.diagnostics.write import write_study

    context = Context(experiment, arms, args.model, args.captures)
    write_study(FUNCTIONS[args.what](context), context, args.out, args.what)


if __name__ == "__main__":
    sys.exit(main())
