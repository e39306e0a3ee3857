# SPDX-License-Identifier: Apache-2.0
"""Experts as two grouped products: the same values as the loop of `experts.py`, without a wait for the GPU.

    rows sorted by expert: r = (t, s), ends[e] = rows of experts 0..e
    u_RG = A(x)[token_r] W13_e^T     h_RF = A(act(u[:F]) * u[F:])     out_t = sum over s of weight_ts * (h W2_e^T)_(t,s)

T tokens, S choices, R = T S rows, E experts, G = 2F. Products through torch._grouped_mm (bf16, fp32 accumulation).
Every expert id must lie in 0..E-1 (a trainer holds all experts). Gathers have written backwards: each token has exactly
S rows, so its gradient is a sum over S of gathered rows; no atomics, same bits every time. The sum over S is one
product with fp32 accumulation and one rounding, as the fp32 sum of the loop path.
Differs from stock grouped experts in these backwards and in not rounding weight * y before the sum.

W2 may come as a function: it is called after the first product was launched. With BESIDE set, that product then runs on
a stream of high priority and leaves BESIDE SMs to what the function launches (quantization of W2, bound by memory while
the product is bound by arithmetic). No tile of a product depends on the number of SMs: same bits.
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


# SMs that the first product leaves to the quantization of W2 beside it (even: its clusters are pairs); None: one after
# the other.
BESIDE: int | None = None
_streams: dict[int, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """This module's stream of high priority on a GPU. Whoever uses it lets it wait for the current stream first."""
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _streams:
        _streams[index] = torch.cuda.Stream(index, priority=-1)
    return _streams[index]


def start_plan(ids: Tensor, num_experts: int) -> Callable[[], Plan]:
    """`plan`, started beside what the caller does next; call the result before using it.

    On a GPU a stream of its own computes it: sorting takes about ten small launches, which leave the GPU mostly idle
    and hide behind the quantization of the weights. Works while a CUDA graph is captured.
    """
    if not ids.is_cuda:
        found = plan(ids, num_experts)
        return lambda: found
    main = torch.cuda.current_stream(ids.device)
    side = _side_stream(ids.device)
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


def _require_bf16(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.bfloat16:
        raise ValueError(f"grouped experts multiply bfloat16, {name} is {tensor.dtype}; set experts='loop'")


def _with_idle_sms(x: Tensor, w: Tensor, ends: Tensor, idle: int) -> Tensor:
    """x w_e^T on all SMs but `idle`, launched on the side stream; the caller holds x and w until it has joined."""
    main, side = torch.cuda.current_stream(x.device), _side_stream(x.device)
    side.wait_stream(main)
    before = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(idle)
    try:
        with torch.cuda.stream(side):
            out = torch._grouped_mm(x, w.mT, ends)
    finally:
        torch._C._set_sm_carveout_experimental(before)
    out.record_stream(main)
    return out


class _ProductBeside(torch.autograd.Function):
    """x [R, K], w [E, N, K] -> x w_e^T [R, N], still running when it returns; backward on the caller's stream.

    Autograd would run the backward of an operation on the stream of its forward.
    """

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, ends: Tensor, idle: int) -> Tensor:
        ctx.save_for_backward(x, w, ends)
        return _with_idle_sms(x, w, ends, idle) if x.is_cuda else torch._grouped_mm(x, w.mT, ends)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, w, ends = ctx.saved_tensors
        need_x, need_w = ctx.needs_input_grad[:2]
        grad_x = torch._grouped_mm(grad, w, ends) if need_x else None
        grad_w = torch._grouped_mm(grad.mT, x, ends) if need_w else None
        return grad_x, grad_w, None, None


def _first_product(x: Tensor, w13: Tensor, w2: Tensor | Callable[[], Tensor], ends: Tensor) -> tuple[Tensor, Tensor]:
    """(x W13_e^T, W2); with a function for W2 and BESIDE set, both at the same time."""
    if not callable(w2):
        return torch._grouped_mm(x, w13.mT, ends), w2
    if BESIDE is None:
        return torch._grouped_mm(x, w13.mT, ends), w2()
    u = _ProductBeside.apply(x, w13, ends, BESIDE)
    try:
        return u, w2()
    finally:
        # Before x is given back: without autograd nobody else holds it, and the product may still read it.
        if x.is_cuda:
            torch.cuda.current_stream(x.device).wait_stream(_side_stream(x.device))


def grouped_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor | Callable[[], Tensor],
    act: Callable[[Tensor], Tensor],
    quantize_hidden: Callable[[Tensor, Tensor], Tensor] | None = None,
    planned: Plan | None = None,
) -> Tensor:
    """x bf16 [T, D], ids int [T, S], weights [T, S], w13 bf16 [E, 2F, D], w2 bf16 [E, D, F] -> bf16 [T, D].

    w2 may be a function that gives it: see BESIDE. quantize_hidden(h [R, F], token [R]) replaces h before the second
    product; planned: `plan(ids, E)` if it exists. Raises ValueError for another dtype.
    """
    _require_bf16("x", x)
    _require_bf16("gate_up_proj", w13)
    p = planned or plan(ids, len(w13))
    u, w2 = _first_product(_Rows.apply(x, p), w13, w2, p.ends)
    _require_bf16("down_proj", w2)
    gate, up = u.chunk(2, dim=-1)
    hidden = act(gate) * up
    if quantize_hidden is not None:
        hidden = quantize_hidden(hidden, p.token)
    y = torch._grouped_mm(hidden, w2.mT, p.ends)
    return _Combine.apply(y, weights.to(y.dtype), p)
