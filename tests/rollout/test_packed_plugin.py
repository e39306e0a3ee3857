# SPDX-License-Identifier: Apache-2.0
"""The plugin's own layer methods with backends native and cutlass, in Triton's interpreter: weights packed in place,
outputs against the reference, dumps, refusals. vLLM's ops are the recording stand-in of tests/kernels/fp4_cases.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
from types import SimpleNamespace
import torch
from fp4_cases import Recorder
from quads.integrations.vllm import guard, native as plugin
from quads.integrations.vllm.moe import QuadsMoEMethod
from quads.integrations.vllm.quantization import QuadsConfig, QuadsLinearMethod, check_backend
from quads.integrations.vllm.receipt import execution
from quads.integrations.vllm.reload import engine_weights
from quads.integrations.vllm.state import ATTRIBUTE, LayerState
from quads.kernels import cutlass, native
from quads.numerics.rac import RacSpec
from quads.rollout.mode import EngineConfig, RolloutMode

def refused(text, call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        assert all(part in str(error) for part in text), error
        print("refused:", error)
    else:
        raise AssertionError(text)

def config_of(backend, rac=None, **mode):
    masks = "sync" if rac and rac.mask == "static" else None
    return QuadsConfig(EngineConfig(RolloutMode(**({"weight": "nvfp4", "activation": "nvfp4"} | mode), rac=rac),
                                    rac_masks=masks, backend=backend))

def layers_of(config, N, D, F, E):
    linear, moe = torch.nn.Module(), torch.nn.Module()
    experts = (moe, "w13_weight", (E, 2 * F, D)), (moe, "w2_weight", (E, D, F))
    for layer, name, shape in ((linear, "weight", (N, D)), *experts):
        layer.register_parameter(name, torch.nn.Parameter(torch.empty(shape).bfloat16(), requires_grad=False))
    setattr(linear, ATTRIBUTE, LayerState("l.o_proj", "linear", config.engine, {"l.o_proj": D}, [N]))
    setattr(moe, ATTRIBUTE, LayerState("e", "experts", config.engine, {"e.w13": D, "e.w2": F}, [F, F]))
    moe.expert_map, moe.apply_router_weight_on_input = None, False
    methods = []
    for cls, name in ((QuadsLinearMethod, "l.o_proj"), (QuadsMoEMethod, "e")):
        method = cls.__new__(cls)
        method.config, method.name = config, name
        methods.append(method)
    model = torch.nn.Module()
    model.linear, model.moe = linear, moe
    return model, *methods

def load(model, methods, seed, shapes):
    N, D, F, E = shapes
    g = torch.Generator().manual_seed(seed)
    w = {"weight": torch.randn(N, D, generator=g), "w13_weight": torch.randn(E, 2 * F, D, generator=g) / 4,
         "w2_weight": torch.randn(E, D, F, generator=g) / 4}
    for layer, method in ((model.linear, methods[0]), (model.moe, methods[1])):
        before = {n: p for n, p in layer.named_parameters()}
        packed = {n: (p.shape, p.dtype) for n, p in before.items()} if hasattr(layer, "_seen") else None
        for name in [n for n in w if hasattr(layer, n)]:
            setattr(layer, name, torch.nn.Parameter(w[name].bfloat16(), requires_grad=False))
        vars(layer).pop("_already_called_process_weights_after_loading", None)
        method.process_weights_after_loading(layer)
        after = {n: (p.shape, p.dtype) for n, p in layer.named_parameters()}
        assert packed is None or packed == after, (packed, after)  # what a reload copies over
        layer._seen = True
        state = getattr(layer, ATTRIBUTE)
        for key, mask in state.masks.items():
            state.set_mask(key, torch.randperm(len(mask) // 16, generator=g).repeat_interleave(16) % 2 == 0)

for backend in ("native", "cutlass"):
    refused([backend, "no CUDA device"], lambda: check_backend(config_of(backend), torch.zeros(1).bfloat16()))
native.unavailable = native.incapable = lambda: None  # from here on the interpreter is the device
native_out = {}
cutlass.use(Recorder(), 100)
for formats in (dict(weight="bf16", activation="bf16"), dict(weight="fp8", activation="fp8"), dict(activation="bf16")):
    refused(["NVFP4 by NVFP4"], lambda: check_backend(config_of("native", **formats), torch.zeros(1).bfloat16()))
refused(["bfloat16"], lambda: check_backend(config_of("cutlass"), torch.zeros(1)))
refused(["tensor parallel size is 2"], lambda: plugin.refuse_shards("m", config_of("native").engine, 2))
CALLS = ((5, None, False), (5, torch.tensor([-1, 0, 2, -1, 1]), True), (0, None, False))
MASKS = {(48, 64, 32, 3): (None, RacSpec(0.5), RacSpec(0.5, mask="batch")), (20, 48, 16, 5): (RacSpec(0.5),)}
for shapes, specs in MASKS.items():
    N, D, F, E = shapes
    for rac in specs:
        out, dumps = {}, {}
        for backend in ("reference", "native", "cutlass"):
            config = config_of(backend, rac)
            model, *methods = layers_of(config, *shapes)
            got = []
            for seed in (1, 2):
                load(model, methods, seed, shapes)
                g = torch.Generator().manual_seed(seed)
                x, weights = torch.randn(9, D, generator=g).bfloat16(), torch.rand(9, 2, generator=g)
                ids = torch.randint(0, E, (9, 2), generator=g)
                bias = torch.randn(N, generator=g).bfloat16()
                got += [methods[0].apply(model.linear, x, bias), methods[0].apply(model.linear, x[:, None])[:, 0]]
                for n, expert_map, on_input in CALLS:
                    model.moe.expert_map, model.moe.apply_router_weight_on_input = expert_map, on_input
                    got.append(methods[1].apply(model.moe, x[:n], weights[:n], ids[:n]))
            out[backend], dumps[backend] = got, engine_weights(model)
            model.linear.quant_method, model.moe.quant_method = methods
            model.moe.expert_map, model.moe.apply_router_weight_on_input = None, False
            checked = guard.check_layers(model, config)  # the start-up check decodes packed weights for the reference
            assert checked is None or all(0 <= row["relative_difference"] for row in checked["layers"]), checked
            if backend != "reference":
                assert {p.dtype for p in model.parameters()} == {torch.uint8, torch.float32}
                assert config.graph_safe == (rac is None or rac.mask != "batch")
                said = execution(config)
                assert said["product"] and said["backend"] == backend
                print(config.backend, "|", said["product"], "|", said["activation_kernel"], said["graph_safe"])
        for backend in ("native", "cutlass"):
            assert dumps[backend].keys() == dumps["reference"].keys()
            assert all(torch.equal(dumps[backend][n], t) for n, t in dumps["reference"].items())
            for reference, mine in zip(out["reference"], out[backend], strict=True):
                assert reference.shape == mine.shape and reference.dtype == mine.dtype
                if reference.numel():
                    norm = torch.linalg.vector_norm
                    error = float(norm(reference.float() - mine.float()) / norm(reference.float()).clamp(min=1e-9))
                    worst = native_out.setdefault(backend, [0.0])
                    worst[0] = max(worst[0], error)
print("largest relative norms:", native_out)
assert native_out["native"][0] <= LIMIT_NATIVE and native_out["cutlass"][0] <= LIMIT_CUTLASS
print("done")
"""


@pytest.mark.stack
def test_layers_with_packed_weights() -> None:
    """Static and batch masks, a reload into the same shapes, odd shapes, experts elsewhere, dumps, refusals."""
    from tolerances import TOLERANCES

    program = PROGRAM
    for name, tolerance in (("NATIVE", "packed_plugin_native"), ("CUTLASS", "packed_plugin_cutlass")):
        program = program.replace(f"LIMIT_{name}", repr(TOLERANCES[tolerance].limit))
    environment = os.environ | {"TRITON_INTERPRET": "1", "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    paths = [str(ROOT / "tests" / "kernels"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stdout + done.stderr[-3000:]
    print(done.stdout)
    assert done.stdout.count("refused:") == 7
    assert "native (FP4, triton)" in done.stdout and "rounded before and after the scales" in done.stdout
