# SPDX-License-Identifier: Apache-2.0
"""The backend is an explicit part of an engine's config, and the plugin multiplies with it or says why not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quads.rollout.mode import EngineConfig, RolloutMode

ROOT = Path(__file__).resolve().parents[2]


def test_the_default_is_the_definition() -> None:
    config = RolloutMode("nvfp4", "nvfp4").to_quantization_config()
    assert config["backend"] == "reference"
    del config["backend"]  # a config written before backends existed
    assert EngineConfig.from_dict(config).backend == "reference"


def test_round_trip() -> None:
    config = RolloutMode("nvfp4", "nvfp4").to_quantization_config(backend="triton")
    assert EngineConfig.from_dict(config).backend == "triton"
    assert EngineConfig.from_dict(config).to_dict() == config


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="known: reference, triton, native, cutlass"):
        RolloutMode().to_quantization_config(backend="marlin")


PROGRAM = """
from types import SimpleNamespace
import torch
from quads.integrations.vllm.moe import QuadsMoEMethod
from quads.integrations.vllm.quantization import QuadsConfig, QuadsLinearMethod, check_backend
from quads.integrations.vllm.state import ATTRIBUTE, LayerState
from quads.numerics.qdq import quantize_weight
from quads.rollout.mode import EngineConfig, RolloutMode
from quads.numerics.rac import RacSpec

torch.manual_seed(0)
x, ids, weights = torch.randn(9, 64).bfloat16(), torch.randint(0, 3, (9, 2)), torch.rand(9, 2)
w = {n: quantize_weight(torch.randn(*s), "nvfp4") for n, s in dict(l=(48, 64), w13=(3, 64, 64), w2=(3, 64, 32)).items()}
for rac in (None, RacSpec(0.5, mask="token"), RacSpec(0.5, mask="batch")):
    outputs = {}
    for backend in ("reference", "triton"):
        config = QuadsConfig(EngineConfig(RolloutMode("nvfp4", "nvfp4", rac), backend=backend))
        check_backend(config, w["l"].qs.bfloat16())
        state = LayerState("m", "linear", config.engine, {"m": 64}, [48])
        layer = SimpleNamespace(weight=w["l"].qs.bfloat16(), weight_rcp=w["l"].rcp.expand(48, 1).contiguous())
        setattr(layer, ATTRIBUTE, state)
        method = QuadsLinearMethod.__new__(QuadsLinearMethod)
        method.config, method.name = config, "m"
        experts = QuadsMoEMethod.__new__(QuadsMoEMethod)
        experts.config, experts.name = config, "e"
        moe = SimpleNamespace()
        for n in ("w13", "w2"):
            setattr(moe, f"{n}_weight", w[n].qs.bfloat16())
            setattr(moe, f"{n}_rcp", w[n].rcp.expand(*w[n].qs.shape[:2], 1).contiguous())
        setattr(moe, ATTRIBUTE, LayerState("e", "experts", config.engine, {"e.w13": 64, "e.w2": 32}, [32, 32]))
        moe.expert_map, moe.apply_router_weight_on_input = None, False
        outputs[backend] = [method.apply(layer, x), method.apply(layer, x.T.contiguous().T.unsqueeze(1))[:, 0]]
        for n in (9, 0):  # no tokens: both backends give no rows
            for moe.expert_map in (None, torch.tensor([-1, 0, 2, -1, 1])):
                for moe.apply_router_weight_on_input in (False, True):
                    for chosen in (ids[:n], ids[:n] * 0):  # experts without rows; all rows elsewhere
                        outputs[backend].append(experts.apply(moe, x[:n], weights[:n], chosen))
        assert method.apply(layer, x[:0].view(0, 2, 64)).shape == (0, 2, 48)
        # a choice of -1 is nobody's, with or without a map
        nobody = experts.apply(moe, x, weights, ids * 0 - 1)
        assert not nobody.any() and nobody.shape == x.shape
        print(backend, config.backend, config.activation_kernel, config.graph_safe)
    for reference, triton in zip(outputs["reference"], outputs["triton"], strict=True):
        assert reference.shape == triton.shape and reference.dtype == triton.dtype
        if reference.any():
            difference = (reference.float() - triton.float()).abs().max() / reference.float().abs().max()
            assert difference < 2 ** -7, difference
        else:
            assert not triton.any()
    assert sum(bool(o.any()) for o in outputs["triton"]) >= 6
config = QuadsConfig(EngineConfig(RolloutMode("nvfp4", "nvfp4", RacSpec(0.5)), rac_masks="sync", backend="triton"))
state = LayerState("m", "linear", config.engine, {"m": 64}, [48])
state.prepare_masks(torch.device("cpu"))
setattr(layer, ATTRIBUTE, state)
method.config = config
compiled = torch.compile(lambda x: method.apply(layer, x), fullgraph=True, dynamic=True, backend="eager")
seen = []
for blocks in (0, 1, 3):  # traced before a mask has arrived; every later mask is seen
    if blocks:
        state.set_mask("m", torch.arange(64) < 16 * blocks)
    seen.append(compiled(x))
    assert torch.equal(seen[-1], method.apply(layer, x))
assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
for backend, dtype in (("triton", torch.float32), ("native", torch.bfloat16), ("cutlass", torch.bfloat16)):
    try:
        check_backend(QuadsConfig(EngineConfig(RolloutMode(), backend=backend)), torch.zeros(1, dtype=dtype))
    except RuntimeError as error:
        print("refused:", error)
    else:
        raise AssertionError(backend)
print("done")
"""


@pytest.mark.stack
def test_the_plugin_multiplies_with_it() -> None:
    """Both layer methods, backend triton in the interpreter against the reference; refusals carry the reason."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout + done.stderr[-3000:]
    assert "triton emulated (triton) triton True" in done.stdout and done.stdout.count("refused:") == 3
    assert "triton emulated (triton) torch False" in done.stdout
