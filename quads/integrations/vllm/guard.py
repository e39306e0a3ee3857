# SPDX-License-Identifier: Apache-2.0
"""Start-up check of a backend: the first layer of each kind multiplies a small input as the reference does.

    d = sqrt(sum (y - y_ref)^2 / sum y_ref^2) <= LIMIT[layer]      y by the engine's backend, y_ref by the reference
    kinds: qkv_proj, o_proj, gate_up_proj, down_proj, ..., experts  (last part of a module's name)

Both read the same stored weights, masks and input, through the layers' own `apply`, on this GPU, after the weights of a
fresh engine are loaded and before anything is profiled or captured. ROWS seeded rows with channels of unequal size;
experts get rows on up to EXPERTS of them, spread over all. A layer whose static masks have not arrived gets random ones
for the check and none afterwards. Of a linear with more than OUTPUTS rows the reference computes a sample of them.
Packed weights (backends native and cutlass) are decoded for the reference: `native.reference_view`.
Under tensor parallelism every rank checks its part, and an error of one is an error of all.

Contract: no engine with a backend other than reference serves without it; ValueError names layer, backend, GPU and
difference. What is stated holds for these inputs: `python -m quads.parity` compares whole engines.
Differs from the kernels' own tests in that it runs the compiled code of this machine in the engine, on its weights.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from quads.integrations.vllm import native
from quads.integrations.vllm.quantization import QuadsConfig
from quads.integrations.vllm.shards import agreed
from quads.integrations.vllm.state import ATTRIBUTE, LayerState, quads_layers

ROWS = 17  # one more than the interpreter's tile, far less than a GPU's: the edge of a tile is in it
EXPERTS = 4
OUTPUTS = 1024
# Additions in another order move rare elements by one bf16 step, 2^-8 to 2^-7 of the element: a linear passes with one
# in ten moved, not with one percent on all. Inside experts such a step may flip an FP4 code of the second
# product's input, which moves a whole row. In the interpreter: 0 and 1.1e-5. A static mask that is ignored: .07.
LIMIT = {"linear": 2.0**-8, "experts": 2.0**-5}
# vLLM's FP4 ops round to bf16 before the rows' scales are applied and once more after: one output in four moves a step,
# and codes flip behind it (.08 measured on random weights).
LIMIT_CUTLASS = {"linear": 2.0**-8, "experts": 2.0**-3}


def check_layers(model: torch.nn.Module, config: QuadsConfig) -> dict[str, Any] | None:
    """Run the check; the receipt's "backend_check", None with backend reference. ValueError when a layer differs."""
    if config.engine.backend == "reference":
        return None
    rows: list[dict[str, Any]] = []
    for layer, state in _first_of_each_kind(model):
        row = _compare(layer, state, config)
        device = next(layer.parameters()).device
        agreed(functools.partial(_require, row, config.engine.backend), state.shard, state.name, device)
        rows.append(row)
    return {
        "backend": config.engine.backend,
        "layers": rows,
        "largest": max((row["relative_difference"] for row in rows), default=0.0),
    }


def _require(row: dict[str, Any], backend: str) -> None:
    # Written so that a difference that is not a number does not pass.
    if not row["relative_difference"] <= row["limit"]:
        raise ValueError(
            f"{row['module']}: backend {backend!r} on {row['device']} does not multiply as the reference does: "
            f"relative difference {row['relative_difference']:.3g}, limit {row['limit']:.3g}; largest difference "
            f"{row['largest_difference']:.3g} where the reference reaches {row['largest_value']:.3g}. Serve with "
            "backend reference and report this GPU"
        )


def _first_of_each_kind(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, LayerState]]:
    seen: set[str] = set()
    for layer, state in quads_layers(model):
        kind = state.name.rpartition(".")[2]
        if kind not in seen:
            seen.add(kind)
            yield layer, state


def _compare(layer: Any, state: LayerState, config: QuadsConfig) -> dict[str, Any]:
    method = layer.quant_method
    stored = native.reference_view(layer, state, config.engine) if native.serves(config.engine) else layer
    draw = torch.Generator().manual_seed(zlib.crc32(state.name.encode()))
    with torch.no_grad(), _masked(state, draw):
        if state.kind == "experts":
            y, want = _experts(method, layer, stored, state, draw)
        else:
            y, want = _linear(method, layer, stored, state, draw)
    y, want = y.double(), want.double()
    difference = float((y - want).norm())
    return {
        "module": state.name,
        "layer": state.kind,
        # Layers of zeros, which some checkpoints have, give zeros on both sides.
        "relative_difference": 0.0 if difference == 0 else difference / max(float(want.norm()), 1e-30),
        "largest_difference": float((y - want).abs().max()),
        "largest_value": float(want.abs().max()),
        "limit": (LIMIT_CUTLASS if config.engine.backend == "cutlass" else LIMIT)[state.kind],
        "device": _device_name(want.device),
    }


def _linear(method: Any, layer: Any, stored: Any, state: LayerState, draw: torch.Generator) -> tuple[Any, Any]:
    x = _input(state.inputs[state.name], stored.weight, draw)
    y = method.apply(layer, x)
    outputs = stored.weight.shape[0]
    rows = torch.linspace(0, outputs - 1, min(outputs, OUTPUTS), device=x.device).long()
    part = {name: getattr(stored, name)[rows] for name in ("weight", "weight_rcp")}
    sample = SimpleNamespace(**part, **{ATTRIBUTE: state})
    with _as_reference(method):
        return y[:, rows], method.apply(sample, x)


def _experts(method: Any, layer: Any, stored: Any, state: LayerState, draw: torch.Generator) -> tuple[Any, Any]:
    weight, held = stored.w13_weight, layer.expert_map
    x = _input(state.inputs[f"{state.name}.w13"], weight, draw)
    known = torch.arange(weight.shape[0]) if held is None else (held.cpu() >= 0).nonzero()[:, 0]
    chosen = known[torch.linspace(0, len(known) - 1, min(len(known), EXPERTS)).long()]
    choices = torch.rand(ROWS, len(chosen), generator=draw).argsort(1)[:, : min(2, len(chosen))]
    ids = chosen[choices].to(device=x.device, dtype=torch.int32)
    weights = torch.rand(ids.shape, generator=draw).softmax(1).to(x.device)
    y = method.apply(layer, x, weights, ids)
    with _as_reference(method):
        return y, method.apply(stored, x, weights, ids)


def _input(width: int, like: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """bf16 [ROWS, width]: Gaussian rows, channels of log-normal size; drawn on the CPU, the same on every machine."""
    x = torch.randn(ROWS, width, generator=draw) * torch.randn(width, generator=draw).exp()
    return x.to(device=like.device, dtype=torch.bfloat16)


@contextlib.contextmanager
def _as_reference(method: Any) -> Iterator[None]:
    """Inside, the method multiplies as backend reference does."""
    own = method.config
    reference = copy.copy(own)
    reference.engine = dataclasses.replace(own.engine, backend="reference")
    reference.graph_safe = False
    method.config = reference
    try:
        yield
    finally:
        method.config = own


@contextlib.contextmanager
def _masked(state: LayerState, draw: torch.Generator) -> Iterator[None]:
    """Inside, static masks that have not arrived hold random blocks of 16; afterwards they are empty again."""
    absent = [key for key in state.masks if key not in state.mask_loads]
    for key in absent:
        blocks = torch.rand(state.masks[key].numel() // 16, generator=draw) < 0.5
        state.masks[key].copy_(blocks.repeat_interleave(16))
        state.mask_loads[key] = 1
    try:
        yield
    finally:
        for key in absent:
            state.masks[key].zero_()
            del state.mask_loads[key]


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
