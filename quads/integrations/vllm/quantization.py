# SPDX-License-Identifier: Apache-2.0
"""vLLM quantization method "quads": the config object and the linear method.

    stored   weight [N, K] in the layer's dtype = q * s, exact (<= 6 significant bits; E4M3 values for fp8;
             bf16-rounded)
             weight_rcp fp32 [N, 1], the remaining factor of every row
    forward  y = numerics.emulated_linear(quantize_activation(x), (weight, weight_rcp))       backend reference
             torch.ops.quads.linear: quads.kernels, another order of additions                 backend triton
             packed weights and FP4 products instead of all this: native.py          backends native and cutlass

Weights are quantized from the checkpoint's values at every load and at every layerwise reload by quads.layers.weights,
the trainer's own function. Shapes and dtypes never change, so that a reload copies into the same storage.
High precision: everything that is not a LinearBase or RoutedExperts (head, embedding, norms, attention), routers, and
what the config lists in skip.
Differs from vLLM's own NVFP4: that quantizes no linear online, and on GPUs without FP4 units it silently serves W4A16.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import linear
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.utils import replace_parameter

from quads.integrations.vllm import native
from quads.integrations.vllm.compat import OnlineLinearBase
from quads.integrations.vllm.shards import agreed, check_shard, linear_shard
from quads.integrations.vllm.state import ATTRIBUTE, LayerState, naming_input
from quads.kernels import backend as kernels
from quads.layers.names import FUSED, skip_reason, trainer_module, trainer_names
from quads.layers.weights import quantize_rows
from quads.numerics.formats import BLOCK
from quads.numerics.qdq import WeightQ, check_finite, emulated_linear
from quads.rollout.mode import QUANT_METHOD, EngineConfig

BACKENDS = {  # in receipts
    "reference": "emulated (torch)",
    "triton": "emulated (triton)",
    "native": "native (FP4, triton)",
    "cutlass": "native (FP4, cutlass)",
}
_PROCESSED = "_already_called_process_weights_after_loading"  # vLLM's own flag against quantizing twice
_registered = False


class QuadsConfig(QuantizationConfig):
    """One per engine; `engine` is the parsed hf_overrides["quantization_config"]."""

    def __init__(self, engine: EngineConfig | None = None):
        super().__init__()
        self.engine = engine if engine is not None else EngineConfig()
        self.backend = BACKENDS[self.engine.backend]
        mode = self.engine.mode
        choice = (self.engine.backend, mode.activation, mode.rac)
        self.activation_kernel, self.activation_reason = kernels.activation_kernel(*choice)
        self.graph_safe, self.graph_reason = kernels.graph_safe(*choice)
        self.rac = kernels.rac_code(mode.rac)
        self.engine_mode = "unknown"  # eager, or how vLLM compiles and captures (preflight)
        self.has_masks = not mode.needs_masks  # whether every static mask has arrived
        self.reloads = 0  # completed weight updates
        self.backend_check: dict[str, Any] | None = None  # of guard.check_layers; None with backend reference
        self.broken: str | None = None  # why the weights can no longer be trusted

    def get_name(self) -> str:
        """Name under which vLLM looks the method up."""
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """float16 is left out: bf16-rounded weights would not be exact in it."""
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability; the emulation needs nothing special."""
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        """No file: the config comes from hf_overrides."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuadsConfig:
        """Parse the dict; ValueError for unknown keys or values."""
        return cls(EngineConfig.from_dict(config))

    @functools.cached_property
    def mask_file(self) -> dict[str, torch.Tensor]:
        """Masks of the file named by rac_masks; empty when masks come with the weights."""
        source = self.engine.rac_masks
        if source is None or source == "sync":
            return {}
        from safetensors.torch import load_file

        return load_file(source)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of one layer; None leaves head, embedding and attention to vLLM's defaults."""
        from quads.integrations.vllm.moe import QuadsMoEMethod

        name = engine_layer_name(prefix)
        skipped = skip_reason(name, self.engine.skip) is not None
        if isinstance(layer, RoutedExperts):
            if skipped:
                return UnquantizedFusedMoEMethod(layer.moe_config)
            return QuadsMoEMethod(layer.moe_config, self, name)
        if isinstance(layer, LinearBase):
            if skipped or isinstance(layer, GateLinear):
                return UnquantizedLinearMethod()
            return QuadsLinearMethod(self, name)
        return None


def register_method() -> None:
    """Tell vLLM about "quads"; idempotent."""
    global _registered
    if not _registered:
        register_quantization_config(QUANT_METHOD)(QuadsConfig)
        _registered = True


def engine_layer_name(prefix: str) -> str:
    """Module name as in the trainer, without the inner container that some versions put around the expert weights."""
    return trainer_module(prefix.removesuffix(".routed_experts"))


def load_masks(config: QuadsConfig, state: LayerState, device: torch.device) -> None:
    """Allocate the layer's masks and fill them from the mask file, if there is one; later calls change nothing."""
    state.prepare_masks(device)
    for key in state.masks if config.mask_file else ():
        if key in state.mask_loads:
            continue
        if key not in config.mask_file:
            known = ", ".join(sorted(config.mask_file))
            raise ValueError(f"{config.engine.rac_masks}: no RAC mask for {key}; it holds {known}")
        state.set_mask(key, config.mask_file[key])


def check_backend(config: QuadsConfig, weight: torch.Tensor) -> None:
    """RuntimeError with the reason when the configured backend cannot multiply with this weight; called at load."""
    mode = config.engine.mode
    kernels.require(config.engine.backend, weight.dtype, weight.device.type, (mode.weight, mode.activation))


def check_block(name: str, config: EngineConfig, inner: int) -> None:
    """ValueError when an NVFP4 operand would have an inner dimension that is no multiple of 16."""
    if "nvfp4" in (config.mode.weight, config.mode.activation) and inner % BLOCK:
        raise ValueError(
            f"{name}: K={inner} is no multiple of {BLOCK}, the NVFP4 block along K; pad the model's dimension or add "
            f"{name.rpartition('.')[2]!r} to skip"
        )


def check_parts(w: torch.Tensor, widths: list[int], names: Sequence[str]) -> None:
    """ValueError naming the part [..., n_i, K] of a fused weight that holds NaN or infinity, and the expert."""
    for part, name in zip(w.split(widths, dim=-2), names, strict=True):
        try:
            check_finite(part, name)
        except ValueError as error:
            if w.dim() < 3:
                raise
            bad = (~torch.isfinite(part)).flatten(1).any(1).nonzero()[:, 0].tolist()
            raise ValueError(f"{error} (experts {bad})") from error


def store(layer: torch.nn.Module, parameter: str, quantized: WeightQ) -> None:
    """Replace `parameter` by q*s in its own dtype and (re)create `<stem>_rcp`; fixed shapes, so a reload is in
    place.
    """
    replace_parameter(layer, parameter, quantized.qs.to(getattr(layer, parameter).dtype))
    stem = parameter.removesuffix("_weight")
    layer.register_parameter(f"{stem}_rcp", torch.nn.Parameter(quantized.rcp, requires_grad=False))


class QuadsLinearMethod(OnlineLinearBase):
    """LinearBase layers: q/k/v fused, o, dense gate/up and down."""

    activation_quant_key = None

    def __init__(self, config: QuadsConfig, name: str):
        super().__init__()
        self.config, self.name = config, name

    def create_weights(
        self, layer: torch.nn.Module, input_size_per_partition: int, output_partition_sizes: list[int], *args, **kwargs
    ) -> None:
        """Meta weight in checkpoint format, plus the layer's state."""
        shard = linear_shard(layer)
        native.refuse_shards(self.name, self.config.engine, shard.size)
        check_shard(self.name, self.config.engine, shard, input_size_per_partition, shard.inner)
        check_block(self.name, self.config.engine, input_size_per_partition)
        last = self.name.rpartition(".")[2]
        if len(output_partition_sizes) != len(FUSED.get(last, (last,))):
            raise ValueError(
                f"{self.name}: a fused linear of {len(output_partition_sizes)} parts that the trainer's names do not "
                f"know; known: {FUSED}. Extend quads.layers.names or add {last!r} to skip"
            )
        super().create_weights(layer, input_size_per_partition, output_partition_sizes, *args, **kwargs)
        inputs = {self.name: input_size_per_partition}
        split = frozenset(inputs if shard.inner else ())
        state = LayerState(self.name, "linear", self.config.engine, inputs, list(output_partition_sizes), shard, split)
        setattr(layer, ATTRIBUTE, state)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Quantize the freshly loaded checkpoint values; vLLM's flag keeps the global pass from doing it again."""
        if getattr(layer, _PROCESSED, False):
            return
        state, mode = getattr(layer, ATTRIBUTE), self.config.engine.mode
        check_backend(self.config, layer.weight)
        load_masks(self.config, state, layer.weight.device)
        w, shard = layer.weight.data, state.shard
        names = [f"{name}.weight" for name in trainer_names(self.name)]
        agreed(lambda: check_parts(w, state.widths, names), shard, self.name, w.device)
        if native.serves(self.config.engine):
            native.store(layer, "weight", state.widths, self.config.engine, self.name)
        else:
            groups = (state.widths, mode.scale_group, self.name, shard.everywhere, shard.inner)
            store(layer, "weight", quantize_rows(w, mode.weight, *groups))
        state.loads += 1
        setattr(layer, _PROCESSED, True)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N] in x's dtype."""
        if self.config.engine.mode.name == "bf16":
            return linear(x, layer.weight, bias)
        state = getattr(layer, ATTRIBUTE)
        if self.config.engine.backend == "triton":
            return self._triton(layer, state, x, bias)
        if native.serves(self.config.engine):
            return native.linear(self.config, layer, state, x, bias)
        a = state.quantize_input(self.name, x.reshape(-1, x.shape[-1]))
        y = emulated_linear(a, WeightQ(layer.weight, layer.weight_rcp), x.dtype, bias)
        return y.view(*x.shape[:-1], layer.weight.shape[0])

    def _triton(
        self, layer: torch.nn.Module, state: LayerState, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """One custom op; nothing here waits for the GPU or depends on values, so that it can be traced and captured."""
        if (amax := state.common_amax(self.name, x)) is not None:
            return self._part(layer, state, x, bias, amax)
        mask, formats = state.masks.get(self.name), (self.config.engine.mode.activation, self.config.rac)
        if self.config.graph_safe:
            return kernels.linear(x, layer.weight, layer.weight_rcp, mask, bias, *formats)
        with naming_input(self.name):
            return kernels.linear(x, layer.weight, layer.weight_rcp, mask, bias, *formats)

    def _part(
        self, layer: torch.nn.Module, state: LayerState, x: torch.Tensor, bias: torch.Tensor | None, amax: torch.Tensor
    ) -> torch.Tensor:
        """The same on this rank's channels of whole tokens with the given amax; eager only."""
        mode, rows = self.config.engine.mode, x.reshape(-1, x.shape[-1])
        with naming_input(self.name):
            t = kernels.operands(rows, mode.activation, mode.rac, state.masks.get(self.name), amax.view(-1, 1))
        y = kernels.linear_product(t, layer.weight, layer.weight_rcp, x.dtype, bias)
        return y.view(*x.shape[:-1], -1)
