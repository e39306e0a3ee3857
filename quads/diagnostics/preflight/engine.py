"""The stand-in of a bf16 rollout engine: layers that round where the engine rounds.

    linear    y = bf16( A(x) W^T + b )                 A(x), W dequantized fp32, fp32 accumulation
    experts   g = bf16( A(x) W13^T )    h = silu(g_gate) * g_up in bf16    y = bf16( A(h) W2^T )    sum over S in fp32
    norm      y = bf16( x / rms(x) * gain )            rounded once; transformers' own bf16 forward rounds twice
    router    logits bf16, softmax and weights of the chosen experts in fp32

x arrives in bf16, and embeddings, norms, routers and the head are stored in bf16. Everything else is transformers' own
bf16 forward: attention scores and rotary embedding are rounded there, in places where an engine's kernels may round
once less. Differs from the trainer's layers after surgery in that a dequantized activation is never rounded to bf16,
as in the hardware's product. How close it comes to vLLM is in docs/preflight.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from quads.diagnostics.ladder import is_router, router_weights
from quads.layers.experts import ExpertsForward
from quads.layers.linear import QuadsLinear
from quads.layers.routing import combine, route
from quads.layers.setup import LayerSetup
from quads.numerics.qdq import quantize_activation


def operand(setup: LayerSetup, x: Tensor, part: str | None = None) -> Tensor:
    """fp32 [rows, K]: what the engine multiplies with for input x [rows, K]. Errors name the layer."""
    p, key = setup.precision, setup.key(part)
    mask = setup.masks[key].to(x.device) if p.rac is not None and p.rac.mask == "static" else None
    try:
        return quantize_activation(x, p.activation, p.rac, mask).dequantize()
    except ValueError as error:
        raise ValueError(f"input of {key}: {error}") from error


def engine_linear(module: QuadsLinear, x: Tensor) -> Tensor:
    """x bf16 [..., K] -> bf16 [..., N]."""
    w_NK = module.quads.weight(module, "weight", None)
    bias = None if module.bias is None else module.bias.float()
    y = linear(operand(module.quads, x.reshape(-1, x.shape[-1])), w_NK, bias)
    return y.to(x.dtype).view(*x.shape[:-1], -1)


def engine_experts(module: torch.nn.Module, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """x bf16 [T, D], top_k_index int [T, S], top_k_weights [T, S] -> bf16 [T, D]."""
    w13, w2 = (module.quads.weight(module, name, None).unbind(0) for name in ("gate_up_proj", "down_proj"))
    rows = route(top_k_index, len(w13))
    counts = [count for _, count in rows.experts]

    def multiply(a_RK: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        parts = zip(rows.experts, a_RK.split(counts), strict=True)
        return torch.cat([linear(part, weights[expert]) for (expert, _), part in parts]).to(x.dtype)

    gate, up = multiply(operand(module.quads, x, "w13")[rows.token], w13).chunk(2, dim=-1)
    y_RD = multiply(operand(module.quads, module.act_fn(gate) * up, "w2"), w2)
    return combine(y_RD, top_k_weights, rows).to(x.dtype)


def is_norm(module: torch.nn.Module) -> bool:
    """RMS norms of transformers' models, by the end of their class's name."""
    return type(module).__name__.endswith("RMSNorm")


def engine_value(module: torch.nn.Module, value: Tensor) -> Tensor:
    """A float32 parameter of `module` as the engine stores it; a norm's stays in float32, where it is multiplied."""
    stored = value.to(torch.bfloat16)
    return stored.float() if is_norm(module) else stored


def _norm(module: torch.nn.Module, x: Tensor) -> Tensor:
    y: Tensor = type(module).forward(module, x.float())
    return y.to(x.dtype)


def _router(module: torch.nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits, _, experts = type(module).forward(module, x)
    return logits, router_weights(module, logits, experts), experts


def _forward_of(module: torch.nn.Module) -> Callable[..., Any] | None:
    if isinstance(module, QuadsLinear):
        return engine_linear
    if isinstance(module, ExpertsForward):
        return engine_experts
    if is_norm(module):
        return _norm
    return _router if is_router(module) else None


@contextmanager
def as_engine(layer: torch.nn.Module) -> Iterator[None]:
    """Modules below `layer` compute as the engine while the block runs; weights of swapped ones must be kept already
    (quads.diagnostics.preflight.stream), other parameters must be `engine_value`s.
    """
    changed = []
    for module in layer.modules():
        forward = _forward_of(module)
        if forward is not None:
            module.forward = partial(forward, module)  # an instance attribute hides the class's forward
            changed.append(module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward
