"""What several studies measure: the gap of a trainer against a dump, and an arm's decomposition.

The rollout side is what the real engine said while generating (`logp` of a capture); the trainer side is the surgery
model on the same tokens. One row per seed of the capture. Differs from training's own log in that the tokens are fixed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quads.diagnostics import capture, ladder, metrics
from quads.diagnostics.context import Context, Row
from quads.diagnostics.decompose import Decomposition, Rungs, decompose
from quads.layers.setup import Precision

NO_KERNEL = (
    "kernel against emulation is not measured: the engine multiplies with the emulation in torch; native NVFP4 needs "
    "a Blackwell GPU"
)


def gap_rows(context: Context, scored: ladder.Scored, mode_id: str, /, **keys: Any) -> list[Row]:
    """gap_table of a trainer against what the engine recorded, one row per seed."""
    dump = context.dump(mode_id)
    mask = dump.tokens.mask
    rows = []
    for seed, own in context.seeds(mode_id):
        table = metrics.gap_table(scored.logp[own], dump.logp[own], mask[own], context.gap_settings)
        reward = dump.values["reward"][own]
        table["rollout_reward"] = reward.double().mean().item()
        table["mean_token_entropy"] = scored.entropy[own][mask[own]].double().mean().item()
        table["truncated_share"] = 1 - dump.values["finished"][own].double().mean().item()
        if bool(torch.isfinite(reward).all()):
            advantage = metrics.group_advantage(reward, dump.groups[own])
            table |= metrics.quadrants(advantage, scored.logp[own], dump.logp[own], mask[own])
        rows.append({**keys, "seed": seed, **table})
    return rows


def arm_decomposition(context: Context, arm: Any, trainer: Precision | None = None) -> Decomposition:
    """The decomposition of one arm on the tokens its engine sampled; `trainer` replaces the arm's own precision."""
    mode = capture.arm_engine(arm)
    dump = context.dump(mode.id)
    own = trainer or context.trainer_precision(arm)
    swapped = Precision(mode.mode.weight, own.activation, mode.mode.scale_group, own.rac, mode.skip)
    stored = context.score(mode.trainer, mode.id, masks=mode, stored=True)
    rungs = Rungs(
        trainer=context.score(own, mode.id, masks=context.rac_mode).logp,
        rollout_weights=context.score(swapped, mode.id, masks=context.rac_mode).logp,
        rollout_all=context.score(mode.trainer, mode.id, masks=mode).logp,
        engine=dump.logp,
        stored=stored.logp,
        engine_float32=dump.float32_prefill,
        engine_prefill=dump.values["prefill"],
        within=_within(context, mode, stored),
    )
    return decompose(rungs, dump.tokens.mask, {"of_kernel": NO_KERNEL})


def _within(context: Context, mode: capture.EngineMode, stored: ladder.Scored) -> dict[str, Any]:
    dump = context.dump(mode.id)
    mask = dump.tokens.mask
    prefill, repeat, single = (dump.values[name] for name in ("prefill", "repeat", "single"))
    within = {"of_repeat": (repeat, prefill, mask), "of_batch": (single, prefill, torch.isfinite(single) & mask)}
    if dump.routed is not None:
        steered, known_B, _ = replayed(context, mode)
        full = torch.full_like(stored.logp, torch.nan)
        full[known_B, : steered.shape[1]] = steered
        within["of_routing"] = (full, stored.logp, known_B[:, None] & mask)
    return within


def replayed(context: Context, mode: capture.EngineMode) -> tuple[Tensor, Tensor, dict[str, float]]:
    """R_s routed as the engine routed: log-probs of the sequences with known routing, which these are, agreement."""
    dump = context.dump(mode.id)
    assert dump.routed is not None
    known = (dump.routed >= 0).all(-1).all(-1).sum(1) == dump.tokens.length
    tokens, routed = dump.tokens.take(known), dump.routed[known]
    model = context.model_at(mode.trainer, masks=mode, stored=True)
    size = context.settings.tokens_per_forward
    free = ladder.score(model, tokens, tokens_per_forward=size, routing=True)
    assert free.routed is not None
    steered = ladder.score(model, tokens, tokens_per_forward=size, replay=routed)
    return steered.logp, known, ladder.routing_difference(free.routed, routed)


def gap_with_terms(context: Context, mode: capture.EngineMode, precision: Precision, /, **keys: Any) -> list[Row]:
    """gap_rows plus mean |delta_act| and |delta_num| (activations changed on the rollout's weights)."""
    dump, mask = context.dump(mode.id), context.dump(mode.id).tokens.mask
    own = context.score(precision, mode.id)
    t1 = context.score(mode.trainer_weights, mode.id).logp.double()
    t2 = context.score(mode.trainer, mode.id, masks=mode).logp.double()
    rows = gap_rows(context, own, mode.id, **keys)
    for row, (_, seqs) in zip(rows, context.seeds(mode.id), strict=True):
        keep = mask & seqs[:, None]
        row["mean_token_abs_delta_act"] = (t2 - t1)[keep].abs().mean().item()
        row["mean_token_abs_delta_num"] = (dump.logp.double() - t2)[keep].abs().mean().item()
    return rows


def precision_name(p: Precision) -> str:
    """weight/activation, with the share of compensated channels in per cent: nvfp4/nvfp4+rac50."""
    rac = f"+rac{100 * p.rac.k:g}" if p.rac else ""
    return f"{p.weight}/{p.activation}{rac}"
