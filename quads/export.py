"""Stage: a trained arm as an NVFP4 checkpoint that other engines load, and the verifier of such checkpoints.

    python -m quads.export --train DIR --format compressed-tensors|modelopt --out DIR [--mode w4a16|w4a4]
    python -m quads.export --checkpoint DIR --arm quads --format ... --out DIR     any checkpoint, formats of the arm
    python -m quads.export verify DIR [--against CHECKPOINT|TRAIN_DIR] [--engine]

The mode is the arm's rollout: W4A4 needs static activation scales, calibrated on --calibration (default: the file that
the run's RAC masks were calibrated on). `verify` prints its report as JSON and exits with 1 when a check fails; with
--against it also compares log-probs, with --engine against real vLLM.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from quads.config import Arm, ConfigError, load_arm
from quads.exporting.folders import require_new, require_run
from quads.files import ResultFileError, read_result, write_json_atomic

log = logging.getLogger("quads.export")


def main(argv: list[str] | None = None) -> int:
    """Parse, export or verify; 1 after an error that the message explains, or a failed check."""
    argv = sys.argv[1:] if argv is None else argv
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        return _verify(argv[1:]) if argv[:1] == ["verify"] else _export(argv)
    except (ConfigError, ResultFileError, ValueError, OSError) as error:
        log.error("%s", error)
        return 1


def _export(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="quads.export", description="Write an NVFP4 checkpoint.", epilog="quads.export verify DIR: check one"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--train", type=Path, help="folder of quads.train")
    source.add_argument("--checkpoint", type=Path, help="Hugging Face checkpoint; needs --arm")
    parser.add_argument("--arm", help="file stem under configs/arms")
    parser.add_argument("--configs", type=Path, default=Path("configs"), help="folder of arms/")
    parser.add_argument("--format", required=True, choices=("compressed-tensors", "modelopt"))
    parser.add_argument("--mode", choices=("w4a16", "w4a4"), help="default: the arm's rollout mode")
    parser.add_argument("--calibration", type=Path, help="parquet with input_ids or prompt, for w4a4")
    parser.add_argument("--device", default="cpu", help="where calibration runs")
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    args = parser.parse_args(argv)
    if args.checkpoint and not args.arm:
        parser.error("--checkpoint needs --arm: which modules stay in high precision")
    require_new(args.out)
    if args.train:
        require_run(args.train)
    from quads.exporting.write import export

    said = export(_request(args), args.out)
    log.info("%s: %s, %s, %d matrices", args.out, said["format"], said["mode"], said["matrices"])
    if said["rac_left_out"]:
        log.warning(
            "warning: the arm's rollouts have RAC, %s does not: it holds plain %s weights, neither format can say RAC, "
            "and a stock engine serves it without RAC. See docs/export.md",
            args.out,
            said["mode"].upper(),
        )
    return 0


def _request(args: argparse.Namespace) -> Any:
    """What to export, from the command line and the run's own files."""
    from quads.exporting.activations import input_amax, read_tokens
    from quads.exporting.checkpoint import Checkpoint
    from quads.exporting.manifest import from_run
    from quads.exporting.write import Request

    manifest = masks = None
    calibration = args.calibration
    if args.train:
        result = read_result(args.train / "result.json", "training result", ("run", "checkpoint", "rac_masks"))
        if not isinstance(result["run"], dict) or "arm" not in result["run"]:
            raise ConfigError(f"{args.train / 'result.json'}: run.arm is missing; give --checkpoint DIR and --arm NAME")
        arm, checkpoint = Arm.model_validate(result["run"]["arm"]), Path(result["checkpoint"])
        manifest = from_run(args.train)
        masks = Path(result["rac_masks"]) if result["rac_masks"] else None
    else:
        arm, checkpoint = load_arm(args.arm, configs=args.configs), args.checkpoint
    if not checkpoint.is_dir():
        raise ConfigError(f"checkpoint {checkpoint} is missing; give its place with --checkpoint and --arm {arm.name}")
    Checkpoint(checkpoint)  # damaged files are named before anything is computed
    mode = args.mode or _mode(arm)
    if mode == "w4a4" and calibration is None and args.train:
        calibration = _calibration_of(args.train)
    request = Request(
        checkpoint=checkpoint,
        format=args.format,
        mode=mode,
        skip=arm.keep_high_precision,
        scale_group=arm.weight_scale_group,
        manifest=manifest,
        masks=masks if masks is not None and masks.is_file() else None,
        rac=arm.rollout.rac is not None,
    )
    if mode == "w4a16":
        return request
    if calibration is None or not calibration.is_file():
        said = f"{calibration} is missing" if calibration else "none were found beside the run's data"
        raise ConfigError(f"w4a4 needs calibration tokens; {said}. Give --calibration FILE.parquet, or --mode w4a16")
    tokens = read_tokens(calibration, checkpoint)
    amax = input_amax(checkpoint, tokens, request.skip, request.scale_group, args.device)
    said = f"{len(tokens)} sequences, {sum(map(len, tokens))} tokens of {calibration.parent.name}/{calibration.name}"
    return replace(request, amax=amax, calibration=said)


def _mode(arm: Arm) -> str:
    if arm.rollout.weight != "nvfp4":
        raise ConfigError(
            f"arm {arm.name} rolls out with {arm.rollout.weight} weights: nothing of it is NVFP4. To quantize its "
            "checkpoint all the same, say --mode w4a16 or --mode w4a4"
        )
    return arm.rollout.mode.removesuffix("+rac")


def _calibration_of(train: Path) -> Path | None:
    """calibration.parquet beside the data that the run was launched with, also where the results have moved since."""
    key = "data.train_files="
    launched = read_result(train / "launch.json", "launch file", ("overrides",), target=train / "result.json")
    said = next((Path(json.loads(o.removeprefix(key))) for o in launched["overrides"] if o.startswith(key)), None)
    if said is None:
        return None
    shared = train.resolve().parents[2] / "shared"  # results/<experiment>/train/<run>
    places = (said.parent, shared / said.parent.name)
    return next((f for f in (p / "calibration.parquet" for p in places) if f.is_file()), None)


def _verify(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="quads.export verify", description="Check an exported checkpoint.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--against", type=Path, help="checkpoint or train folder it was made from: bits and log-probs")
    parser.add_argument("--no-logprobs", action="store_true", help="weights only; log-probs need two models in memory")
    parser.add_argument("--engine", action="store_true", help="log-probs also against real vLLM with the plugin")
    parser.add_argument("--out", type=Path, help="also write the report here")
    args = parser.parse_args(argv)
    if args.engine and (args.no_logprobs or not args.against):
        parser.error("--engine compares log-probs and needs --against CHECKPOINT")
    if args.engine:
        from quads.config import Runtime
        from quads.integrations.vllm.generate import prepare_environment

        prepare_environment(Runtime())
    if args.against and (args.against / "result.json").is_file():
        args.against = Path(read_result(args.against / "result.json", "training result", ("checkpoint",))["checkpoint"])
    from quads.exporting.verify import verify

    report = verify(args.folder, args.against)
    if args.against and report.ok and not args.no_logprobs:
        _compare_logprobs(report, args)
    if args.out:
        write_json_atomic(args.out, report.to_dict())
    sys.stdout.write(json.dumps(report.to_dict(), indent=1) + "\n")
    return 0 if report.ok else 1


def _compare_logprobs(report: Any, args: argparse.Namespace) -> None:
    """Adds the findings "log-probs, trainer" and "log-probs, engine"."""
    from quads.exporting import parity
    from quads.exporting.checkpoint import Checkpoint, read_json
    from quads.exporting.write import MANIFEST

    skip = tuple(read_json(args.folder / MANIFEST)["export"]["skip"])
    config = Checkpoint(args.folder).config
    limit = config.get("max_position_embeddings", 64) - 1
    sequences = parity.random_sequences(config["vocab_size"], length=min(16, limit))
    found = {"trainer": parity.against_trainer(args.folder, args.against, skip, sequences)}
    if args.engine:
        receipt = args.folder.resolve().parent / f".{args.folder.name}.receipt.json"
        found["engine"] = parity.against_engine(args.folder, args.against, skip, sequences, receipt)
        receipt.unlink(missing_ok=True)
    for side, numbers in found.items():
        report.numbers |= {f"logprob_{side}_{k}": v for k, v in numbers.items()}
        largest, said = numbers["max_nats"], f"{numbers['tokens']:.0f} tokens, largest difference"
        bad = [] if largest <= parity.LIMIT_NATS else [f"{said} {largest:.3g} nats, allowed {parity.LIMIT_NATS:g}"]
        report.note(f"log-probs, {side}", bad, f"{said} {largest:.3g} nats")


if __name__ == "__main__":
    sys.exit(main())
