"""Stage: MLflow. Jobs write plain files; this stage imports them.

    python -m quads.track init --experiment configs/toy.yaml --out FILE
    python -m quads.track log --experiment configs/toy.yaml --arm quads --seed 0 --train DIR --eval DIR --out FILE

FILE says where the run is in the store, or that tracking is switched off; it is written only after the store has it.
`log` may be repeated: the same results are found again, other results of the same arm and seed supersede them.
"""

from __future__ import annotations

import argparse
import logging
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

from quads import paths
from quads.config import ConfigError, Experiment, Run, config_hash, load_arm, load_experiment, resolve_run
from quads.files import ResultFileError, read_jsonl, read_result, rebuild_command, write_json_atomic
from quads.integrations.mlflow import Dataset, Payload, TrackingError, content_hash, flatten, initialise, log_run

log = logging.getLogger("quads.track")

TRAIN_FILES = ("result.json", "history.jsonl", "run.json", "surgery.json", "receipt.json", "train.log")
EVAL_METRICS = ("pass_at_1", "ci_low", "ci_high", "tokens_mean", "truncated_share", "logprob_mean")


def main(argv: list[str] | None = None) -> int:
    """Parse, act, write FILE; 1 after an error that the message explains."""
    parser = argparse.ArgumentParser(prog="quads.track", description="Import results into MLflow.")
    commands = parser.add_subparsers(dest="command", required=True)
    init = commands.add_parser("init", help="create the store, once")
    log_one = commands.add_parser("log", help="import one run and its evaluation")
    for command in (init, log_one):
        command.add_argument("--experiment", type=Path, required=True, help="configs/NAME.yaml")
        command.add_argument("--out", type=Path, required=True, help="file that says where the run is")
    log_one.add_argument("--arm", required=True, help="file stem under configs/arms")
    log_one.add_argument("--seed", type=int, required=True, help="training seed")
    log_one.add_argument("--train", type=Path, required=True, help="folder of quads.train")
    log_one.add_argument("--eval", type=Path, required=True, help="folder of quads.evaluate")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        write_json_atomic(args.out, act(args))
    except (ConfigError, ResultFileError, TrackingError) as error:
        log.error("%s", error)
        return 1
    return 0


def act(args: argparse.Namespace) -> dict[str, Any]:
    """Do what the command line says; what FILE then says."""
    configs = args.experiment.parent
    experiment = load_experiment(args.experiment.stem, configs=configs)
    tracking = experiment.tracking
    if not tracking.enabled:
        said = f"tracking.enabled is false in {args.experiment}"
        log.info("%s: nothing is sent to MLflow", said)
        return {"tracking": False, "why": said}
    if args.command == "init":
        return {"tracking": True, **initialise(tracking)}
    run = resolve_run(experiment, load_arm(args.arm, configs=configs), args.seed)
    payload = build_payload(experiment, run, args.train, args.eval)
    logged = log_run(tracking, experiment.name, experiment.title, payload)
    log.info("%s: %s MLflow run %s", run.id, logged.action, logged.run_id)
    return {"tracking": True, "uri": tracking.uri, "mlflow_run_id": logged.run_id, "content": payload.content}


def build_payload(experiment: Experiment, run: Run, train: Path, evaluation: Path) -> Payload:
    """What MLflow is told about one run. Raises ResultFileError or ConfigError for files that do not belong to it."""
    trained = read_result(train / "result.json", "training result", ("run_id", "code_hash", "commit", "delta_weight"))
    evaluated = read_result(evaluation / "result.json", "evaluation result", ("run_id", "eval_hash", "engines"))
    history = read_jsonl(train / "history.jsonl", ("step",), kind="training history", target=train / "result.json")
    for path, found in ((train, trained["run_id"]), (evaluation, evaluated["run_id"])):
        if found != run.id:
            raise ConfigError(f"{path / 'result.json'} is of run {found!r}, this configuration is {run.id!r}")
    records = [evaluation / f"{engine}.jsonl" for engine in evaluated["engines"]]
    for path in records:
        if not path.is_file():
            raise ResultFileError(
                f"sample records {path}: missing. Rebuild them with: {rebuild_command(evaluation / 'result.json')}"
            )
    seconds = accumulate(float(row.get("seconds") or 0.0) for row in history)
    return Payload(
        key=f"{experiment.name}/{run.arm.name}/seed{run.seed}",
        name=run.id,
        tags={
            "quads.experiment": experiment.name,
            "quads.arm": run.arm.name,
            "quads.seed": str(run.seed),
            "quads.config_hash": config_hash(run),
            "quads.code_hash": str(trained["code_hash"]),
            "quads.eval_hash": str(evaluated["eval_hash"]),
            "quads.rollout_mode": run.arm.rollout.mode,
            "mlflow.source.git.commit": str(trained["commit"]),
            "mlflow.source.name": "quads.train",
            "mlflow.note.content": run.arm.title,
        },
        params=flatten({**run.model_dump(mode="json"), "evaluation": experiment.evaluation.model_dump(mode="json")}),
        steps=[(int(row["step"]), s, _numbers(row)) for row, s in zip(history, seconds, strict=True)],
        finals=_finals(trained, evaluated),
        artifacts={
            "train": [p for p in (train / name for name in TRAIN_FILES) if p.is_file()],
            "eval": [evaluation / "result.json", *records, *sorted(evaluation.glob("receipt_*.json"))],
        },
        datasets=_datasets(experiment, run, evaluated),
        content=content_hash([train / "result.json", train / "history.jsonl", evaluation / "result.json", *records]),
    )


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    """The metrics of one history line; null (not finite) is left out."""
    kept = {k: v for k, v in row.items() if k != "step" and isinstance(v, int | float) and not isinstance(v, bool)}
    return {k: float(v) for k, v in kept.items()}


def _finals(trained: dict[str, Any], evaluated: dict[str, Any]) -> dict[str, float]:
    """Metrics of the whole run: accuracies through each engine, and weights that differ between trainer and engine."""
    out = {
        f"eval.{engine}.{name}": float(entry[name])
        for engine, entry in evaluated["engines"].items()
        for name in EVAL_METRICS
        if entry.get(name) is not None
    }
    for engine, entry in evaluated["engines"].items():
        scores = {name: found["pass_at_1"] for name, found in entry.get("benchmarks", {}).items()}
        if entry.get("macro"):
            scores["macro_average"] = entry["macro"]["average"]
        out |= {f"eval.{engine}.{name}": float(score) for name, score in scores.items()}
    delta = trained["delta_weight"]
    if delta is not None:
        out |= {f"delta_weight.{k}": float(delta[k]) for k in ("elements", "different", "max_abs")}
    return out


def _datasets(experiment: Experiment, run: Run, evaluated: dict[str, Any]) -> list[Dataset]:
    """Training data by the hash of its configuration, evaluation data by the hash of its rows (if recorded)."""
    folder = paths.data_dir(experiment)
    out = [Dataset("train", config_hash(run.data), str(folder / "train.parquet"), "training")]
    if evaluated.get("data_sha256"):
        out.append(Dataset("eval", evaluated["data_sha256"], str(folder / "eval.parquet"), "evaluation"))
    return out


if __name__ == "__main__":
    sys.exit(main())
