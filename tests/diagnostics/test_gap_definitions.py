"""Every gap definition against a brute-force loop over tokens, and the cases that must be refused."""

from __future__ import annotations

import math

import pytest
import torch
from tolerances import TOLERANCES

from quads.diagnostics.metrics import GapSettings, by_entropy, by_position, ess, gap_table, group_advantage, quadrants

SETTINGS = GapSettings(0.2, 0.3, 3)


def batch(sequences: int = 8, tokens: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    rollout = -3 * torch.rand(sequences, tokens, generator=generator)
    trainer = rollout + 0.4 * torch.randn(sequences, tokens, generator=generator)
    lengths = torch.randint(1, tokens + 1, (sequences,), generator=generator)
    mask = torch.arange(tokens)[None] < lengths[:, None]
    # what lies outside the mask must not matter, not even NaN
    return trainer.masked_fill(~mask, math.nan), rollout.masked_fill(~mask, math.nan), mask


def brute_force(trainer: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    d = [
        [float(trainer[b, t]) - float(rollout[b, t]) for t in range(mask.shape[1]) if mask[b, t]]
        for b in range(len(mask))
    ]
    probs = [
        (math.exp(trainer[b, t]), math.exp(rollout[b, t]))
        for b in range(len(mask))
        for t in range(mask.shape[1])
        if mask[b, t]
    ]
    flat = [x for row in d for x in row]
    n, peaks, sums = len(flat), [max(map(abs, row)) for row in d], [sum(row) for row in d]
    micro = [max(peaks[i : i + 3]) for i in range(0, len(peaks), 3)]
    r, w = [math.exp(x) for x in flat], [math.exp(s) for s in sums]
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    pt, pr = [p[0] for p in probs], [p[1] for p in probs]
    cov = sum((a - mean(pt)) * (b - mean(pr)) for a, b in probs)
    return {
        "mean_token_abs_d": mean([abs(x) for x in flat]),
        "mean_token_d": mean(flat),
        "rms_token_d": math.sqrt(mean([x * x for x in flat])),
        "max_token_abs_d": max(map(abs, flat)),
        "mean_seq_max_token_abs_d": mean(peaks),
        "mean_microbatch_max_token_abs_d": mean(micro),
        "max_seq_mean_token_abs_d": max(mean([abs(x) for x in row]) for row in d),
        "max_seq_abs_sum_d": max(map(abs, sums)),
        "max_token_abs_prob_diff": max(abs(a - b) for a, b in probs),
        "mean_token_abs_prob_diff": mean([abs(a - b) for a, b in probs]),
        "pearson_token_prob": cov
        / math.sqrt(sum((a - mean(pt)) ** 2 for a in pt) * sum((b - mean(pr)) ** 2 for b in pr)),
        "mean_token_exp_abs_d": mean([math.exp(abs(x)) for x in flat]),
        "k1": -mean(flat),
        "k2": mean([x * x / 2 for x in flat]),
        "k3": mean([math.exp(x) - 1 - x for x in flat]),
        "chi2_token": mean([x * x for x in r]) - 1,
        "chi2_seq": mean([x * x for x in w]) - 1,
        "ess_token": sum(r) ** 2 / (n * sum(x * x for x in r)),
        "ess_seq": sum(w) ** 2 / (len(w) * sum(x * x for x in w)),
        "clipped_share_token": mean([float(not 0.8 <= x <= 1.3) for x in r]),
        "tokens": float(n),
        "sequences": float(len(d)),
    }


def test_against_brute_force() -> None:
    trainer, rollout, mask = batch()
    got, want = gap_table(trainer, rollout, mask, SETTINGS), brute_force(trainer, rollout, mask)
    assert set(got) == set(want) | {"p99_token_abs_d", "p999_token_abs_d"}
    worst = max(abs(got[k] - v) / max(1.0, abs(v)) for k, v in want.items())
    assert worst <= TOLERANCES["diagnostics/gap_table"].limit
    assert got["p99_token_abs_d"] <= got["p999_token_abs_d"] <= got["max_token_abs_d"]


def test_definitions_of_the_maximum_are_ordered_and_differ() -> None:
    got = gap_table(*batch(), SETTINGS)
    order = ("mean_token_abs_d", "mean_seq_max_token_abs_d", "mean_microbatch_max_token_abs_d", "max_token_abs_d")
    values = [got[name] for name in order]
    assert values == sorted(values) and len(set(values)) == 4


def test_equal_sides_are_zero() -> None:
    _, rollout, mask = batch()
    got = gap_table(rollout, rollout, mask, SETTINGS)
    assert got["max_token_abs_d"] == got["k3"] == got["chi2_seq"] == 0 and got["ess_token"] == 1
    assert got["ess_seq"] == pytest.approx(1, rel=1e-12)  # through logsumexp


def test_sequence_weights_do_not_overflow() -> None:
    assert ess(torch.tensor([2000.0, 0.0], dtype=torch.float64)) == pytest.approx(0.5)


def test_empty_sequence_and_nan_are_refused() -> None:
    trainer, rollout, mask = batch()
    hole = mask.clone()
    hole[2] = False
    with pytest.raises(ValueError, match="1 of 8 sequences have no response token"):
        gap_table(trainer, rollout, hole, SETTINGS)
    trainer[0, 0] = math.nan
    with pytest.raises(ValueError, match="non-finite"):
        gap_table(trainer, rollout, mask, SETTINGS)


def test_quadrants_by_hand() -> None:
    """Advantages +, -, 0 and d +, -, 0: six tokens with a sign pair counted by hand out of eight."""
    advantage = torch.tensor([2.0, -1.0, 0.0])
    d = torch.tensor([[0.5, -0.5, 0.5], [0.1, 0.1, -0.1], [1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0]]).bool()
    got = quadrants(advantage, d, torch.zeros_like(d), mask)
    assert got == {
        "share_token_adv_pos_d_pos": 2 / 8,
        "share_token_adv_pos_d_neg": 1 / 8,
        "share_token_adv_neg_d_pos": 2 / 8,
        "share_token_adv_neg_d_neg": 1 / 8,
        "share_token_no_sign": 2 / 8,
    }


def test_group_advantage() -> None:
    reward, group = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([4, 4, 7, 7])
    assert group_advantage(reward, group).tolist() == [1.0, -1.0, 0.0, 0.0]


def test_bins_cover_every_token_once() -> None:
    trainer, rollout, mask = batch()
    d = torch.where(mask, trainer - rollout, 0.0)
    entropy = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1))
    for rows in (by_position(d, mask), by_entropy(d, entropy, mask)):
        assert sum(r["tokens"] for r in rows) == int(mask.sum())
        total = sum(r["tokens"] * r["mean_token_abs_d"] for r in rows)
        assert total == pytest.approx(float(d[mask].abs().sum()), rel=1e-5)
    means = [r["bin_mean"] for r in by_entropy(d, entropy, mask)]
    assert means == sorted(means) and len(means) == 10
