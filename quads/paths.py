"""Where every result lies: the one home of path names, used by the rules and by stages that look for siblings.

    results/shared/data-<hash>/                   hash over Data
    results/shared/benchmarks-<hash>/             hash over Data, Benchmarks
    results/shared/model-<hash>/                  hash over Model, Data, Warmup (a pretrained one: Model)
    results/shared/tracking-<hash>.json           hash over Tracking: the store is initialised
    results/<experiment>/train/<run id>/          run id = <arm>-seed<seed>-<hash over Run>
    results/<experiment>/checkpoints/<run id>/    never an output: survives a failed job
    results/<experiment>/samples/<run id>/        never an output: generation cache, keyed by what decides a sample
    results/<experiment>/eval/<run id>-<hash over Evaluation>/
    results/<experiment>/mlflow/<run id>-<hash over Evaluation>.json
    results/<experiment>/export/<run id>-<format>/    NVFP4 checkpoint, and .json: what was verified
    results/<experiment>/diagnose-<hash>/         hash over Model, Data, Warmup, Grpo, Runtime, Diagnostics
    results/<experiment>/preflight-<hash>/        the model's hash
    results/<experiment>/throughput/*.json        rollout benchmarks, put there by whoever has the hardware
    results/<experiment>/report[_all]/

Contract: a path holds the hash of exactly the configuration that decides its content, so that editing one setting
moves the results it changes and leaves every other where it is.
"""

from __future__ import annotations

from pathlib import Path

from quads.config import Experiment, Run, config_hash, model_hash

RESULTS = Path("results")


def eval_hash(experiment: Experiment) -> str:
    """Ten hex digits over the evaluation settings."""
    return config_hash(experiment.evaluation)


def data_dir(experiment: Experiment, results: Path = RESULTS) -> Path:
    """Prepared data, shared by experiments with the same `data`."""
    return results / "shared" / f"data-{config_hash(experiment.data)}"


def benchmarks_dir(experiment: Experiment, results: Path = RESULTS) -> Path:
    """Benchmarks made offline, shared by experiments with the same `data` and `evaluation.benchmarks`."""
    return results / "shared" / f"benchmarks-{config_hash(experiment.data, experiment.evaluation.benchmarks)}"


def samples_dir(experiment: Experiment, run: Run, results: Path = RESULTS) -> Path:
    """Samples of one training run under any evaluation settings (quads.evaluation.generations)."""
    return results / experiment.name / "samples" / run.id


def model_dir(experiment: Experiment, results: Path = RESULTS) -> Path:
    """Start checkpoint, shared by experiments with the same `model`, `data` and `warmup`."""
    return results / "shared" / f"model-{model_hash(experiment)}"


def tracking_marker(experiment: Experiment, results: Path = RESULTS) -> Path:
    """Written once the tracking store is initialised.

    The marker and not the database is the rule's output: Snakemake deletes outputs before it runs a rule again.
    """
    return results / "shared" / f"tracking-{config_hash(experiment.tracking)}.json"


def train_dir(experiment: Experiment, run: Run, results: Path = RESULTS) -> Path:
    """Outputs of one training run."""
    return results / experiment.name / "train" / run.id


def checkpoint_dir(experiment: Experiment, run: Run, results: Path = RESULTS) -> Path:
    """Checkpoints of one training run."""
    return results / experiment.name / "checkpoints" / run.id


def eval_dir(experiment: Experiment, run: Run, results: Path = RESULTS) -> Path:
    """Records and summary of one run's evaluation."""
    return results / experiment.name / "eval" / f"{run.id}-{eval_hash(experiment)}"


def tracked_file(experiment: Experiment, run: Run, results: Path = RESULTS) -> Path:
    """Written once a run and its evaluation are in the tracking store."""
    return results / experiment.name / "mlflow" / f"{run.id}-{eval_hash(experiment)}.json"


def report_dir(experiment: Experiment, *, more: bool = False, results: Path = RESULTS) -> Path:
    """Tables and figures of `arms`, or with `more` of all arms."""
    return results / experiment.name / ("report_all" if more else "report")


def throughput_dir(experiment: Experiment, results: Path = RESULTS) -> Path:
    """Rollout benchmarks (quads.rollout_bench/1) that the report takes in."""
    return results / experiment.name / "throughput"


def diagnose_hash(experiment: Experiment) -> str:
    """Ten hex digits over what captures and studies depend on; the arms are a parameter of the rules instead."""
    e = experiment
    return config_hash(e.model, e.data, e.warmup, e.grpo, e.runtime, e.diagnostics)


def diagnose_dir(experiment: Experiment, results: Path = RESULTS) -> Path:
    """Captures and step-0 studies of the warm checkpoint (quads.diagnose)."""
    return results / experiment.name / f"diagnose-{diagnose_hash(experiment)}"


def preflight_dir(experiment: Experiment, results: Path = RESULTS) -> Path:
    """Pre-flight of the start checkpoint (quads.preflight)."""
    return results / experiment.name / f"preflight-{model_hash(experiment)}"
