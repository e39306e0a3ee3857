"""Stage: train one arm with one seed by GRPO, through verl with vLLM rollouts.

    python -m quads.train --experiment configs/toy.yaml --arm quads --seed 0 --data DIR --model DIR \
        --checkpoints DIR --out DIR

Contract: resumes from the newest usable checkpoint under --checkpoints that belongs to the same resolved config and
code; others are moved aside, never deleted (quads.integrations.verl.checkpoints). Writes OUT/run.json (resolved
config), history.jsonl (one row per step), decomposition.jsonl and decomposition_layers.jsonl
(quads.diagnostics.during), surgery.json, receipt.json, delta_weight.json, train.log (appended per attempt) and, last,
OUT/result.json. Every step passes the collapse detector, which warns; with grpo.stop_on_collapse the run ends with the
step that collapses, and running again adds none.
Stops with a reason if the plugin did not load, if the engine's mode is not the arm's, if a step is missing from the
history, or if the engine's weights differ from a QAT trainer's.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quads.config import ConfigError, Run, config_hash, load_arm, load_experiment, model_hash, resolve_run
from quads.diagnostics import during
from quads.diagnostics.collapse import STOPPING, Detector, judge
from quads.files import (
    ResultFileError,
    append_jsonl,
    held,
    read_jsonl,
    read_result,
    write_json_atomic,
    write_text_atomic,
)
from quads.integrations.verl.checkpoints import claim, is_complete
from quads.integrations.verl.history import history_row, merge
from quads.integrations.verl.launch import MetricsTail, RaySession, TrainingError, run_driver
from quads.integrations.verl.overrides import RunPaths
from quads.integrations.vllm.execution import mismatch
from quads.lifeline import watch_parents
from quads.provenance import code_hash, commit, hardware, training_roots, versions

log = logging.getLogger("quads.train")

# Longer than an attempt that was killed needs to see it and to end its engine and workers (quads.lifeline).
LOCK_WAIT_S = 20.0
PACKAGES = ("torch", "verl", "vllm", "transformers", "ray", "tensordict", "TransferQueue")


@contextmanager
def locked(checkpoints: Path, wait_s: float = 0.0) -> Iterator[int]:
    """Hold the checkpoint folder: a second trainer of the same run (an orphan, a double submission) must not start."""
    in_use = TrainingError(
        f"{checkpoints} is in use by another training process; wait for it or stop it, then run again"
    )
    with held(checkpoints / ".lock", in_use, wait_s) as lock:
        yield lock


def write_history(path: Path, rows: list[dict[str, float]]) -> None:
    """Replace the history by `rows`, one JSON object per line."""
    write_text_atomic(path, "".join(json.dumps(r) + "\n" for r in rows))


def check_made_for(folder: Path, want: str) -> None:
    """Raises ConfigError when data or a warm checkpoint were made with other settings than this run's."""
    found = read_result(folder / "manifest.json", "manifest", ["config_hash"])["config_hash"]
    if found != want:
        raise ConfigError(
            f"{folder} was made with config hash {found}, this run needs {want}; give the folder that Snakemake makes "
            "for this experiment, or make it with quads.prepare and quads.warmup"
        )


def logged_rows(out: Path) -> list[dict[str, float]]:
    """History rows of all attempts in this folder, by step, from verl's own logs (whose last line may be torn)."""
    rows = []
    attempts = sorted(out.glob("verl_metrics.*.jsonl"), key=lambda p: int(p.name.split(".")[1]))
    for attempt in attempts:
        try:
            rows += [history_row(record) for record in MetricsTail(attempt).read()]
        except KeyError as error:
            # Written by other code, whose checkpoints are moved aside anyway; failing here would fail every retry.
            log.warning("%s is of other code and is left out: %s", attempt, error)
    return merge(rows)


def start_history(run: Run, code: str, paths: RunPaths) -> int:
    """Claim the checkpoints, rewrite history.jsonl up to the resume step, drop what former attempts left; the step."""
    rows = logged_rows(paths.out)
    stamp = {"config_hash": config_hash(run), "code_hash": code}
    resumed = claim(paths.checkpoints, stamp, {int(r["step"]) for r in rows if "reward" in r})
    if not resumed:
        for attempt in paths.out.glob("verl_metrics.*.jsonl"):
            attempt.rename(attempt.with_suffix(".lost"))
    kept = [r for r in rows if r["step"] <= resumed] if resumed else []
    write_history(paths.out / "history.jsonl", kept)
    during.keep_until(paths.out, resumed)
    for name in ("receipt.json", "surgery.json", "delta_weight.json", "engine_weights.safetensors"):
        (paths.out / name).unlink(missing_ok=True)
    return resumed


class Progress:
    """Appends history rows, logs one line per step with an ETA, and warns once when the run collapses."""

    def __init__(self, path: Path, run: Run, resumed: int) -> None:
        self.path, self.run, self.resumed, self.start = path, run, resumed, 0.0
        self.detector = judge(read_jsonl(path, ("step",)) if path.exists() else [], run.collapse)

    def _judge(self, row: dict[str, float]) -> None:
        known = len(self.detector.alarms)
        self.detector.update(int(row["step"]), row["reward"], row["gap_mean"])
        for alarm in self.detector.alarms[known:]:
            level = logging.INFO if alarm.kind == "recovered" else logging.WARNING
            log.log(level, "%s %s at step %d: %s", self.run.arm.name, alarm.kind, alarm.step, alarm.why)

    def __call__(self, row: dict[str, float]) -> None:
        # null is this project's mark for not finite: NaN is no JSON.
        append_jsonl(self.path, {k: v if math.isfinite(v) else None for k, v in row.items()})
        step, steps = int(row["step"]), self.run.grpo.steps
        if "reward" not in row:
            self.start = time.monotonic()
            log.info("%s ready at step %d, accuracy in its own engine %.3f", self.run.id, step, row["eval_accuracy"])
            return
        pace = (time.monotonic() - self.start) / max(step - self.resumed, 1)
        log.info(
            "%s-seed%d step %d/%d reward %.3f gap %.4f max %.2f k3 %.4f clipped %.3f %.0f tok/s %.1f s/step ETA %d s%s",
            self.run.arm.name,
            self.run.seed,
            step,
            steps,
            row["reward"],
            row["gap_mean"],
            row["gap_max"],
            row["k3"],
            row["clipped_share"],
            row["tokens_per_s"],
            pace,
            round(pace * (steps - step)),
            f" accuracy {row['eval_accuracy']:.3f}" if "eval_accuracy" in row else "",
        )
        self._judge(row)


def check_history(path: Path, steps: int) -> list[dict[str, float]]:
    """The merged history, rewritten in step order. Raises TrainingError naming the steps that are missing."""
    rows = merge(read_jsonl(path, ["step"], target=path.with_name("result.json")))
    have = {int(r["step"]) for r in rows if "reward" in r or r["step"] == 0}
    missing = [s for s in range(steps + 1) if s not in have]
    if missing:
        raise TrainingError(f"{path}: steps {missing} are missing although training ended; run the stage again")
    write_history(path, rows)
    return rows


def check_receipt(run: Run, path: Path) -> dict[str, Any]:
    """The plugin's receipt. Raises TrainingError if it is missing, of another mode or of another backend."""
    if not path.exists():
        raise TrainingError(f"{path} is missing: the vLLM plugin `quads` was not loaded by the rollout engine")
    receipt: dict[str, Any] = json.loads(path.read_text())
    if receipt["mode"] != run.arm.rollout.mode:
        raise TrainingError(f"{path}: engine mode {receipt['mode']!r}, the arm asks for {run.arm.rollout.mode!r}")
    if wrong := mismatch(receipt, run.runtime):
        raise TrainingError(f"{path}: {wrong}")
    return receipt


def check_delta_weight(run: Run, path: Path) -> dict[str, Any]:
    """The weight comparison. Raises TrainingError if a QAT trainer and its engine hold different weights."""
    if not path.exists():
        raise TrainingError(f"{path} is missing: the engine's weights were not compared with the trainer's")
    report: dict[str, Any] = json.loads(path.read_text())
    if run.arm.trainer.weight == run.arm.rollout.weight and report["different"]:
        raise TrainingError(
            f"{path}: {report['different']} of {report['elements']} weights differ between trainer and engine "
            f"(max {report['max_abs']:.3g}), although both are {run.arm.trainer.weight}; delta_weight must be 0"
        )
    return report


def stopped_at(run: Run, verdict: Detector) -> int | None:
    """The step that ended the run before its planned last one, or None."""
    step = verdict.first(*STOPPING) if run.grpo.stop_on_collapse else None
    return None if step is None or step >= run.grpo.steps else step


def check_decomposition(run: Run, out: Path, steps: int, name: str = during.FILE) -> str | None:
    """The name of one of the decomposition's files, None when it is off. Raises TrainingError naming steps it lacks."""
    due = [s for s in range(1, steps + 1) if during.due(s, run.decompose_every, run.grpo.steps)]
    if not due:
        return None
    path = out / name
    found = {r["step"] for r in read_jsonl(path, ("step",), kind="decomposition", target=out / "result.json")}
    if missing := sorted(set(due) - found):
        raise TrainingError(f"{path}: the decomposition of steps {missing} is missing; run the stage again")
    return path.name


def train(run: Run, paths: RunPaths, lock: int) -> dict[str, Any]:
    """Run the driver, check what it left, and return the result record."""
    started, code = time.time(), code_hash(*training_roots(bool(run.data.sets)))
    write_json_atomic(paths.out / "run.json", run.model_dump(mode="json"))
    resumed = start_history(run, code, paths)
    if resumed:
        log.info("%s resumes from step %d of %d", run.id, resumed, run.grpo.steps)
    history = paths.out / "history.jsonl"
    run_driver(run, paths, Progress(history, run, resumed), lock)
    verdict = judge(read_jsonl(history, ("step",)), run.collapse)
    stopped = stopped_at(run, verdict)
    steps = run.grpo.steps if stopped is None else stopped
    rows = check_history(history, steps)
    receipt = check_receipt(run, paths.out / "receipt.json")
    last = paths.checkpoints / f"global_step_{steps}"
    if not is_complete(last):
        raise TrainingError(f"{last} is not a complete checkpoint although training ended; run the stage again")
    hf = last / "actor" / "huggingface"
    masks = paths.checkpoints / "rac_masks.safetensors"
    return {
        "run": run.model_dump(mode="json"),
        "run_id": run.id,
        "config_hash": config_hash(run),
        "code_hash": code,
        "commit": commit(),
        "steps": steps,
        "planned_steps": run.grpo.steps,
        "stopped": None if stopped is None else f"{verdict.kind_at(stopped)} at step {stopped}",
        "collapse": verdict.to_dict(),
        "decomposition": check_decomposition(run, paths.out, steps),
        "decomposition_layers": check_decomposition(run, paths.out, steps, during.LAYERS_FILE),
        "checkpoint": str(hf),
        "rac_masks": str(masks) if masks.exists() else None,
        "old_log_probs": run.arm.correction.old_log_probs,
        "seconds": {"wall_last_attempt": time.time() - started, "steps": sum(r.get("seconds", 0.0) for r in rows)},
        "receipt": {k: receipt[k] for k in ("mode", "backend", "execution", "backend_check", "counts") if k in receipt},
        "delta_weight": check_delta_weight(run, paths.out / "delta_weight.json"),
        "hardware": hardware(),
        "versions": versions(*PACKAGES),
        "attempts": sum(1 for _ in paths.out.glob("verl_metrics.*")),
        "resumed_from": resumed,
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The stage's arguments."""
    parser = argparse.ArgumentParser(prog="python -m quads.train", description=__doc__.splitlines()[0])
    parser.add_argument("--experiment", type=Path, required=True, help="configs/NAME.yaml")
    parser.add_argument("--arm", required=True, help="file stem under configs/arms")
    parser.add_argument("--seed", type=int, required=True)
    for name in ("data", "model", "checkpoints", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Resolve the run, train it, write result.json last; 1 with a message on a known error."""
    args = parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stdout)
    watch_parents()
    try:
        configs = args.experiment.parent
        experiment = load_experiment(args.experiment.stem, configs)
        run = resolve_run(experiment, load_arm(args.arm, configs), args.seed)
        check_made_for(args.data, config_hash(run.data))
        check_made_for(args.model, model_hash(run))
        args.out.mkdir(parents=True, exist_ok=True)
        with locked(args.checkpoints, LOCK_WAIT_S) as lock, RaySession() as ray:
            places = [p.resolve() for p in (args.data, args.model, args.checkpoints, args.out)]
            result = train(run, RunPaths(*places, ray), lock)
        write_json_atomic(args.out / "result.json", result)
    except (ConfigError, ResultFileError, TrainingError, OSError) as error:
        log.error("%s", error)
        return 1
    log.info("%s done: %s", run.id, args.out / "result.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
