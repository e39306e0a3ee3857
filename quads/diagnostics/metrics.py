"""Every definition of the rollout/trainer gap, each with its definition in its name, side by side.

    d_bt = log pi_trainer - log pi_rollout  (nats, response tokens only)      r = exp(d)      s_b = sum over t of d_bt

    max_token_abs_d                     max over all tokens of |d|
    mean_seq_max_token_abs_d            mean over sequences of (max over its tokens of |d|)
    mean_microbatch_max_token_abs_d     mean over micro-batches of n consecutive sequences of (max over tokens of |d|)
    max_seq_mean_token_abs_d            max over sequences of (mean over its tokens of |d|)
    max_seq_abs_sum_d                   max over sequences of |s|
    max_token_abs_prob_diff             max over all tokens of |pi_trainer - pi_rollout|
    k1 = mean(-d)   k2 = mean(d^2 / 2)   k3 = mean(r - 1 - d)           estimators of KL(rollout || trainer)
    chi2_token = mean(r^2) - 1          chi2_seq = mean(exp(2 s)) - 1
    ess_token = (sum r)^2 / (n sum r^2) ess_seq likewise with exp(s)    1 where both agree
    clipped_share_token                 share of tokens with r outside [1 - low, 1 + high]
    quadrants                           share of tokens by sign(advantage) x sign(d)

Shapes: B sequences, T response tokens, [B, T] float32 log-probs, bool mask. Sums run in float64.
Source: the paper; what "max" aggregates over is unknown there, hence several.
Those that training logs come from quads.trainer.gap, so that both mean the same. The expectation identities (k1, k2,
k3, chi2 estimate divergences) hold for tokens sampled from the rollout policy at temperature 1 and top_p 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quads.trainer.gap import gap_metrics


class GapSettings(NamedTuple):
    """Clip range of the policy ratio, and sequences per micro-batch."""

    clip_low: float
    clip_high: float
    microbatch: int


@torch.no_grad()
def gap_table(trainer_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, settings: GapSettings) -> dict[str, float]:
    """All metrics of the module docstring except the quadrants.

    Raises ValueError for different shapes, an empty mask or sequence, or non-finite log-probs where mask is true.
    """
    logged = gap_metrics(trainer_BT, rollout_BT, mask_BT, settings.clip_low, settings.clip_high)
    keep = mask_BT.bool()
    if not bool(keep.any(1).all()):
        raise ValueError(f"{int((~keep.any(1)).sum())} of {len(keep)} sequences have no response token; drop them")
    d_BT = difference(trainer_BT, rollout_BT, keep)
    size_BT, d = d_BT.abs(), d_BT[keep]
    peak_B, sum_B = size_BT.amax(1), d_BT.sum(1)
    prob = (trainer_BT[keep].double().exp(), rollout_BT[keep].double().exp())
    prob_diff = (prob[0] - prob[1]).abs()
    return {
        "mean_token_abs_d": logged["gap_mean"],
        "mean_token_d": d.mean().item(),
        "rms_token_d": d.square().mean().sqrt().item(),
        "p99_token_abs_d": logged["gap_p99"],
        "p999_token_abs_d": d.abs().quantile(0.999).item(),
        "max_token_abs_d": logged["gap_max"],
        "mean_seq_max_token_abs_d": peak_B.mean().item(),
        "mean_microbatch_max_token_abs_d": torch.stack([c.max() for c in peak_B.split(settings.microbatch)])
        .mean()
        .item(),
        "max_seq_mean_token_abs_d": (size_BT.sum(1) / keep.sum(1)).max().item(),
        "max_seq_abs_sum_d": sum_B.abs().max().item(),
        "max_token_abs_prob_diff": prob_diff.max().item(),
        "mean_token_abs_prob_diff": prob_diff.mean().item(),
        "pearson_token_prob": _pearson(*prob),
        "mean_token_exp_abs_d": d.abs().exp().mean().item(),
        "k1": logged["k1"],
        "k2": d.square().mean().item() / 2,
        "k3": logged["k3"],
        "chi2_token": d.mul(2).exp().mean().item() - 1,
        "chi2_seq": sum_B.mul(2).exp().mean().item() - 1,
        "ess_token": logged["ess"],
        "ess_seq": ess(sum_B),
        "clipped_share_token": logged["clipped_share"],
        "tokens": float(d.numel()),
        "sequences": float(len(d_BT)),
    }


def difference(trainer_BT: Tensor, rollout_BT: Tensor, keep_BT: Tensor) -> Tensor:
    """float64 [B, T]: d where keep, 0 elsewhere. The subtraction of two float32 is exact in float64."""
    d_BT = trainer_BT.double() - rollout_BT.double()
    return torch.where(keep_BT, d_BT, d_BT.new_zeros(()))


def ess(log_weights: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) of w = exp(log_weights [n]), in log space: sums over long sequences overflow exp."""
    total = 2 * log_weights.logsumexp(0) - (2 * log_weights).logsumexp(0)
    return (total.exp() / len(log_weights)).item()


def _pearson(a: Tensor, b: Tensor) -> float:
    """Correlation; NaN when one side is constant (nothing to correlate)."""
    a, b = a - a.mean(), b - b.mean()
    scale = (a.square().sum() * b.square().sum()).sqrt()
    return (a * b).sum().div(scale).item() if scale > 0 else float("nan")


@torch.no_grad()
def quadrants(advantage_B: Tensor, trainer_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor) -> dict[str, float]:
    """Share of tokens by sign(advantage) x sign(d), and the share without a sign (advantage or d is 0).

    With negative advantage and d > 0 the policy loss has no upper clip: that quadrant is where a gap does damage.
    """
    keep = mask_BT.bool()
    d = difference(trainer_BT, rollout_BT, keep)[keep]
    a = advantage_B.double()[:, None].expand(keep.shape)[keep]
    shares = {
        f"share_token_adv_{an}_d_{dn}": ((a * asign > 0) & (d * dsign > 0)).double().mean().item()
        for an, asign in (("pos", 1), ("neg", -1))
        for dn, dsign in (("pos", 1), ("neg", -1))
    }
    return shares | {"share_token_no_sign": ((a == 0) | (d == 0)).double().mean().item()}


def group_advantage(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """float64 [B]: (reward - mean of its group) / standard deviation of its group; 0 where the group agrees."""
    advantage = torch.zeros(len(reward_B), dtype=torch.float64)
    for group in group_B.unique():
        member = group_B == group
        reward = reward_B[member].double()
        deviation = reward.std(correction=0)
        advantage[member] = (reward - reward.mean()) / deviation if deviation > 0 else torch.zeros_like(reward)
    return advantage


@torch.no_grad()
def by_position(d_BT: Tensor, mask_BT: Tensor) -> list[dict[str, float]]:
    """Per response position (1 = first token): tokens, mean |d|, max |d|."""
    rows = []
    for t in range(mask_BT.shape[1]):
        values = d_BT[:, t][mask_BT[:, t].bool()].abs()
        if len(values):
            rows.append(_bin("position", t + 1, t + 1, values))
    return rows


@torch.no_grad()
def by_entropy(d_BT: Tensor, entropy_BT: Tensor, mask_BT: Tensor, bins: int = 10) -> list[dict[str, float]]:
    """Per decile of the trainer's token entropy (equal counts, stable order): tokens, mean |d|, max |d|."""
    keep = mask_BT.bool()
    entropy, size = entropy_BT[keep].double(), d_BT[keep].abs()
    order = torch.sort(entropy, stable=True).indices
    rows = []
    for number, part in enumerate(order.tensor_split(min(bins, len(order))), 1):
        rows.append(_bin("entropy_decile", number, float(entropy[part].mean()), size[part]))
    return rows


def _bin(kind: str, number: int, centre: float, size: Tensor) -> dict[str, float]:
    return {
        "by": kind,
        "bin": number,
        "bin_mean": centre,
        "tokens": len(size),
        "mean_token_abs_d": size.mean().item(),
        "max_token_abs_d": size.max().item(),
    }
