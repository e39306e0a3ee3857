# SPDX-License-Identifier: Apache-2.0
"""Fused 3-D experts with fake-quantized weights and inputs.

    h_r = act(A(x)_t W13_e[:F]^T) * (A(x)_t W13_e[F:]^T)      y_t = sum over choices of weight * A(h)_r W2_e^T

gate_up_proj [E, 2F, D], down_proj [E, D, F]; T tokens, S choices per token, R = T S routed rows.
Both weight tensors are quantized once per forward (once per optimizer step with a cache), x once per token, h once for
all routed rows (a batch mask is then one mask per layer and forward). Rows are summed in fp32, like the engine does.
Differs from the stock forward: that one is dispatched to kernels which would bypass the quantizers, and this one
unbinds the experts once (one gradient buffer instead of one per expert). experts="grouped" computes the same in two
grouped products (grouped.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from quads.layers.grouped import grouped_experts, start_plan
from quads.layers.routing import combine, route
from quads.layers.setup import LayerSetup

# Classes whose layout was read and found to be the one above: rows [gate; up], no bias, not transposed.
KNOWN_EXPERTS = ("Qwen3MoeExperts", "Qwen2MoeExperts", "MixtralExperts", "OlmoeExperts")


def layout_problem(module: torch.nn.Module) -> str | None:
    """Why `module` is not a known experts container, or None when it is one."""
    kind = type(module).__name__
    if kind not in KNOWN_EXPERTS:
        return f"class {kind} is unknown; known: {', '.join(KNOWN_EXPERTS)}"
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
    if set(shapes) != {"gate_up_proj", "down_proj"}:
        return f"parameters {sorted(shapes)} are not gate_up_proj and down_proj"
    experts, twice_hidden, width = shapes["gate_up_proj"]
    if shapes["down_proj"] != (experts, width, twice_hidden // 2):
        return f"down_proj {shapes['down_proj']} does not fit gate_up_proj {shapes['gate_up_proj']}"
    if getattr(module, "is_transposed", False) or getattr(module, "has_bias", False):
        return "transposed or biased experts are not supported"
    return None


class ExpertsForward:
    """Mixed in front of the stock class: replaces the forward, keeps parameters and everything else."""

    quads: LayerSetup

    def one_quantized(self, w: Tensor, param: str, quantize: Callable[..., Tensor]) -> Tensor:
        """W(w) of one of the two tensors through `quantize(w, amax, param)`; gate and up apart where they share no
        scale.
        """
        precision = self.quads.precision
        if param == "gate_up_proj" and precision.weight == "nvfp4" and precision.scale_group == "shard":
            return torch.cat([quantize(half, None, param) for half in w.chunk(2, dim=1)], dim=1)
        return quantize(w, None, param)

    def quantized(self, w13: Tensor, w2: Tensor, quantize: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        """W13 [E, 2F, D] and W2 [E, D, F] through `quantize(w, amax, param)` (LayerSetup.fake or .dequantized)."""
        return self.one_quantized(w13, "gate_up_proj", quantize), self.one_quantized(w2, "down_proj", quantize)

    def weights(self) -> tuple[Tensor, Tensor]:
        """W13 [E, 2F, D] and W2 [E, D, F] of this forward, gradients straight through."""

        def one(param: str) -> Tensor:
            return self.quads.weight(self, param, lambda w: self.one_quantized(w, param, self.quads.fake))

        return one("gate_up_proj"), one("down_proj")

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """x [T, D], top_k_index int [T, S], top_k_weights [T, S] -> [T, D] in x's dtype."""
        if self.quads.execution.experts == "grouped":
            return self._grouped(x, top_k_index, top_k_weights)
        w13, w2 = (w.unbind(0) for w in self.weights())
        rows = route(top_k_index, len(w13))
        counts = [count for _, count in rows.experts]
        x_RD = self.quads.activation(x, "w13")[rows.token]
        hidden = []
        for (expert, _), part in zip(rows.experts, x_RD.split(counts), strict=True):
            gate, up = linear(part, w13[expert]).chunk(2, dim=-1)
            hidden.append(self.act_fn(gate) * up)
        h_RF = self.quads.activation(torch.cat(hidden), "w2", rows.token)
        parts = zip(rows.experts, h_RF.split(counts), strict=True)
        y_RD = torch.cat([linear(part, w2[expert]) for (expert, _), part in parts])
        return combine(y_RD, top_k_weights, rows).to(x.dtype)

    def _grouped(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        join = start_plan(top_k_index, len(self.gate_up_proj))
        w13, w2 = self.weights()
        x_TD = self.quads.activation(x, "w13")
        if torch.is_autocast_enabled(x.device.type):  # grouped products are unknown to autocast
            x_TD, w13, w2 = (t.to(torch.get_autocast_dtype(x.device.type)) for t in (x_TD, w13, w2))
        quantize = lambda h, token: self.quads.activation(h, "w2", token)  # noqa: E731
        return grouped_experts(x_TD, top_k_index, top_k_weights, w13, w2, self.act_fn, quantize, join()).to(x.dtype)


@cache
def experts_class(base: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """The swapped class of one stock experts class."""
    return type(f"Quads{base.__name__}", (ExpertsForward, base), {"__module__": __name__})
