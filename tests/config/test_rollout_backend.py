"""Backend and CUDA graphs of the rollout engine: refused early, in a run's hash only when not the default."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from quads.config import ConfigError, canonical_json, config_hash, load_arm, load_experiment, resolve_run
from quads.config.arms import Rac, RolloutPrecision
from quads.config.experiment import Runtime
from quads.config.run import not_capturable
from quads.kernels.backend import graph_safe
from quads.rollout.mode import BACKENDS, RolloutMode

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rollout_backend": "triton"}, r"rollout_backend=triton needs runtime\.device=cuda"),
        ({"rollout_backend": "native"}, r"rollout_backend=native needs runtime\.device=cuda"),
        ({"rollout_backend": "triton", "device": "cuda", "engine_dtype": "float32"}, "engine_dtype is float32"),
        ({"rollout_graphs": True, "device": "cuda"}, "another rollout_backend than reference"),
        ({"rollout_backend": "marlin"}, "'reference', 'triton', 'native' or 'cutlass'"),
    ],
)
def test_what_cannot_run_is_refused(fields, said):
    with pytest.raises(ValidationError, match=said):
        Runtime(**fields)


def test_what_can_run_is_accepted():
    assert Runtime(device="cuda", rollout_backend="triton", rollout_graphs=True).rollout_graphs
    assert Runtime.model_fields["rollout_backend"].annotation.__args__ == BACKENDS


def modes():
    pairs = [("bf16", "bf16"), ("fp8", "fp8"), ("nvfp4", "bf16"), ("nvfp4", "nvfp4")]
    plain = [RolloutPrecision(weight=w, activation=a) for w, a in pairs]
    racs = [Rac(mask=mask, granularity=g) for mask in ("static", "batch", "token") for g in ("block16", "channel")]
    return plain + [RolloutPrecision(weight="nvfp4", activation="nvfp4", rac=rac) for rac in racs]


@pytest.mark.parametrize("rollout", modes(), ids=lambda r: f"{r.mode} {r.rac}")
def test_the_rule_without_torch_is_the_engines_rule(rollout):
    mode = RolloutMode.from_dict(rollout.model_dump(mode="json"))
    safe, _ = graph_safe("triton", mode.activation, mode.rac)
    assert (not_capturable(rollout) is None) == safe


def run_of(arm="quads", **runtime):
    experiment = load_experiment("toy", CONFIGS)
    changed = experiment.runtime.model_copy(update={"device": "cuda"} | runtime)
    return resolve_run(experiment.model_copy(update={"runtime": changed}), load_arm(arm, CONFIGS), 0)


def test_graphs_with_an_arm_that_cannot_be_captured():
    experiment, arm = load_experiment("gpu_medium", CONFIGS), load_arm("quads", CONFIGS)
    batch = arm.rollout.rac.model_copy(update={"mask": "batch"})
    arm = arm.model_copy(update={"rollout": arm.rollout.model_copy(update={"rac": batch})})
    with pytest.raises(ConfigError, match=r"arm quads \(mode w4a4\+rac\) cannot be captured: a batch mask needs"):
        resolve_run(experiment, arm, 0)
    for name in ("bf16", "fp8", "w4a16", "quads"):
        assert run_of(name, rollout_backend="triton", rollout_graphs=True).runtime.rollout_graphs


@pytest.mark.parametrize(
    ("experiment", "known"),
    [
        ("toy", "quads-seed0-82135568a4"),
        ("toy_gpu", "quads-seed0-16f9d5bd82"),
        ("gpu_medium", "quads-seed0-01ae416712"),
    ],
)
def test_runs_keep_their_names(experiment, known):
    """A field that came later and says its default must not rename results that exist: see LATER in config/run.py.

    Change an id here only with a change that makes the run another one.
    """
    assert resolve_run(load_experiment(experiment, CONFIGS), load_arm("quads", CONFIGS), 0).id == known


def test_only_other_values_than_the_defaults_are_in_the_hash():
    ids = {run_of(**r).id for r in ({}, {"rollout_backend": "reference", "rollout_graphs": False})}
    assert len(ids) == 1
    ids |= {run_of(rollout_backend="triton").id, run_of(rollout_backend="triton", rollout_graphs=True).id}
    ids |= {run_of(chunked_head=False).id, run_of(chunked_head=True).id}
    assert len(ids) == 4
    # The hash of an experiment's runtime alone names the folder of its diagnostics.
    assert "rollout_" not in canonical_json(Runtime())
    assert json.loads(canonical_json(run_of(rollout_backend="triton")))["runtime"]["rollout_backend"] == "triton"
    assert config_hash(Runtime(device="cuda")) != config_hash(Runtime(device="cuda", rollout_backend="triton"))
