# SPDX-License-Identifier: Apache-2.0
"""Rows of a mixture-of-experts layer, gathered once and sorted by expert; used by trainer and engine.

    ids [T, S] -> R routed rows (t, s) in the order of their expert; row r works on token[r] and lands in order[r]
    out[t] = sum over s of weight[t, s] * y[row of (t, s)]

T tokens, S choices per token, R routed rows (T*S unless some experts live elsewhere). Differs from a loop that calls
`nonzero` per expert: one sort, one gather, one scatter, and the sum over s has a fixed order on every device.
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


def route(ids: torch.Tensor, num_experts: int) -> RoutedRows:
    """ids int [T, S]; an id outside 0..num_experts-1 (an expert held by another rank) drops that row."""
    flat = ids.reshape(-1).long()
    flat = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts].tolist()
    order = torch.argsort(flat, stable=True)[: sum(counts)]
    hit = [(expert, count) for expert, count in enumerate(counts) if count]
    return RoutedRows(order, order // ids.shape[1], hit, (ids.shape[0], ids.shape[1]))


def combine(y: torch.Tensor, weights: torch.Tensor, rows: RoutedRows) -> torch.Tensor:
    """y [R, D] in row order, weights [T, S] -> fp32 [T, D], weighted sum over S in fp32."""
    tokens, slots = rows.shape
    scaled = y.float() * weights.reshape(-1)[rows.order].float().unsqueeze(-1)
    slot_out = scaled.new_zeros(tokens * slots, y.shape[-1]).index_copy(0, rows.order, scaled)
    return slot_out.view(tokens, slots, -1).sum(1)
