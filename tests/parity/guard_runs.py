"""Child process of test_guard.py: the start-up check on layers made here, backend triton in Triton's interpreter.

    python guard_runs.py OUT.json      {"clean": [row of the check], "broken": {case: text}, "masks": text}

Layers have the plugin's own methods and stored weights, no engine around them; several shapes and modes.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.update(TRITON_INTERPRET="1", VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1")

import torch

from quads.integrations.vllm import guard
from quads.integrations.vllm.moe import QuadsMoEMethod
from quads.integrations.vllm.quantization import QuadsConfig, QuadsLinearMethod
from quads.integrations.vllm.state import LayerState
from quads.kernels import backend as kernels
from quads.layers.weights import quantize_rows
from quads.numerics.rac import RacSpec
from quads.rollout.mode import EngineConfig, RolloutMode

MODES = {
    "bf16": RolloutMode("bf16", "bf16"),
    "fp8": RolloutMode("fp8", "fp8"),
    "w4a16": RolloutMode("nvfp4", "bf16"),
    "w4a4": RolloutMode("nvfp4", "nvfp4"),
    "w4a4+rac": RolloutMode("nvfp4", "nvfp4", RacSpec(0.5)),
    "w4a4+rac batch": RolloutMode("nvfp4", "nvfp4", RacSpec(0.5, mask="batch")),
}
SIZES = ((64, 96, 32, 8), (128, 256, 64, 4), (128, 1100, 96, 6))  # K, N, expert width, experts


class Layer(torch.nn.Module):
    """What the methods read of a vLLM layer."""

    def __init__(self, method, state, expert_map=None, **weights):
        super().__init__()
        self.quant_method, self.quads_state = method, state
        self.expert_map, self.apply_router_weight_on_input = expert_map, False
        for name, value in weights.items():
            self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))


def model(mode: RolloutMode, sizes: tuple[int, int, int, int], seed: int) -> tuple[torch.nn.Module, QuadsConfig]:
    config = QuadsConfig(EngineConfig(mode, "sync" if mode.needs_masks else None, backend="triton"))
    width, outputs, hidden, experts = sizes
    draw = torch.Generator().manual_seed(seed)

    def stored(*shape: int, parts: list[int]):
        w = (torch.randn(*shape, generator=draw) * 0.05).to(torch.bfloat16)
        return quantize_rows(w, mode.weight, parts, mode.scale_group, "w")

    def of(cls, name):
        method = object.__new__(cls)
        method.config, method.name = config, name
        return method

    w = stored(outputs, width, parts=[outputs])
    linear = LayerState("layers.0.o_proj", "linear", config.engine, {"layers.0.o_proj": width}, [outputs])
    w13, w2 = stored(experts, 2 * hidden, width, parts=[hidden] * 2), stored(experts, width, hidden, parts=[width])
    name = "layers.0.experts"
    moe = LayerState(name, "experts", config.engine, {f"{name}.w13": width, f"{name}.w2": hidden}, [hidden] * 2)
    elsewhere = torch.full((experts + 3,), -1)
    elsewhere[3:] = torch.arange(experts)
    for state in (linear, moe):
        state.prepare_masks(torch.device("cpu"))
    bf16 = torch.bfloat16
    return torch.nn.ModuleList(
        [
            Layer(of(QuadsLinearMethod, linear.name), linear, weight=w.qs.to(bf16), weight_rcp=w.rcp),
            Layer(of(QuadsMoEMethod, name), moe, elsewhere, w13_weight=w13.qs.to(bf16), w13_rcp=w13.rcp,
                  w2_weight=w2.qs.to(bf16), w2_rcp=w2.rcp),
        ]
    ), config  # fmt: skip


def clean() -> list[dict]:
    rows = []
    for name, mode in MODES.items():
        # The interpreter takes seconds for the larger ones.
        for sizes in SIZES if name == "w4a4+rac" else SIZES[:1]:
            layers, config = model(mode, sizes, 0)
            found = guard.check_layers(layers, config)
            rows += [row | {"mode": name, "sizes": sizes} for row in found["layers"]]
    return rows


def broken() -> dict[str, str]:
    """What the check says of a backend with a fault; "nothing" when it lets it pass."""
    own = {name: getattr(kernels, name) for name in ("linear", "expert_rows")}

    def no_mask(x, weight, rcp, mask, *rest):
        return own["linear"](x, weight, rcp, None if mask is None else torch.zeros_like(mask), *rest)

    def nan(*args):
        y = own["linear"](*args)
        y[-1, -1] = float("nan")
        return y

    def next_expert(x, token, offsets, w13, *rest):
        return own["expert_rows"](x, token, offsets, w13.roll(1, 0), *rest)

    def late_tile(*args):
        y = own["linear"](*args)
        y[16:] = 0  # the row behind the first tile
        return y

    def one_percent(*args):
        return own["linear"](*args) * 1.01

    faults = {
        "mask ignored": ("linear", no_mask), "nan": ("linear", nan), "last tile": ("linear", late_tile),
        "one percent": ("linear", one_percent), "wrong expert": ("expert_rows", next_expert),
    }  # fmt: skip
    said = {}
    for case, (name, fault) in faults.items():
        setattr(kernels, name, fault)
        layers, config = model(MODES["w4a4+rac"], SIZES[0], 0)
        try:
            guard.check_layers(layers, config)
            said[case] = "nothing"
        except ValueError as error:
            said[case] = str(error)
        left = sum(int(m.sum()) for layer in layers for m in layer.quads_state.masks.values())
        loads = [layer.quads_state.mask_loads for layer in layers]
        if left or any(loads) or any(layer.quant_method.config is not config for layer in layers):
            said[case] += f"; left behind: {left} mask bits, {loads}"
        setattr(kernels, name, own[name])
    return said


def main() -> None:
    layers, _ = model(MODES["w4a4"], SIZES[0], 0)
    reference = QuadsConfig(EngineConfig(MODES["w4a4"]))
    said = {"clean": clean(), "broken": broken(), "reference": guard.check_layers(layers, reference)}
    Path(sys.argv[1]).write_text(json.dumps(said))


if __name__ == "__main__":
    main()
