# SPDX-License-Identifier: Apache-2.0
"""Log-probs and entropy from logits, CHUNK tokens at a time, with nothing but the logits kept for the backward pass.

    log_prob[t] = z[t, y_t] - logsumexp_v z[t, v]
    entropy[t]  = logsumexp_v z[t, v] - sum_v softmax(z[t])_v z[t, v]          nats

logits [..., V] in bfloat16 or float32, labels int64 [...]; arithmetic and results in float32, gradients in the dtype of
the logits. A chunk is recomputed in backward (torch's checkpoint), so that beside the logits a training step holds a
few float32 arrays of [CHUNK, V] and not of [T, V]: with a vocabulary of 151,936 and 16,000 tokens 0.6 GB instead of
10 GB each.
Differs from verl 0.9.1 without flash-attn, which calls three kernels per *token* for log-probs
(logprobs_from_logits_v2) and keeps three float32 arrays of all tokens for backward: log-softmax, softmax and, for the
entropy's logsumexp, a copy of the logits; same values up to the order of sums.
verl's own fused head (`use_fused_kernels`) would not materialise logits at all, but reads `lm_head.weight` outside
lm_head's forward, where FSDP2 has it sharded: "mixed torch.Tensor and DTensor".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

CHUNK = 1024


def log_probs(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """float32 [...] of logits [..., V] at int64 labels [...]. Raises ValueError when the shapes do not match.

    `inplace_backward` is verl's and has no meaning here.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)}: need [..., V] and [...]")
    return _by_chunk(_log_probs, logits, labels.reshape(-1)).view(labels.shape)


def entropy(logits: Tensor, chunk_size: int | None = None) -> Tensor:
    """float32 [...] of logits [..., V]. `chunk_size` is verl's and has no meaning here."""
    return _by_chunk(_entropy, logits).view(logits.shape[:-1])


def _by_chunk(compute: Callable[..., Tensor], logits: Tensor, *more: Tensor) -> Tensor:
    # split and not slices: its gradient is one concatenation, a slice's is an array of zeros as large as all logits.
    parts = zip(logits.reshape(-1, logits.shape[-1]).split(CHUNK), *(m.split(CHUNK) for m in more), strict=True)
    found: list[Any] = [checkpoint(compute, *part, use_reentrant=False, preserve_rng_state=False) for part in parts]
    return torch.cat(found)


def _log_probs(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    return -cross_entropy(logits_TV.float(), labels_T, reduction="none")


def _entropy(logits_TV: Tensor) -> Tensor:
    log_prob = logits_TV.float().log_softmax(-1)
    return -(log_prob.exp() * log_prob).sum(-1)
