# SPDX-License-Identifier: Apache-2.0
"""A few GRPO steps at real size, timed by phase: the training stage without checkpoints, validation or tables.

    python -m quads.bench.real_train --experiment configs/real_size.yaml --arm quads --model DIR --data DIR
                                     --out FILE.json [--steps 5] [--compare-weights] [--profile N] [--set KEY=VALUE ...]
    -> FILE.json (quads.real_train/1): every step's phases, memory and gap as verl logged them, the decomposition of
       step 1 and of the last step, as a whole and by layer, receipt, surgery counts, the weight comparison where asked
       for; FILE.log

Same driver, worker, engine and plugin as `python -m quads.train`; `--set` hands more words to verl and `runtime.NAME=`
values of this experiment's runtime. Nothing resumes: a step here costs minutes, a checkpoint 12 bytes a parameter.
`--profile N` records the GPU kernels of the N-th step's update on rank 0 (quads.trainer.profile); that step is left out
of the medians. `--compare-weights` has every engine dump its weights at the start and the end (2 bytes a parameter and
GPU, on disk).
Differs from quads.train in what it leaves out, so its file is no result of a run and says so by its schema.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from quads.config import ConfigError, Run, Runtime, load_arm, load_experiment, resolve_run
from quads.config.errors import from_validation
from quads.diagnostics import during
from quads.files import ResultFileError, held, read_jsonl, require_writable, write_json_atomic
from quads.integrations.verl.launch import RaySession, TrainingError, run_driver
from quads.integrations.verl.overrides import TRAINER_MODE, RunPaths
from quads.lifeline import watch_parents
from quads.provenance import code_hash, commit, hardware, training_roots, versions
from quads.train import PACKAGES

log = logging.getLogger("quads.bench.real_train")

FIRST = 2  # the first step compiles kernels and allocates: it is reported, the medians leave it out


def words(steps: int, compare: bool, profile: int | None = None) -> list[str]:
    """What a benchmark changes in verl's configuration."""
    return [
        *([] if profile is None else [f"++actor_rollout_ref.quads.profile_update={profile}"]),
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
        "trainer.resume_mode=disable",
        f"++trainer.v1.{TRAINER_MODE}.compare_weights={compare}",
    ]


def with_runtime(runtime: Runtime, settings: list[str]) -> tuple[Runtime, list[str]]:
    """The settings with `runtime.NAME=value` applied, and the other words. Raises ConfigError naming what is wrong."""
    own = {}
    rest = []
    for word in settings:
        key, _, value = word.partition("=")
        if not key.startswith("runtime."):
            rest.append(word)
            continue
        name = key.removeprefix("runtime.")
        if name not in Runtime.model_fields:
            raise ConfigError(f"--set {word}: runtime has no {name}; known: {', '.join(Runtime.model_fields)}")
        try:
            own[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"--set {word}: {value!r} is no YAML value") from None
    try:
        return Runtime.model_validate({**runtime.model_dump(), **own}), rest
    except ValidationError as error:
        raise from_validation("--set", Runtime, error) from None


def medians(steps: list[dict[str, Any]], profiled: int | None = None) -> dict[str, float]:
    """Median of every timing and peak over the steps from FIRST on, without the profiled one where there are others."""
    later = [s for s in steps if s["step"] >= FIRST] or steps
    later = [s for s in later if s["step"] != profiled] or later
    keys = sorted({k for s in later for k in s if k.startswith(("timing_s/", "perf/"))})
    return {k: statistics.median([s[k] for s in later if k in s]) for k in keys}


def measured(out: Path) -> list[dict[str, Any]]:
    """verl's own records of the steps, numbers only."""
    files = sorted(out.glob("verl_metrics.*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()]
    found = [{"step": r["step"]} | {k: v for k, v in r["data"].items() if isinstance(v, int | float)} for r in rows]
    return [row for row in found if "timing_s/step" in row]


def decomposed(path: Path) -> list[dict[str, Any]]:
    """Rows of one of the decomposition's files; none where no step was measured."""
    return read_jsonl(path, ("step",)) if path.exists() else []


def bench(run: Run, model: Path, data: Path, place: Path, more: list[str], said: dict[str, Any]) -> dict[str, Any]:
    """Run and collect. What was measured before a failure is in the result, with the reason. Raises OSError."""
    began = time.time()
    ready: list[float] = []

    def on_row(row: dict[str, float]) -> None:
        ready.append(time.time() - began)
        log.info("%s step %d: %s", run.arm.name, int(row["step"]), {k: round(v, 4) for k, v in row.items()})

    failed = None
    checkpoints = place / "checkpoints"
    checkpoints.mkdir(parents=True)
    with held(checkpoints / ".lock", TrainingError(f"{checkpoints} is in use")) as lock, RaySession() as ray:
        try:
            run_driver(run, RunPaths(data, model, checkpoints, place, ray), on_row, lock, more)
        except TrainingError as error:
            failed = str(error)
        except SystemExit as ended:  # SIGTERM, a scheduler's limit: what was measured is kept
            failed = f"ended by a signal (exit status {ended.code})"
    steps = measured(place)
    files = {name: place / f"{name}.json" for name in ("receipt", "surgery", "delta_weight", "profile")}
    found = {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}
    receipt = found.get("receipt", {})
    return {
        "schema": "quads.real_train/1",
        "run": run.model_dump(mode="json"),
        **said,
        "failed": failed,
        "steps": steps,
        "medians": medians(steps, said["profiled_step"]) if steps else {},
        "decomposition": decomposed(place / during.FILE),
        "decomposition_layers": decomposed(place / during.LAYERS_FILE),
        "receipt": {k: receipt[k] for k in ("mode", "backend", "execution", "counts") if k in receipt},
        "surgery": found.get("surgery", {}).get("counts", {}),
        "delta_weight": found.get("delta_weight"),
        "profile": found.get("profile"),
        "seconds": {"first_step_after": ready[0] if ready else None, "total": time.time() - began},
        "hardware": hardware(),
        "versions": versions(*PACKAGES),
        "commit": commit(),
        "code_hash": code_hash(*training_roots(False), "quads.bench.real_train"),
    }


def checked(args: argparse.Namespace) -> tuple[Run, int, list[str]]:
    """The run, its number of steps and the words for verl. Raises ConfigError naming what cannot be run."""
    configs = args.experiment.parent
    experiment = load_experiment(args.experiment.stem, configs)
    runtime, more = with_runtime(experiment.runtime, args.set)
    run = resolve_run(experiment.model_copy(update={"runtime": runtime}), load_arm(args.arm, configs), 0)
    steps = experiment.grpo.steps if args.steps is None else args.steps
    if steps < 1:
        raise ConfigError(f"--steps {steps}: at least one step is needed")
    if args.profile is not None and not 1 <= args.profile <= steps:
        raise ConfigError(f"--profile {args.profile}: there are steps 1 to {steps}")
    if args.profile is not None and runtime.device != "cuda":
        raise ConfigError(f"--profile records GPU kernels, runtime.device is {runtime.device}")
    for folder, maker in ((args.model, "quads.bench.real_model"), (args.data, "quads.prepare")):
        if not (folder / "manifest.json").is_file():
            raise ConfigError(f"{folder} is no finished folder of {maker}: it has no manifest.json")
    return run, steps, more


def main(argv: list[str] | None = None) -> int:
    """Parse, run, write; 1 when the run failed (what it measured is written all the same)."""
    parser = argparse.ArgumentParser(prog="python -m quads.bench.real_train", description=__doc__.split("\n\n")[0])
    parser.add_argument("--experiment", type=Path, required=True, help="configs/NAME.yaml")
    parser.add_argument("--arm", required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder written by quads.bench.real_model")
    parser.add_argument("--data", type=Path, required=True, help="folder written by quads.prepare")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--steps", type=int, help="default: grpo.steps")
    parser.add_argument("--compare-weights", action="store_true", help="engine against trainer, element by element")
    parser.add_argument("--profile", type=int, metavar="N", help="kernels of the N-th step's update (GPU only)")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="runtime.NAME=..., or verl's own")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    watch_parents()
    try:
        run, steps, more = checked(args)
        require_writable(args.out)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="real-train-", dir=args.out.parent) as place:
            said = {"model": str(args.model), "planned_steps": steps, "profiled_step": args.profile, "set": args.set}
            words_ = [*words(steps, args.compare_weights, args.profile), *more]
            result = bench(run, args.model.resolve(), args.data.resolve(), Path(place).resolve(), words_, said)
            if (log_file := Path(place) / "train.log").exists():
                shutil.copy(log_file, args.out.with_suffix(".log"))
    except (ConfigError, ResultFileError, OSError) as error:
        log.error("%s", error)
        return 1
    write_json_atomic(args.out, result)
    if result["failed"]:
        log.error("%s", result["failed"])
    log.info("%s: %s", args.out, {k: round(v, 3) for k, v in result["medians"].items() if k.startswith("timing_s/")})
    return 1 if result["failed"] or len(result["steps"]) < steps else 0


if __name__ == "__main__":
    sys.exit(main())
