# SPDX-License-Identifier: Apache-2.0
"""Experts as two grouped products: the same values as the loop of `experts.py`, without a wait for the GPU.

    rows sorted by expert: r = (t, s), ends[e] = rows of experts 0..e
    u_RG = A(x)[token_r] W13_e^T     h_RF = A(act(u[:F]) * u[F:])     out_t = sum over s of weight_ts * (h W2_e^T)_(t,s)

T tokens, S choices, R = T S rows, E experts, G = 2F. Products through torch._grouped_mm (bf16, fp32 accumulation).
Every expert id must lie in 0..E-1 (a trainer holds all experts). Gathers have written backwards: each token has exactly
S rows, so its gradient is a sum over S of gathered rows; no atomics, same bits every time. The sum over S is one
product with fp32 accumulation and one rounding, as the fp32 sum of the loop path.
Differs from stock grouped experts in these backwards and in not rounding weight * y before the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Plan(NamedTuple):
    """order int64 [R]: position t * S + s of each row; inverse int64 [R]; token int64 [R]; ends int32 [E]; slots S."""

    order: Tensor
    inverse: Tensor
    token: Tensor
    ends: Tensor
    slots: int


def plan(ids: Tensor, num_experts: int) -> Plan:
    """Rows of ids int [T, S] sorted by expert, ties in the order of t * S + s."""
    experts, order = torch.sort(ids.reshape(-1), stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=ids.device))
    bounds = torch.arange(num_experts, device=ids.device, dtype=experts.dtype)
    ends = torch.searchsorted(experts, bounds, right=True, out_int32=True)
    return Plan(order, inverse, order // ids.shape[1], ends, ids.shape[1])


_streams: dict[int, torch.cuda.Stream] = {}


def start_plan(ids: Tensor, num_experts: int) -> Callable[[], Plan]:
    """`plan`, started beside what the caller does next; call the result before using it.

    On a GPU a stream of its own computes it: sorting takes about ten small launches, which leave the GPU mostly idle
    and hide behind the quantization of the weights. Works while a CUDA graph is captured.
    """
    if not ids.is_cuda:
        found = plan(ids, num_experts)
        return lambda: found
    main = torch.cuda.current_stream(ids.device)
    if ids.get_device() not in _streams:
        _streams[ids.get_device()] = torch.cuda.Stream(ids.device, priority=-1)
    side = _streams[ids.get_device()]
    side.wait_stream(main)
    with torch.cuda.stream(side):
        found = plan(ids, num_experts)

    def join() -> Plan:
        main.wait_stream(side)
        for tensor in found[:4]:
            tensor.record_stream(main)  # allocated on the other stream: not to be given away while main reads it
        return found

    return join


class _Rows(torch.autograd.Function):
    """x [T, D] -> its rows in the order of the plan [R, D]."""

    @staticmethod
    def forward(ctx, x: Tensor, p: Plan) -> Tensor:
        ctx.plan = p
        return x.index_select(0, p.token)

    @staticmethod
    def backward(ctx, grad: Tensor):
        p = ctx.plan
        return grad.index_select(0, p.inverse).unflatten(0, (-1, p.slots)).sum(1), None


class _Combine(torch.autograd.Function):
    """y [R, D], weights [T, S] -> [T, D]: weighted sum over S, fp32 inside, rounded once."""

    @staticmethod
    def forward(ctx, y: Tensor, weights: Tensor, p: Plan) -> Tensor:
        ctx.plan = p
        ctx.save_for_backward(y, weights)
        y_TSD = y.index_select(0, p.inverse).unflatten(0, (-1, p.slots))
        return torch.bmm(weights.unsqueeze(1), y_TSD).squeeze(1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        p, (y, weights) = ctx.plan, ctx.saved_tensors
        grad_RD = grad.index_select(0, p.token)
        per_row = torch.bmm(grad_RD.unsqueeze(1), y.unsqueeze(2)).view(-1)
        grad_y = grad_RD.mul_(weights.reshape(-1).index_select(0, p.order).unsqueeze(1))
        return grad_y, per_row.index_select(0, p.inverse).view_as(weights), None


def grouped_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    act: Callable[[Tensor], Tensor],
    quantize_hidden: Callable[[Tensor, Tensor], Tensor] | None = None,
    planned: Plan | None = None,
) -> Tensor:
    """x bf16 [T, D], ids int [T, S], weights [T, S], w13 bf16 [E, 2F, D], w2 bf16 [E, D, F] -> bf16 [T, D].

    quantize_hidden(h [R, F], token [R]) replaces h before the second product; planned: `plan(ids, E)` if it exists.
    Raises ValueError for another dtype.
    """
    for name, tensor in (("x", x), ("gate_up_proj", w13), ("down_proj", w2)):
        if tensor.dtype != torch.bfloat16:
            raise ValueError(f"grouped experts multiply bfloat16, {name} is {tensor.dtype}; set experts='loop'")
    p = planned or plan(ids, len(w13))
    gate, up = torch._grouped_mm(_Rows.apply(x, p), w13.mT, p.ends).chunk(2, dim=-1)
    hidden = act(gate) * up
    if quantize_hidden is not None:
        hidden = quantize_hidden(hidden, p.token)
    y = torch._grouped_mm(hidden, w2.mT, p.ends)
    return _Combine.apply(y, weights.to(y.dtype), p)
