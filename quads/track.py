"""Stage: MLflow. Jobs write plain files; this stage imports them.

    python -m quads.track init --experiment configs/toy.yaml --out FILE
    python -m quads.track log --experiment configs/toy.yaml --arm quads --seed 0 --train DIR --eval DIR --out FILE
    python -m quads.track check --experiment configs/toy.yaml [--results results] [--mend]

FILE says where the run is in the store, or that tracking is switched off; it is written only after the store has it.
`log` may be repeated: the same results are found again, other results of the same arm and seed supersede them. It also
registers the run as a version of the model "quads-<experiment>-<arm>", with its quantization manifest.
`check` asks the store for the run behind every FILE of the experiment and fails when one is missing, deleted or
superseded there; with --mend it removes those files, so that the next workflow imports the runs again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

from quads import paths
from quads.comparison.differences import flatten
from quads.config import ConfigError, Experiment, Run, config_hash, load_arm, load_experiment, resolve_run
from quads.exporting import manifest
from quads.files import ResultFileError, read_jsonl, read_result, rebuild_command, write_json_atomic
from quads.integrations.mlflow import (
    Dataset,
    ModelVersion,
    Payload,
    TrackingError,
    content_hash,
    initialise,
    log_run,
    lost_runs,
)
from quads.paper.sources import check_evaluation

log = logging.getLogger("quads.track")

TRAIN_FILES = ("result.json", "history.jsonl", "run.json", "surgery.json", "receipt.json", "train.log")
EVAL_METRICS = ("pass_at_1", "ci_low", "ci_high", "tokens_mean", "truncated_share", "logprob_mean")


def main(argv: list[str] | None = None) -> int:
    """Parse, act, write FILE; 1 after an error that the message explains."""
    parser = argparse.ArgumentParser(prog="quads.track", description="Import results into MLflow.")
    commands = parser.add_subparsers(dest="command", required=True)
    init = commands.add_parser("init", help="create the store, once")
    log_one = commands.add_parser("log", help="import one run and its evaluation")
    check = commands.add_parser("check", help="compare the files of an experiment with the store")
    for command in (init, log_one, check):
        command.add_argument("--experiment", type=Path, required=True, help="configs/NAME.yaml")
    for command in (init, log_one):
        command.add_argument("--out", type=Path, required=True, help="file that says where the run is")
    check.add_argument("--results", type=Path, default=paths.RESULTS, help="root of all results")
    check.add_argument("--mend", action="store_true", help="remove files whose run the store does not have")
    log_one.add_argument("--arm", required=True, help="file stem under configs/arms")
    log_one.add_argument("--seed", type=int, required=True, help="training seed")
    log_one.add_argument("--train", type=Path, required=True, help="folder of quads.train")
    log_one.add_argument("--eval", type=Path, required=True, help="folder of quads.evaluate")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        if args.command == "check":
            return check_markers(args)
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
    log.info("%s: version %s of the registered model %s", run.id, logged.version, logged.model)
    return {
        "tracking": True,
        "uri": tracking.uri,
        "experiment_id": logged.experiment_id,
        "mlflow_run_id": logged.run_id,
        "model": logged.model,
        "version": logged.version,
        "content": payload.content,
    }


def check_markers(args: argparse.Namespace) -> int:
    """0 when the store has every run of which a file under results/<experiment>/mlflow says so."""
    experiment = load_experiment(args.experiment.stem, configs=args.experiment.parent)
    files = sorted((args.results / experiment.name / "mlflow").glob("*.json"))
    markers = {path: read_result(path, "tracking file", ("tracking",)) for path in files}
    told = {path: str(m["mlflow_run_id"]) for path, m in markers.items() if m["tracking"]}
    lost = lost_runs(experiment.tracking, sorted(set(told.values()))) if told else {}
    for path, run_id in told.items():
        if run_id not in lost:
            continue
        log.error("%s: MLflow run %s is %s", path, run_id, lost[run_id])
        if args.mend:
            path.unlink()
    if lost and args.mend:
        log.info("removed; `snakemake %s` imports these runs again", experiment.name)
    elif lost:
        log.error("run this again with --mend and then `snakemake %s` to import them again", experiment.name)
    else:
        log.info("the store has all %d runs", len(told))
    return 1 if lost and not args.mend else 0


def build_payload(experiment: Experiment, run: Run, train: Path, evaluation: Path) -> Payload:
    """What MLflow is told about one run. Raises ResultFileError or ConfigError for files that do not belong to it."""
    trained = read_result(train / "result.json", "training result", ("run_id", "code_hash", "commit", "delta_weight"))
    evaluated = read_result(evaluation / "result.json", "evaluation result", ("run_id", "eval_hash", "engines"))
    history = read_jsonl(train / "history.jsonl", ("step",), kind="training history", target=train / "result.json")
    for path, found in ((train, trained["run_id"]), (evaluation, evaluated["run_id"])):
        if found != run.id:
            raise ConfigError(f"{path / 'result.json'} is of run {found!r}, this configuration is {run.id!r}")
    check_evaluation(evaluated, experiment, train / "result.json", evaluation / "result.json")
    records = [evaluation / f"{engine}.jsonl" for engine in evaluated["engines"]]
    for path in records:
        if not path.is_file():
            raise ResultFileError(
                f"sample records {path}: missing. Rebuild them with: {rebuild_command(evaluation / 'result.json')}"
            )
    model, texts, checkpoint = _model(experiment, run, train, trained)
    files = [*TRAIN_FILES, *(trained[key] for key in ("decomposition", "decomposition_layers") if trained.get(key))]
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
            "quads.collapse": str((trained.get("collapse") or {}).get("verdict", "not judged")),
            **model.tags,
        },
        params=flatten({**run.model_dump(mode="json"), "evaluation": experiment.evaluation.model_dump(mode="json")}),
        steps=[(int(row["step"]), s, _numbers(row)) for row, s in zip(history, seconds, strict=True)],
        finals=_finals(trained, evaluated),
        artifacts={
            "train": [p for p in (train / name for name in files) if p.is_file()],
            "model": checkpoint,
            "eval": [evaluation / "result.json", *records, *sorted(evaluation.glob("receipt_*.json"))],
        },
        datasets=_datasets(experiment, run, evaluated),
        content=content_hash(
            [train / name for name in ("result.json", "history.jsonl", "surgery.json", "receipt.json")]
            + [evaluation / "result.json", *records]
        ),
        texts=texts,
        model=model,
    )


def _model(experiment: Experiment, run: Run, train: Path, trained: dict[str, Any]) -> tuple[Any, dict[str, str], list]:
    """The registered version, texts and files of the artifact folder `model`.

    A checkpoint up to tracking.upload_checkpoint_mib is copied there; of a larger one only its place is kept. One that
    is gone is no error: the numbers of the run are complete without it.
    """
    formats = manifest.from_run(train)
    folder = Path(trained["checkpoint"])
    files = sorted(p for p in folder.glob("*") if p.is_file()) if folder.is_dir() else []
    size = sum(p.stat().st_size for p in files)
    state = "referenced" if files else "missing"
    if files and size <= experiment.tracking.upload_checkpoint_mib * 2**20:
        state = "uploaded"
    if state == "missing":
        log.warning("%s: checkpoint %s is gone; the model is registered without it", run.id, folder)
    kept = files if state == "uploaded" else []
    reference = {
        "uri": folder.resolve().as_uri(),
        "state": state,
        "bytes": size,
        "files": {p.name: p.stat().st_size for p in files},
        # hashing what is not copied would read a large model for nothing
        "sha256": {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in kept},
        "rac_masks": trained.get("rac_masks"),
    }
    texts = {
        "model/quantization_manifest.json": formats.to_json(),
        "model/checkpoint.json": json.dumps(reference, indent=1) + "\n",
    }
    version = ModelVersion(
        name=f"quads-{experiment.name}-{run.arm.name}",
        title=f"{run.arm.title}, experiment {experiment.name}: one version per run",
        description=f"{run.id}: {formats.mode} ({state} checkpoint); formats in model/quantization_manifest.json",
        alias=f"seed{run.seed}",
        source="model",
        tags={
            "quads.run_id": run.id,
            "quads.seed": str(run.seed),
            "quads.config_hash": config_hash(run),
            "quads.checkpoint": state,
            "quads.checkpoint_uri": reference["uri"],
            **formats.tags(),
        },
    )
    return version, texts, kept


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
    for name in ("alarm_step", "gap_alarm_step"):
        if (trained.get("collapse") or {}).get(name) is not None:
            out[f"collapse.{name}"] = float(trained["collapse"][name])
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
