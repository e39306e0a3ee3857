"""Typed, closed, frozen configuration: the only home of defaults (no torch here).

`Experiment` is what a YAML file under configs/ says; `Run` is one arm with one seed, fully resolved: the unit that
is trained, hashed and saved beside its result.
"""

from quads.config.arms import Arm, Correction, Rac, RolloutPrecision, TrainerPrecision
from quads.config.diagnostics import Collapse, Diagnostics
from quads.config.errors import ConfigError
from quads.config.experiment import (
    Benchmarks,
    Checkpoint,
    Data,
    Evaluation,
    Experiment,
    Grpo,
    Model,
    Outliers,
    Runtime,
    Tracking,
    Warmup,
)
from quads.config.load import load_arm, load_arms, load_experiment, load_experiments
from quads.config.preflight import Preflight
from quads.config.run import Run, canonical_json, config_hash, model_hash, resolve_run

__all__ = [
    "Arm",
    "Benchmarks",
    "Checkpoint",
    "Collapse",
    "ConfigError",
    "Correction",
    "Data",
    "Diagnostics",
    "Evaluation",
    "Experiment",
    "Grpo",
    "Model",
    "Outliers",
    "Preflight",
    "Rac",
    "RolloutPrecision",
    "Run",
    "Runtime",
    "Tracking",
    "TrainerPrecision",
    "Warmup",
    "canonical_json",
    "config_hash",
    "load_arm",
    "load_arms",
    "load_experiment",
    "load_experiments",
    "model_hash",
    "resolve_run",
]
