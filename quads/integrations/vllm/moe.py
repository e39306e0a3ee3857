# SPDX-License-Identifier: Apache-2.0
"""Routed experts of the vLLM plugin.

    stored   w13_weight [E, 2F, D], w2_weight [E, D, F] = q * s exact; w13_rcp fp32 [E, 2F, 1], w2_rcp fp32 [E, D, 1]
    forward  rows sorted by expert; x quantized once, the rows of the second GEMM quantized once

E local experts, D model width, F expert width, T tokens, S choices. Global scales are per expert; scale_group "fused"
shares one between gate and up. A batch mask of the second GEMM is one mask over all routed rows of this forward.
Differs from a GPU engine's grouped GEMM in speed only: experts are looped over on the host, those without rows cost
nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear, silu
from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase

from quads.integrations.vllm.quantization import (
    _PROCESSED,
    QuadsConfig,
    check_backend,
    check_block,
    check_single_shard,
    load_masks,
    store,
)
from quads.integrations.vllm.state import ATTRIBUTE, LayerState
from quads.layers.routing import RoutedRows, combine, route
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
        check_block(f"{self.name}.w13", self.config.engine, hidden_size)
        check_block(f"{self.name}.w2", self.config.engine, intermediate_size_per_partition)
        check_single_shard(self.name, self.moe.moe_parallel_config.tp_size)
        activation = getattr(layer.activation, "value", layer.activation)
        if activation != "silu" or self.moe.has_bias:
            raise ValueError(
                f"{self.name}: experts with activation {activation!r}, bias {self.moe.has_bias} are not supported; "
                f"known: gated silu without bias. Add 'experts' to skip to leave them in high precision"
            )
        super().create_weights(layer, num_experts, hidden_size, intermediate_size_per_partition, *args, **kwargs)
        inputs = {f"{self.name}.w13": hidden_size, f"{self.name}.w2": intermediate_size_per_partition}
        widths = [intermediate_size_per_partition] * 2
        setattr(layer, ATTRIBUTE, LayerState(self.name, "experts", self.config.engine, inputs, widths))

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        """No modular kernel of vLLM is used."""
        return None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Quantize the freshly loaded checkpoint values; vLLM's flag keeps the global pass from doing it again."""
        if getattr(layer, _PROCESSED, False):
            return
        state, mode = getattr(layer, ATTRIBUTE), self.config.engine.mode
        check_backend(self.config, layer.w13_weight)
        load_masks(self.config, state, layer.w13_weight.device)
        w13, w2 = layer.w13_weight.data, layer.w2_weight.data
        for parameter, w, widths in (("w13_weight", w13, state.widths), ("w2_weight", w2, [w2.shape[1]])):
            name = f"{self.name}.{parameter}"
            store(layer, parameter, quantize_rows(w, mode.weight, widths, mode.scale_group, name))
        state.loads += 1
        setattr(layer, _PROCESSED, True)

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
        ids = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
        rows = route(ids, layer.w13_weight.shape[0])
        if not rows.experts:
            return torch.zeros_like(x)
        on_input = layer.apply_router_weight_on_input
        if on_input:
            scale = topk_weights.reshape(-1)[rows.order].unsqueeze(-1).to(x.dtype)
            y = self._experts(layer, x[rows.token] * scale, rows, gathered=True)
        else:
            y = self._experts(layer, x, rows, gathered=False)
        return combine(y, torch.ones_like(topk_weights) if on_input else topk_weights, rows).to(x.dtype)

    def _experts(self, layer: torch.nn.Module, x: torch.Tensor, rows: RoutedRows, gathered: bool) -> torch.Tensor:
        """y [R, D] in row order; x is [R, D] when gathered, else [T, D]."""
        if self.config.engine.mode.name == "bf16":
            return _plain_experts(layer, x if gathered else x[rows.token], rows)
        state = getattr(layer, ATTRIBUTE)
        if self.config.engine.backend == "triton":
            return self._triton_experts(layer, state, x, rows, gathered)
        a = state.quantize_input(f"{self.name}.w13", x)
        a = a if gathered else ActivationQ(a.qs[rows.token], a.rcp[rows.token])
        gate_up = _multiply(a, layer.w13_weight, layer.w13_rcp, rows, x.dtype)
        gate, up = gate_up.chunk(2, dim=-1)
        h = state.quantize_input(f"{self.name}.w2", silu(gate) * up)
        return _multiply(h, layer.w2_weight, layer.w2_rcp, rows, x.dtype)

    def _triton_experts(
        self, layer: torch.nn.Module, state: LayerState, x: torch.Tensor, rows: RoutedRows, gathered: bool
    ) -> torch.Tensor:
        """The same with backend triton: one grouped kernel per GEMM instead of a loop over experts."""
        from quads.kernels.backend import grouped_product
        from quads.kernels.rac_gemm import Terms

        ends = torch.zeros(layer.w13_weight.shape[0] + 1, dtype=torch.int32)
        for expert, count in rows.experts:
            ends[expert + 1] = count
        offsets = ends.cumsum(0, dtype=torch.int32).to(x.device)
        t = state.quantize_operands(f"{self.name}.w13", x)
        if not gathered:
            t = Terms(*(None if part is None else part[rows.token] for part in t))
        gate, up = grouped_product(t, layer.w13_weight, layer.w13_rcp, offsets, x.dtype).chunk(2, dim=-1)
        h = state.quantize_operands(f"{self.name}.w2", silu(gate) * up)
        return grouped_product(h, layer.w2_weight, layer.w2_rcp, offsets, x.dtype)


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
