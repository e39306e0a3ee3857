"""Stage: where the rollout/trainer gap comes from, measured on one checkpoint, before training or after it.

    python -m quads.diagnose capture --experiment configs/toy.yaml --model DIR --data DIR --out CAPTURES
    python -m quads.diagnose STUDY   --experiment configs/toy.yaml --model DIR --captures CAPTURES --out DIR
    -> DIR/STUDY.{csv,md,svg,png}, then DIR/STUDY.json
    python -m quads.diagnose run     --experiment configs/toy.yaml --arm quads --seed 0 --train DIR --data DIR --out RUN
    -> RUN/captures/, RUN/run_layers.*, RUN/run.{csv,md,svg,png}, then RUN/run.json
    python -m quads.diagnose trained --experiment configs/toy.yaml --runs RUN RUN... [--step0 DIR] --out DIR
    -> DIR/trained_layers.*, DIR/trained.{csv,md,svg,png}, then DIR/trained.json

`capture` runs every engine mode that the studies need, one after the other in this process; a study runs the trainer's
side only, in seconds on the toy. --model is any Hugging Face MoE checkpoint that quads.layers knows; --prompts gives
prompts of your own (.jsonl with `prompt` or `input_ids`), and without calibration.parquet in --data the static masks
are calibrated on the first prompts. `run` captures a finished run's checkpoint in its own engine and in BF16; `trained`
puts runs side by side. Differs from the numbers logged in training: one fixed set of tokens, every precision asked
about it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quads.config import Arm, ConfigError, Experiment, load_arm, load_arms, load_experiment, resolve_run
from quads.diagnostics.names import STUDIES
from quads.files import ResultFileError
from quads.integrations.vllm.generate import EngineError, prepare_environment
from quads.lifeline import watch_parents

log = logging.getLogger("quads.diagnose")


def main(argv: list[str] | None = None) -> int:
    """Parse, measure, write; 1 after an error that the message explains."""
    parser = argparse.ArgumentParser(prog="quads.diagnose", description="Diagnostics of the log-prob gap.")
    parser.add_argument("what", choices=("capture", *STUDIES, "run", "trained"), help="capture first, then any study")
    parser.add_argument("--experiment", type=Path, required=True, help="configs/NAME.yaml")
    parser.add_argument("--model", type=Path, help="capture, STUDY: Hugging Face checkpoint folder")
    parser.add_argument("--data", type=Path, help="folder of quads.prepare (eval.parquet, calibration.parquet)")
    parser.add_argument("--prompts", type=Path, help=".jsonl or .parquet in place of DATA/eval.parquet")
    parser.add_argument("--captures", type=Path, help="folder of `capture`")
    parser.add_argument("--modes", nargs="+", help="capture only these modes (ids as in the file names)")
    parser.add_argument("--arm", help="run: file stem under configs/arms")
    parser.add_argument("--seed", type=int, help="run: training seed")
    parser.add_argument("--train", type=Path, help="run: folder of quads.train")
    parser.add_argument("--runs", type=Path, nargs="+", help="trained: folders of `run`")
    parser.add_argument("--step0", type=Path, help="trained: folder with decomposition.csv, to show the start as well")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    needed = {"run": ("arm", "seed", "train", "data"), "trained": ("runs",)}.get(args.what, ("model",))
    if missing := [f"--{name}" for name in needed if getattr(args, name) is None]:
        parser.error(f"{args.what} needs {', '.join(missing)}")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    watch_parents()
    try:
        configs = args.experiment.parent
        experiment = load_experiment(args.experiment.stem, configs=configs)
        prepare_environment(experiment.runtime)
        if args.what == "run":
            run(experiment, load_arm(args.arm, configs=configs), args)
        elif args.what == "trained":
            trained(experiment, args)
        elif args.what == "capture":
            capture(experiment, load_arms(experiment, configs, more=True), args)
        else:
            study(experiment, load_arms(experiment, configs, more=True), args)
    except (ConfigError, ResultFileError, EngineError) as error:
        log.error("%s", error)
        return 1
    return 0


def capture(experiment: Experiment, arms: list[Any], args: argparse.Namespace) -> None:
    """Run the engines. Raises ConfigError when there are no prompts."""
    from quads.diagnostics import capture as captures
    from quads.diagnostics.prompts import calibration_ids, load_prompts

    source = args.prompts or (args.data / "eval.parquet" if args.data else None)
    if source is None:
        raise ConfigError("no prompts: give --prompts FILE or --data DIR")
    prompts = load_prompts(source, args.model, experiment.grpo.max_prompt_tokens)

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
        start=starter(experiment, args.out),
        versions=versions(),
    )


def starter(experiment: Experiment, out: Path) -> Any:
    """What starts a real engine; receipts lie in `out`."""
    from quads.diagnostics.capture import EngineMode
    from quads.integrations.vllm.score import ScoringEngine

    def start(mode: EngineMode, dtype: str, masks: Path | None, checkpoint: Path) -> ScoringEngine:
        receipt = out / f"receipt-{mode.id}-{dtype}.json"
        return ScoringEngine(
            checkpoint, mode.mode, experiment, masks=masks, skip=mode.skip, receipt=receipt, dtype=dtype
        )

    return start


def versions() -> dict[str, str]:
    """Of what decides a captured number."""
    return {name: version(name) for name in ("vllm", "torch", "transformers")}


def study(experiment: Experiment, arms: list[Any], args: argparse.Namespace) -> None:
    """Run one study. Raises ConfigError without captures."""
    if args.captures is None:
        raise ConfigError(f"study {args.what} needs --captures, the folder of `python -m quads.diagnose capture`")
    from quads.diagnostics.context import Context
    from quads.diagnostics.studies import STUDIES as FUNCTIONS
    from quads.diagnostics.write import write_study

    context = Context(experiment, arms, args.model, args.captures)
    write_study(FUNCTIONS[args.what](context), context, args.out, args.what)


def run(experiment: Experiment, arm: Arm, args: argparse.Namespace) -> None:
    """Capture and decompose one finished run."""
    from quads.diagnostics import capture as captures
    from quads.diagnostics import trained as after
    from quads.diagnostics.context import Context
    from quads.diagnostics.prompts import calibration_ids, load_prompts
    from quads.diagnostics.write import write_study

    found = after.TrainedRun.load(resolve_run(experiment, arm, args.seed), args.train)
    sized, folder = after.small(experiment), args.out / "captures"
    prompts = load_prompts(
        args.prompts or args.data / "eval.parquet", found.checkpoint, experiment.grpo.max_prompt_tokens
    )
    calibration = calibration_ids(args.data, prompts)
    captures.capture_all(
        found.modes,
        prompts,
        calibration,
        found.checkpoint,
        sized,
        folder,
        start=starter(sized, folder),
        versions=versions(),
        own_masks=found.own_masks,
        origin=found.origin,
    )
    context = Context(sized, [arm], found.checkpoint, folder, modes=found.modes)
    write_study(after.run_layers(context, found, calibration), context, args.out, "run_layers")
    write_study(after.run_study(context, found), context, args.out, "run")


def trained(experiment: Experiment, args: argparse.Namespace) -> None:
    """Tables and figures over the folders of `run`."""
    from quads.diagnostics import trained as after
    from quads.diagnostics.write import write_files

    source = after.sources(args.runs) | {
        "experiment": experiment.name,
        "settings": after.small(experiment).diagnostics.model_dump(mode="json"),
    }
    studies = after.collect(args.runs, args.step0)
    for name in ("trained_layers", "trained"):
        write_files(studies[name], source, args.out, name)


if __name__ == "__main__":
    sys.exit(main())
