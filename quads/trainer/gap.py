"""The rollout/trainer log-prob gap of one batch, in every definition that this project reports.

    d = log pi_trainer - log pi_rollout   on the response tokens of the rollout, r = exp(d)
    gap_mean = mean |d|      gap_max = max |d|      gap_p99 = 0.99 quantile of |d|
    k1 = mean(-d)            k3 = mean(r - 1 - d)             both estimate KL(rollout || trainer)
    ess = (sum r)^2 / (n sum r^2)                             1 where both agree
    clipped_share = share of tokens with r outside [1 - low, 1 + high]

Shapes: log-probs and mask [B, T] (B sequences, T response tokens); natural logarithms. Source: the paper's gap metric;
k1/k3 as in Schulman's note on KL estimators. Differs from verl's rollout_probs_diff, which measures differences of
probabilities, and from its rollout_corr metrics, which verl 0.9.1 does not compute when rollout log-probs are the old
ones. `clipped_share` counts tokens outside the clip range, whatever the sign of their advantage.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def gap_metrics(
    trainer_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, clip_low: float, clip_high: float
) -> dict[str, float]:
    """Metrics of the module docstring over the tokens where mask is true.

    Raises ValueError for an empty mask, different shapes, or non-finite log-probs (a NaN here would silently turn
    into a NaN loss).
    """
    if trainer_BT.shape != rollout_BT.shape or trainer_BT.shape != mask_BT.shape:
        raise ValueError(
            f"log-probs and mask must have one shape, got trainer {tuple(trainer_BT.shape)}, "
            f"rollout {tuple(rollout_BT.shape)}, mask {tuple(mask_BT.shape)}"
        )
    keep = mask_BT.bool()
    d = (trainer_BT[keep].float() - rollout_BT[keep].float()).double()
    if d.numel() == 0:
        raise ValueError("gap of no tokens: the response mask is empty")
    if not torch.isfinite(d).all():
        bad = int((~torch.isfinite(d)).sum())
        raise ValueError(f"non-finite log-probs in {bad} of {d.numel()} response tokens (trainer minus rollout)")
    size, r = d.abs(), d.exp()
    return {
        "gap_mean": size.mean().item(),
        "gap_max": size.max().item(),
        "gap_p99": size.quantile(0.99).item(),
        "k1": (-d).mean().item(),
        "k3": (r - 1 - d).mean().item(),
        "ess": (r.sum() ** 2 / (r.numel() * r.square().sum())).item(),
        "clipped_share": ((r < 1 - clip_low) | (r > 1 + clip_high)).double().mean().item(),
    }
