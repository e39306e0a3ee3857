"""From hidden states to the predicted gap of every trainer x rollout pair.

    d(y | c) = log pi_trainer(y | c) - log pi_rollout(y | c)        c: context, y: next token, V tokens

    given      y = the file's own next token (for generated responses: the token sampled from the checkpoint)
    drawn      y ~ pi_rollout(. | c), one draw per context, the same uniform number for every rollout
    expected   sum over y of pi_rollout(y | c) |d(y | c)|: what `drawn` estimates for the mean, without chance
    kl         sum over y of pi_rollout(y | c) (-d(y | c))

RL meets tokens that the rollout drew, so that `expected` is the prediction and `given` only what the text happens to
say; contexts are the file's in both, never the rollout's own. Log-softmax in float32, sums in float64.
Shapes: B scored sequences, R scored tokens of the longest, [B, R], 0 right of a sequence.
Differs from teacher forcing alone in that no response has to be sampled for tokens to be the rollout's.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quads.config import ConfigError, Preflight
from quads.diagnostics.metrics import GapSettings, gap_table
from quads.diagnostics.preflight.checkpoint import Checkpoint
from quads.diagnostics.preflight.engine import as_engine, engine_value
from quads.diagnostics.preflight.sequences import Chunk, Sequences
from quads.diagnostics.preflight.stream import OVERFLOW, Pass
from quads.diagnostics.preflight.variants import Stream

SLICE = 2**25  # logits in memory per stream: rows x V

Pair = tuple[str, str]


@dataclass
class Scores:
    """float32 [B, R] each. given: by stream key; drawn: by rollout; the others by (trainer, rollout).

    shift: mean KL(trainer bf16 || this trainer) per token, what the trainer's own precision changes before any step.
    """

    mask: Tensor
    given: dict[str, Tensor] = field(default_factory=dict)
    drawn: dict[str, Tensor] = field(default_factory=dict)
    drawn_trainer: dict[Pair, Tensor] = field(default_factory=dict)
    expected: dict[Pair, Tensor] = field(default_factory=dict)
    kl: dict[Pair, Tensor] = field(default_factory=dict)
    shift: dict[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def score_pairs(
    checkpoint: Checkpoint,
    streams: Sequence[Stream],
    done: Pass,
    scored: Sequence[Chunk],
    sequences: Sequences,
    device: str,
    seed: int,
) -> Scores:
    """All log-probs and expectations; hidden states are only read."""
    length = torch.tensor([len(ids) for ids in sequences.ids])
    start = torch.tensor(sequences.start)
    mask = torch.arange(int((length - start).max()))[None] < (length - start)[:, None]
    scores = Scores(mask)
    generator = torch.Generator().manual_seed(seed)
    with checkpoint.materialised("model.norm", device) as norm, checkpoint.materialised("lm_head", device) as head:
        project = _Projection(norm, head)
        for number, chunk in enumerate(scored):
            # The hidden state at position t predicts the token at t + 1.
            places = [
                (row, t, b) for row, b in enumerate(chunk.index.tolist()) for t in range(int(start[b]), int(length[b]))
            ]
            size = max(1, SLICE // checkpoint.skeleton.config.vocab_size)
            for at in torch.tensor(places).split(size):
                row, t, b = at.unbind(1)
                hidden = {s.key: done.hidden[s.key][number][row.to(device), t.to(device) - 1] for s in streams}
                u = torch.rand(len(at), dtype=torch.float64, generator=generator).to(device)
                token = chunk.ids[row, t].to(device)
                _score_rows(scores, streams, hidden, project, token, u, (b, t - start[b]))
    return scores


class _Projection:
    """Hidden states [n, D] of a stream -> float32 log-probs [n, V]: its own final norm and head."""

    def __init__(self, norm: torch.nn.Module, head: torch.nn.Module) -> None:
        self.norm, self.head = norm, head
        self.values = [(p, p.data, engine_value(m, p.data)) for m in (norm, head) for p in m.parameters()]

    def __call__(self, hidden: Tensor, engine: bool) -> Tensor:
        for parameter, wide, stored in self.values:
            parameter.data = stored if engine else wide
        with as_engine(self.norm) if engine else nullcontext():
            log_prob: Tensor = self.head(self.norm(hidden)).float().log_softmax(-1)
        return log_prob


def _score_rows(
    scores: Scores,
    streams: Sequence[Stream],
    hidden: dict[str, Tensor],
    project: _Projection,
    token: Tensor,
    u: Tensor,
    at: tuple[Tensor, Tensor],
) -> None:
    def put(store: dict[Any, Tensor], key: Any, value: Tensor) -> None:
        store.setdefault(key, torch.zeros(scores.mask.shape))[at] = value.float().cpu()

    trainers = {s.name: project(hidden[s.key], False) for s in streams if not s.engine}
    for name, log_prob in trainers.items():
        put(scores.given, f"trainer:{name}", log_prob.gather(-1, token[:, None])[:, 0])
        put(scores.shift, name, _mean(trainers["bf16"], trainers["bf16"] - log_prob))
    for stream in (s for s in streams if s.engine):
        rollout = project(hidden[stream.key], True)
        drawn = _draw(rollout, u)[:, None]
        put(scores.given, stream.key, rollout.gather(-1, token[:, None])[:, 0])
        put(scores.drawn, stream.name, rollout.gather(-1, drawn)[:, 0])
        for name, log_prob in trainers.items():
            d = log_prob - rollout
            put(scores.drawn_trainer, (name, stream.name), log_prob.gather(-1, drawn)[:, 0])
            put(scores.expected, (name, stream.name), _mean(rollout, d.abs()))
            put(scores.kl, (name, stream.name), _mean(rollout, -d))


def _mean(log_prob: Tensor, value: Tensor) -> Tensor:
    """[n]: expectation of value [n, V] under exp(log_prob [n, V])."""
    return (log_prob.exp() * value).sum(-1, dtype=torch.float64)


def _draw(log_prob: Tensor, u: Tensor) -> Tensor:
    """int64 [n]: the u-quantile of each row's distribution."""
    total = log_prob.double().exp().cumsum(-1)
    drawn = torch.searchsorted(total, (u * total[:, -1])[:, None])[:, 0]
    return drawn.clamp(max=log_prob.shape[-1] - 1)


def pair_rows(scores: Scores, streams: Sequence[Stream], settings: Preflight) -> list[dict[str, Any]]:
    """One row per pair: the predicted mean gap with its interval, and every definition of quads.diagnostics.metrics.

    Columns `drawn_*` and `given_*` are those definitions over drawn and given tokens; see the module docstring.
    Raises ConfigError for log-probs that are not finite.
    """
    gap = GapSettings(settings.clip_low, settings.clip_high, settings.microbatch_sequences)
    mask, rows = scores.mask, []
    for stream in (s for s in streams if s.engine):
        for name in (s.name for s in streams if not s.engine):
            pair = (name, stream.name)
            low, high = _interval(scores.expected[pair], mask, settings)
            try:
                drawn = gap_table(scores.drawn_trainer[pair], scores.drawn[stream.name], mask, gap)
                given = gap_table(scores.given[f"trainer:{name}"], scores.given[stream.key], mask, gap)
            except ValueError as error:
                raise ConfigError(f"trainer {name}, rollout {stream.name}: {error}. {OVERFLOW}") from error
            rows.append(
                {
                    "trainer": name,
                    "rollout": stream.name,
                    "expected_mean_token_abs_d": scores.expected[pair][mask].double().mean().item(),
                    "interval_low": low,
                    "interval_high": high,
                    "expected_kl_rollout_trainer": scores.kl[pair][mask].double().mean().item(),
                    **{f"drawn_{key}": value for key, value in drawn.items()},
                    **{f"given_{key}": value for key, value in given.items()},
                }
            )
    return rows


def _interval(value: Tensor, mask: Tensor, settings: Preflight) -> tuple[float, float]:
    """95 % bootstrap over sequences of the mean over tokens."""
    sums, counts = (value.double() * mask).sum(1).numpy(), mask.sum(1).numpy()
    chosen = np.random.default_rng(settings.seed).integers(0, len(sums), (settings.resamples, len(sums)))
    means = sums[chosen].sum(1) / counts[chosen].sum(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)
