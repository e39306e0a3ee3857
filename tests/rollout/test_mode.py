"""RolloutMode: known modes, closed config, round trip through the plain dict an engine receives."""

import json

import pytest

from quads.config import Arm
from quads.numerics.rac import RacSpec
from quads.rollout.mode import EngineConfig, RolloutMode

RAC = RacSpec(0.5, "block16", "static", "sumsq")


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        (RolloutMode(), "bf16"),
        (RolloutMode("fp8", "fp8"), "fp8"),
        (RolloutMode("nvfp4", "bf16"), "w4a16"),
        (RolloutMode("nvfp4", "nvfp4", scale_group="shard"), "w4a4"),
        (RolloutMode("nvfp4", "nvfp4", RacSpec(0.25, mask="token")), "w4a4+rac"),
    ],
)
def test_round_trip(mode, name):
    config = mode.to_quantization_config(skip=("layers.0",), receipt="r.json")
    assert mode.name == name
    assert RolloutMode.from_quantization_config(json.loads(json.dumps(config))) == mode
    assert EngineConfig.from_dict(config) == EngineConfig(mode, None, ("layers.0",), "r.json")


def test_from_arm():
    arm = Arm(name="x", title="x", rollout={"weight": "nvfp4", "activation": "nvfp4", "rac": {"k": 0.5}})
    assert RolloutMode.from_arm(arm.model_dump()) == RolloutMode("nvfp4", "nvfp4", RAC)
    assert RolloutMode.from_arm(arm.model_dump()).name == arm.rollout.mode


def test_unknown_values_name_the_known():
    with pytest.raises(ValueError, match=r"nvfp4/fp8 is no rollout mode; known: .*w4a4"):
        RolloutMode("nvfp4", "fp8")
    with pytest.raises(ValueError, match=r"unknown key\(s\) weigth; known: .*weight"):
        RolloutMode.from_quantization_config({"weigth": "bf16"})
    with pytest.raises(ValueError, match=r"rac: unknown key\(s\) ratio; known: granularity"):
        RolloutMode.from_quantization_config({"weight": "nvfp4", "activation": "nvfp4", "rac": {"ratio": 0.5}})
    with pytest.raises(ValueError, match="scale_group"):
        RolloutMode(scale_group="tensor")


def test_static_masks_need_a_source():
    mode = RolloutMode("nvfp4", "nvfp4", RAC)
    with pytest.raises(ValueError, match=r"rac_masks is null.*sync"):
        mode.to_quantization_config()
    assert mode.to_quantization_config(rac_masks="sync")["rac_masks"] == "sync"
    with pytest.raises(ValueError, match="no static mask"):
        RolloutMode().to_quantization_config(rac_masks="sync")


@pytest.mark.parametrize("skip", ["mlp.gate", b"mlp", None, {"mlp": 1}, 3])
def test_skip_must_be_a_list(skip):
    with pytest.raises(ValueError, match="skip must be a list of dotted module names"):
        EngineConfig.from_dict(RolloutMode().to_quantization_config() | {"skip": skip})
    with pytest.raises(ValueError, match="skip must be a list of dotted module names"):
        RolloutMode().to_quantization_config(skip=skip)


@pytest.mark.parametrize("entry", ["", ".mlp", "mlp.", "mlp..gate", "mlp gate", "re:.*", None, 1])
def test_skip_holds_dotted_names(entry):
    with pytest.raises(ValueError, match="is no dotted module name"):
        EngineConfig(skip=["mlp.gate", entry])


def test_skip_as_list_is_a_tuple():
    assert EngineConfig(skip=["mlp.gate", "layers.0"]) == EngineConfig(skip=("mlp.gate", "layers.0"))
