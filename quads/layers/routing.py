# SPDX-License-Identifier: Apache-2.0
"""Rows of a mixture-of-experts layer, gathered once and sorted by expert; used by trainer and engine.

    ids [T, S] -> R routed rows (t, s) in the order of their expert; row r works on token[r] and lands in order[r]
    out[t] = sum over s of weight[t, s] * y[row of (t, s)]

T tokens, S choices per token, E experts, R routed rows. Two plans of the same order: `route` reads the counts on the
host and holds only rows of experts 0..E-1; `route_on_device` waits for nothing, so it can be captured in a CUDA graph,
and holds all T*S rows, those without an expert here last. T may be 0.
Differs from a loop that calls `nonzero` per expert: one sort, one gather, one scatter, and the sum over s has a fixed
order on every device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class RoutedRows(NamedTuple):
    """Plan of one layer call."""

    order: torch.Tensor  # int64 [R], position t * S + s of each row
    token: torch.Tensor  # int64 [R], row of the input
    experts: list[tuple[int, int]]  # (expert, number of its rows), only experts that are hit, ascending
    shape: tuple[int, int]  # (T, S)


class DeviceRows(NamedTuple):
    """The same without a host value; R = T*S. Expert e has rows offsets[e] .. offsets[e + 1]."""

    order: torch.Tensor  # int64 [R]
    token: torch.Tensor  # int64 [R]
    offsets: torch.Tensor  # int32 [E + 1]; rows from offsets[E] on belong to experts held elsewhere
    shape: tuple[int, int]  # (T, S)


def _own(ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int64 [T*S]: the expert, or num_experts for an id that is not 0..num_experts-1."""
    flat = ids.reshape(-1).long()
    return torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)


def route(ids: torch.Tensor, num_experts: int) -> RoutedRows:
    """ids int [T, S]; an id outside 0..num_experts-1 (an expert held by another rank) drops that row."""
    flat = _own(ids, num_experts)
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts].tolist()
    order = torch.argsort(flat, stable=True)[: sum(counts)]
    hit = [(expert, count) for expert, count in enumerate(counts) if count]
    return RoutedRows(order, order // ids.shape[1], hit, (ids.shape[0], ids.shape[1]))


def route_on_device(ids: torch.Tensor, num_experts: int) -> DeviceRows:
    """ids int [T, S]; an id outside 0..num_experts-1 puts that row behind the last expert's."""
    flat, order = torch.sort(_own(ids, num_experts), stable=True)
    experts = torch.arange(num_experts + 1, device=ids.device)
    offsets = torch.searchsorted(flat, experts, out_int32=True)
    return DeviceRows(order, order // ids.shape[1], offsets, (ids.shape[0], ids.shape[1]))


def combine(y: torch.Tensor, weights: torch.Tensor, rows: RoutedRows | DeviceRows) -> torch.Tensor:
    """y [R, D] in row order, weights [T, S] -> fp32 [T, D], weighted sum over S in fp32.

    Rows of a DeviceRows plan without an expert count as zero, whatever y holds there.
    """
    tokens, slots = rows.shape
    scaled = y.float() * weights.reshape(-1)[rows.order].float().unsqueeze(-1)
    if isinstance(rows, DeviceRows):
        here = torch.arange(scaled.shape[0], device=y.device) < rows.offsets[-1]
        scaled = torch.where(here.unsqueeze(-1), scaled, 0.0)
    slot_out = scaled.new_zeros(tokens * slots, y.shape[-1]).index_copy(0, rows.order, scaled)
    return slot_out.view(tokens, slots, y.shape[-1]).sum(1)
