# SPDX-License-Identifier: Apache-2.0
"""Packed weights in the plugin's layers: backends native (Triton's FP4 product) and cutlass (vLLM's ops).

    linear    weight uint8 [N, K/2]               weight_scales uint8 [N, K/16]             weight_rcp fp32 [N, 1]
    experts   w13_weight uint8 [E, 2F, D/2], w2_weight [E, D, F/2], each with _scales and _rcp
    cutlass   codes padded to N % 128 and K % 64, scales swizzled (quads.kernels.cutlass); _rcp as above

N rows, K inner dimension, E local experts, D model width, F expert width. Codes are two E2M1 a byte, scales E4M3 bytes.
Quantized from the checkpoint's values at every load and at every layerwise reload by `quads.layers.weights.pack_rows`:
the bytes of what the other backends store as q * s. Shapes and dtypes follow from the layer's alone, so a reload copies
into the same storage. 4.5 bits a weight instead of 16.

Refused, with the reason: tensor parallelism (scales and padding are those of whole weights), formats other than NVFP4
weights with NVFP4 activations, a device without FP4 units, vLLM's ops when their signatures differ. Nothing falls back.
`stored` decodes a layer of any backend for dumps and parity checks.
Which op serves what, and why: `quads.kernels.native_layers`. NOT RUN on FP4 units; on a CPU in Triton's interpreter.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.utils import replace_parameter

from quads.integrations.vllm.state import ATTRIBUTE, LayerState, naming_input
from quads.kernels import native_layers
from quads.kernels.backend import PACKED
from quads.layers.weights import pack_rows
from quads.numerics.qdq import WeightQ
from quads.rollout.mode import EngineConfig

if TYPE_CHECKING:
    from quads.integrations.vllm.quantization import QuadsConfig


def serves(engine: EngineConfig) -> bool:
    """Whether the engine's layers store packed weights."""
    return engine.backend in PACKED


def refuse_shards(name: str, engine: EngineConfig, tp_size: int) -> None:
    """ValueError for a packed layer under tensor parallelism."""
    if serves(engine) and tp_size > 1:
        raise ValueError(
            f"{name}: backend {engine.backend!r} packs whole weights, tensor parallel size is {tp_size}; use "
            f"tensor_parallel_size=1 and data parallel replicas, or backend triton or reference"
        )


def take_ops(engine: EngineConfig) -> None:
    """Backend cutlass: hand vLLM's ops to the kernels. RuntimeError when they differ or the build has none for this
    device; other backends need none."""
    if engine.backend != "cutlass":
        return
    from vllm import _custom_ops

    from quads.kernels import cutlass

    major, minor = torch.cuda.get_device_capability()
    cutlass.use(_custom_ops, 10 * major + minor)


def _names(parameter: str) -> tuple[str, str, str]:
    stem = parameter.removesuffix("_weight")
    return parameter, f"{stem}_scales", f"{stem}_rcp"


def store(layer: torch.nn.Module, parameter: str, widths: list[int], engine: EngineConfig, name: str) -> None:
    """Replace the high-precision `parameter` [..., N, K] by its packed form and (re)create `<stem>_scales`, `_rcp`.

    Raises ValueError naming `name` as `quads.layers.weights.pack_rows`.
    """
    packed = pack_rows(getattr(layer, parameter).data, widths, engine.mode.scale_group, name)
    codes, *rest = native_layers.layout(engine.backend, packed)
    replace_parameter(layer, parameter, codes)
    for key, tensor in zip(_names(parameter)[1:], rest, strict=True):
        layer.register_parameter(key, torch.nn.Parameter(tensor, requires_grad=False))


def _parts(layer: torch.nn.Module, parameter: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, scales, rcp = (getattr(layer, key) for key in _names(parameter))
    return codes, scales, rcp


def stored(layer: torch.nn.Module, parameter: str, engine: EngineConfig, inner: int) -> WeightQ:
    """qs [..., N, K = inner] and rcp fp32 [..., N, 1] of a quantized layer's weight, whatever its backend stores."""
    codes, _, rcp = _names(parameter)
    if not serves(engine):
        return WeightQ(getattr(layer, codes).data, getattr(layer, rcp).data)
    return native_layers.unpacked(engine.backend, *(part.data for part in _parts(layer, parameter)), inner)


def reference_view(layer: torch.nn.Module, state: LayerState, engine: EngineConfig) -> SimpleNamespace:
    """A packed layer as backend reference stores it: what its `apply` reads (start-up check)."""
    view = SimpleNamespace(**{ATTRIBUTE: state})
    if state.kind == "linear":
        parameters = {"weight": state.inputs[state.name]}
    else:
        parameters = {f"{part}_weight": state.inputs[f"{state.name}.{part}"] for part in ("w13", "w2")}
        view.expert_map, view.apply_router_weight_on_input = layer.expert_map, layer.apply_router_weight_on_input
    for parameter, inner in parameters.items():
        weight, _, rcp = _names(parameter)
        whole = stored(layer, parameter, engine, inner)
        setattr(view, weight, whole.qs.to(torch.bfloat16))
        setattr(view, rcp, whole.rcp)
    return view


def linear(
    config: QuadsConfig, layer: torch.nn.Module, state: LayerState, x: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """y [..., N] of x [..., K]: one custom op; nothing here waits for the GPU or depends on values."""
    rest = (state.masks.get(state.name), bias, config.rac, config.engine.backend)
    if config.graph_safe:
        return native_layers.linear(x, _parts(layer, "weight"), *rest)
    with naming_input(state.name):
        return native_layers.linear(x, _parts(layer, "weight"), *rest)


def expert_rows(
    config: QuadsConfig,
    layer: torch.nn.Module,
    state: LayerState,
    x: torch.Tensor,
    token: torch.Tensor | None,
    offsets: torch.Tensor,
) -> torch.Tensor:
    """y [R, D], rows sorted by expert (`native_layers.expert_rows`)."""
    masks = (state.masks.get(f"{state.name}.w13"), state.masks.get(f"{state.name}.w2"))
    weights = (_parts(layer, "w13_weight"), _parts(layer, "w2_weight"))
    return native_layers.expert_rows(x, token, offsets, *weights, masks, config.rac, config.engine.backend)
