"""Runtime fields that say how the trainer computes: checked together, and absent from the hash where bits are equal."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from quads.config import load_arm, load_experiment, resolve_run
from quads.config.experiment import Runtime

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def test_backend_and_experts_are_checked():
    with pytest.raises(ValidationError, match=r"trainer_backend=triton needs runtime\.device=cuda"):
        Runtime(trainer_backend="triton")
    with pytest.raises(ValidationError, match="grouped multiplies bfloat16, compute_dtype is float32"):
        Runtime(trainer_experts="grouped")
    assert Runtime(device="cuda", trainer_backend="triton", trainer_experts="grouped", compute_dtype="bfloat16")


@pytest.mark.parametrize(("text", "want"), [("on", "on"), ("off", "off"), ('"off"', "off"), ("verify", "verify")])
def test_bare_yaml_words(text, want):
    assert Runtime(**yaml.safe_load(f"weight_cache: {text}")).weight_cache == want


def test_what_changes_no_bit_is_not_in_the_hash():
    experiment, arm = load_experiment("toy", CONFIGS), load_arm("quads", CONFIGS)

    def run_id(**runtime):
        gpu = {"device": "cuda", "compute_dtype": "bfloat16"}
        changed = experiment.runtime.model_copy(update=gpu | runtime)
        return resolve_run(experiment.model_copy(update={"runtime": changed}), arm, 0).id

    assert run_id(weight_cache="verify") == run_id(trainer_backend="triton") == run_id()
    assert run_id(trainer_experts="grouped") != run_id()
