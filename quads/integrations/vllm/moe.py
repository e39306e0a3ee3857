# SPDX-License-Identifier: Apache-2.0
"""Routed experts of the vLLM plugin.

    stored   w13_weight [E, 2F, D], w2_weight [E, D, F] = q * s exact; w13_rcp fp32 [E, 2F, 1], w2_rcp fp32 [E, D, 1]
    forward  rows sorted by expert; x quantized once, the rows of the second GEMM quantized once

E local experts, D model width, F expert width (under tensor parallelism this rank's part of it), T tokens, S choices.
Global scales are per expert; scale_group "fused" shares one between gate and up. A batch mask of the second GEMM is one
mask over all routed rows of this forward.
Backend reference loops over experts on the host, those without rows cost nothing; the others sort rows on the
device and run one grouped kernel per GEMM. All choose the same rows in the same order. Backends native and cutlass
store packed weights (native.py).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.nn.functional import linear, silu
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

from quads.integrations.vllm import native
from quads.integrations.vllm.quantization import (
    _PROCESSED,
    QuadsConfig,
    check_backend,
    check_block,
    check_parts,
    load_masks,
    store,
)
from quads.integrations.vllm.shards import agreed, check_shard, expert_shard
from quads.integrations.vllm.state import ATTRIBUTE, LayerState, naming_input
from quads.kernels import backend as kernels
from quads.layers.routing import DeviceRows, RoutedRows, combine, route, route_on_device
from quads.layers.weights import quantize_rows
from quads.numerics.qdq import ActivationQ, WeightQ, emulated_linear


class QuadsMoEMethod(OnlineMoEMethodBase):
    """RoutedExperts layers with gated SiLU."""

    def __init__(self, moe: Any, config: QuadsConfig, name: str):
        super().__init__(moe)
        self.config, self.name = config, name

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        *args,
        **kwargs,
    ) -> None:
        """Meta weights in checkpoint format, plus the layer's state."""
        w13, w2, shard = f"{self.name}.w13", f"{self.name}.w2", expert_shard(self.name, self.moe)
        native.refuse_shards(self.name, self.config.engine, shard.size)
        check_shard(w13, self.config.engine, shard, hidden_size, False)
        check_shard(w2, self.config.engine, shard, intermediate_size_per_partition, True)
        check_block(w13, self.config.engine, hidden_size)
        check_block(w2, self.config.engine, intermediate_size_per_partition)
        activation = getattr(layer.activation, "value", layer.activation)
        if activation != "silu" or self.moe.has_bias:
            raise ValueError(
                f"{self.name}: experts with activation {activation!r}, bias {self.moe.has_bias} are not supported; "
                f"known: gated silu without bias. Add 'experts' to skip to leave them in high precision"
            )
        super().create_weights(layer, num_experts, hidden_size, intermediate_size_per_partition, *args, **kwargs)
        inputs = {w13: hidden_size, w2: intermediate_size_per_partition}
        widths, split = [intermediate_size_per_partition] * 2, frozenset([w2] if shard.size > 1 else ())
        state = LayerState(self.name, "experts", self.config.engine, inputs, widths, shard, split)
        setattr(layer, ATTRIBUTE, state)

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        """No modular kernel of vLLM is used."""
        return None

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> None:
        """None: vLLM asks under tensor parallelism, and its base class takes the question for an error."""
        return None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Quantize the freshly loaded checkpoint values; vLLM's flag keeps the global pass from doing it again."""
        if getattr(layer, _PROCESSED, False):
            return
        state, mode = getattr(layer, ATTRIBUTE), self.config.engine.mode
        check_backend(self.config, layer.w13_weight)
        load_masks(self.config, state, layer.w13_weight.device)
        w13, w2 = layer.w13_weight.data, layer.w2_weight.data
        agreed(lambda: self._check_parts(w13, w2, state.widths), state.shard, self.name, w13.device)
        for parameter, w, widths in (("w13_weight", w13, state.widths), ("w2_weight", w2, [w2.shape[1]])):
            if native.serves(self.config.engine):
                native.store(layer, parameter, widths, self.config.engine, f"{self.name}.{parameter}")
                continue
            groups = (widths, mode.scale_group, f"{self.name}.{parameter}", state.shard.everywhere, w is w2)
            store(layer, parameter, quantize_rows(w, mode.weight, *groups))
        state.loads += 1
        setattr(layer, _PROCESSED, True)

    def _check_parts(self, w13: torch.Tensor, w2: torch.Tensor, widths: list[int]) -> None:
        check_parts(w13, widths, [f"{self.name}.gate_proj", f"{self.name}.up_proj"])
        check_parts(w2, [w2.shape[1]], [f"{self.name}.down_proj"])

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> torch.Tensor:
        """x [T, D], topk_weights [T, S], topk_ids [T, S] (global experts) -> [T, D]; shared experts are the runner's
        job.
        """
        ids, experts = local_experts(topk_ids, layer.expert_map), layer.w13_weight.shape[0]
        grouped = self.config.engine.backend != "reference"
        if grouped and self.config.graph_safe:
            rows: DeviceRows | RoutedRows = route_on_device(ids, experts)
        else:
            rows = route(ids, experts)
            if not rows.experts:
                return torch.zeros_like(x)
        on_input, token = layer.apply_router_weight_on_input, rows.token
        if on_input:
            scale = topk_weights.reshape(-1)[rows.order].unsqueeze(-1).to(x.dtype)
            x, token = x[token] * scale, None
        y = self._grouped(layer, x, token, rows) if grouped else self._reference(layer, x, token, rows)
        return combine(y, torch.ones_like(topk_weights) if on_input else topk_weights, rows).to(x.dtype)

    def _reference(
        self, layer: torch.nn.Module, x: torch.Tensor, token: torch.Tensor | None, rows: RoutedRows
    ) -> torch.Tensor:
        """y [R, D] in row order; row r is x[token[r]], or x[r] without token."""
        if self.config.engine.mode.name == "bf16":
            return _plain_experts(layer, x if token is None else x[token], rows)
        state = getattr(layer, ATTRIBUTE)
        a = state.quantize_input(f"{self.name}.w13", x)
        a = a if token is None else ActivationQ(a.qs[token], a.rcp[token])
        gate_up = _multiply(a, layer.w13_weight, layer.w13_rcp, rows, x.dtype)
        gate, up = gate_up.chunk(2, dim=-1)
        h = state.quantize_input(f"{self.name}.w2", silu(gate) * up)
        return _multiply(h, layer.w2_weight, layer.w2_rcp, rows, x.dtype)

    def _grouped(
        self, layer: torch.nn.Module, x: torch.Tensor, token: torch.Tensor | None, rows: DeviceRows | RoutedRows
    ) -> torch.Tensor:
        """The same as one custom op, without a wait for the GPU when the config is graph-safe. Mode bf16 too."""
        state = getattr(layer, ATTRIBUTE)
        if isinstance(rows, DeviceRows):
            return self._expert_rows(layer, x, token, rows.offsets)
        counts = [0] * layer.w13_weight.shape[0]
        for expert, count in rows.experts:
            counts[expert] = count
        ends = list(itertools.accumulate(counts, initial=0))
        offsets = torch.tensor(ends, dtype=torch.int32, device=x.device)
        if f"{self.name}.w2" in state.split and self.config.engine.mode.activation != "bf16":
            weights = (layer.w13_weight, layer.w13_rcp, layer.w2_weight, layer.w2_rcp)
            return self._part(x, token, offsets, weights, state)
        with naming_input(self.name):
            return self._expert_rows(layer, x, token, offsets)

    def _expert_rows(
        self, layer: torch.nn.Module, x: torch.Tensor, token: torch.Tensor | None, offsets: torch.Tensor
    ) -> torch.Tensor:
        state = getattr(layer, ATTRIBUTE)
        if native.serves(self.config.engine):
            return native.expert_rows(self.config, layer, state, x, token, offsets)
        masks = state.masks
        weights = (layer.w13_weight, layer.w13_rcp, layer.w2_weight, layer.w2_rcp)
        rest = (masks.get(f"{self.name}.w13"), masks.get(f"{self.name}.w2"), self.config.engine.mode.activation)
        return kernels.expert_rows(x, token, offsets, *weights, *rest, self.config.rac)

    def _part(
        self,
        x: torch.Tensor,
        token: torch.Tensor | None,
        offsets: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        state: LayerState,
    ) -> torch.Tensor:
        """`_grouped` on this rank's part of every expert: the amax of the second GEMM's rows crosses the ranks; eager
        only.
        """
        mode, (w13, rcp13, w2, rcp2) = self.config.engine.mode, weights
        first, second = f"{self.name}.w13", f"{self.name}.w2"
        with naming_input(first):
            t = kernels.operands(x, mode.activation, mode.rac, state.masks.get(first))
        if token is not None:
            t = type(t)(*(None if part is None else part[token] for part in t))
        gate, up = kernels.grouped_product(t, w13, rcp13, offsets, x.dtype).chunk(2, dim=-1)
        h = silu(gate) * up
        with naming_input(second):
            t = kernels.operands(h, mode.activation, mode.rac, state.masks.get(second), state.common_amax(second, h))
        return kernels.grouped_product(t, w2, rcp2, offsets, x.dtype)


def local_experts(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Local expert numbers of global ones; -1 for a choice that is -1 or whose expert lives on another rank."""
    if expert_map is None:
        return topk_ids
    ids = topk_ids.long()
    return torch.where(ids < 0, -1, expert_map[ids.clamp(min=0)])


def _multiply(
    a: ActivationQ, weight: torch.Tensor, rcp: torch.Tensor, rows: RoutedRows, dtype: torch.dtype
) -> torch.Tensor:
    """[R, N]: every row with its expert's matrix; weight [E, N, K], rcp [E, N, 1]."""
    counts = [count for _, count in rows.experts]
    parts = zip(rows.experts, a.qs.split(counts), a.rcp.split(counts), strict=True)
    return torch.cat(
        [emulated_linear(ActivationQ(qs, r), WeightQ(weight[e], rcp[e]), dtype) for (e, _), qs, r in parts]
    )


def _plain_experts(layer: torch.nn.Module, x_RD: torch.Tensor, rows: RoutedRows) -> torch.Tensor:
    """The same in the engine's dtype, without quantization."""
    outputs = []
    for (e, _), part in zip(rows.experts, x_RD.split([count for _, count in rows.experts]), strict=True):
        gate, up = linear(part, layer.w13_weight[e]).chunk(2, dim=-1)
        outputs.append(linear(silu(gate) * up, layer.w2_weight[e]))
    return torch.cat(outputs)
