"""The decomposition during training, layer by layer: how far apart the rungs' hidden states are.

    e = |h_a - h_b| / |h_b|   per token; h [D] at one point of one layer, L2 over D, float64; 0 where h_a = h_b

    delta_weight   a = rollout weights (Q)           b = trainer (P)
    delta_act      a = rollout weights + acts (R)    b = Q
    total          a = R                             b = P

    row = {layer, tokens, <pair>_mean, <pair>_max}   over the recorded tokens, null where not finite

Layers: the keys of quads.layers.blocks, `model.layers.i.self_attn.out` and `.mlp.out` (what a block adds to the stream)
and `model.layers.i` (the stream after the layer).
Tokens, prompts included: of one rank's first micro-batch the first sequence, cut at TOKENS, and those after it that fit
whole. Attention is causal, so the cut changes no hidden state; the budget keeps the cost apart from the batch's size.
Differs from layerwise.py in that trainer is compared with trainer at another precision, not with an engine, so there is
no numerical term; norms of differences do not add up as the log-prob terms do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

TOKENS = 512


def token_rel_l2(a_ND: Tensor, b_ND: Tensor) -> Tensor:
    """e of the module docstring, float64 [N]."""
    a, b = a_ND.double(), b_ND.double()
    size_N = (a - b).norm(dim=-1)
    return torch.where(size_N == 0, size_N, size_N / b.norm(dim=-1))


def taken(lengths: Iterable[int]) -> list[int]:
    """How many tokens of each of a micro-batch's leading sequences are recorded; together at most TOKENS."""
    kept: list[int] = []
    for length in lengths:
        if kept and sum(kept) + length > TOKENS:
            break
        kept.append(min(length, TOKENS))
    return kept


def first_rows(x: Tensor, lengths_B: Tensor) -> Tensor:
    """The recorded tokens [N, D] of hidden states in either of the trainer's layouts; lengths int [B] of the sequences.

        [B, T, D]     a row per sequence, padded on the right
        [1, N, D]     packed one after the other, N the tokens of all, perhaps with padding at the end

    Raises ValueError for any other shape. A packed shard (sequence parallelism) gives the tokens that this rank holds.
    """
    lengths = lengths_B.tolist()
    kept = taken(lengths)
    if x.dim() == 3 and x.shape[0] == 1:
        return x[0, : sum(kept)]
    if x.dim() == 3 and x.shape[0] == len(lengths) and x.shape[1] >= max(lengths):
        return torch.cat([x[b, :n] for b, n in enumerate(kept)])
    raise ValueError(
        f"hidden states {list(x.shape)} are neither {len(lengths)} sequences of up to {max(lengths)} tokens, padded, "
        f"nor {sum(lengths)} packed tokens"
    )


def rows(rungs: Sequence[Mapping[str, Tensor]], device: str | torch.device = "cpu") -> list[dict[str, Any]]:
    """One row per layer of the recordings [N, D] at P, Q and R (in this order), computed on `device`."""
    p, q, r = rungs
    found = []
    for layer in p:
        at_p, at_q, at_r = (rung[layer].to(device, torch.float64) for rung in (p, q, r))
        row: dict[str, Any] = {"layer": layer, "tokens": len(at_p)}
        for pair, a, b in (("total", at_r, at_p), ("delta_weight", at_q, at_p), ("delta_act", at_r, at_q)):
            e_N = token_rel_l2(a, b)
            row |= {f"{pair}_mean": _number(e_N.mean()), f"{pair}_max": _number(e_N.max())}
        found.append(row)
    return found


def _number(value: Tensor) -> float | None:
    number: float = value.item()
    return number if math.isfinite(number) else None
