"""The log-prob gap of one arm as a telescoping sum, and the parts of its numerical term.

    P  trainer                       the arm's own trainer precision (BF16: T0; QAT: T1; symmetric: W4A4)
    Q  rollout weights, P's activations            delta_weight = Q - P
    R  rollout weights and activations (+ RAC)     delta_act    = R - Q
    E  log-probs recorded while generating         delta_num    = E - R            total = E - P = their sum, exactly

delta_num telescopes further, each step one change:
    num_storage      R_s - R        embeddings, norms, routers and head rounded to bf16, as the engine stores them
    num_float32      E32 - R_s      same stored values, same float32 arithmetic, the engine's code instead of trainer's
    num_bf16         E_pre - E32    same stored values, bf16 arithmetic between the quantized products
    num_decode       E - E_pre      token by token with a KV cache and a changing batch, against one prefill

Inside those, not further summands (differences of the same quantity under one change):
    of_routing       R_s routed as the engine routed, minus R_s         of_repeat   E_pre again, minus E_pre
    of_batch         E_pre one sequence at a time, minus E_pre

Values are float32 log-probs; differences are taken in float64, where they are exact, so that the identity holds to
1e-12. A QAT arm's delta_weight is exactly 0 because P and Q are the same program on the same bits; that the engine
really holds these weights is a separate fact, checked element by element at capture.
Differs from attributing by ablation: the order of the steps is fixed (weights, activations, numerics) and the terms
depend on it; only their sum does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TELESCOPE = 1e-12  # nats; float64 sums of exact differences of float32 log-probs
TERMS = ("delta_weight", "delta_act", "delta_num")
NUM_TERMS = ("num_storage", "num_float32", "num_bf16", "num_decode")
WITHIN = ("of_routing", "of_repeat", "of_batch")


@dataclass(frozen=True)
class Rungs:
    """Log-probs [B, R] of one dump. Optional ones are None where this stack did not measure them.

    within: name -> (with the change, without, bool [B, R] where both are known).
    """

    trainer: Tensor
    rollout_weights: Tensor
    rollout_all: Tensor
    engine: Tensor
    stored: Tensor | None = None
    engine_float32: Tensor | None = None
    engine_prefill: Tensor | None = None
    within: dict[str, tuple[Tensor, Tensor, Tensor]] | None = None


@dataclass(frozen=True)
class Decomposition:
    """float64 [B, R] per term, 0 outside mask; `total`, `terms` (sum to total), `num` (sum to delta_num), `within`.

    not_measured: term -> reason.
    """

    mask: Tensor
    total: Tensor
    terms: dict[str, Tensor]
    num: dict[str, Tensor]
    within: dict[str, tuple[Tensor, Tensor]]
    not_measured: dict[str, str]


def _step(after: Tensor, before: Tensor, mask: Tensor) -> Tensor:
    difference = after.double() - before.double()
    bad = int((~torch.isfinite(difference[mask])).sum())
    if bad:
        raise ValueError(f"{bad} of {int(mask.sum())} response tokens have no finite log-prob on both sides of a term")
    return torch.where(mask, difference, difference.new_zeros(()))


def decompose(rungs: Rungs, mask_BR: Tensor, not_measured: dict[str, str] | None = None) -> Decomposition:
    """The decomposition of the module docstring; asserts both identities.

    Raises ValueError for non-finite log-probs or a broken identity (a rung of other tokens, say of another shape).
    """
    mask = mask_BR.bool()
    steps = [rungs.trainer, rungs.rollout_weights, rungs.rollout_all, rungs.engine]
    total = _step(rungs.engine, rungs.trainer, mask)
    terms = {name: _step(b, a, mask) for name, a, b in zip(TERMS, steps, steps[1:], strict=False)}
    _assert_sum("total", total, terms)
    missing = dict(not_measured or {})
    num: dict[str, Tensor] = {}
    inner = [rungs.stored, rungs.engine_float32, rungs.engine_prefill]
    if all(rung is not None for rung in inner):
        ladder = [rungs.rollout_all, *inner, rungs.engine]
        num = {name: _step(b, a, mask) for name, a, b in zip(NUM_TERMS, ladder, ladder[1:], strict=False)}
        _assert_sum("delta_num", terms["delta_num"], num)
    else:
        missing |= {name: "no float32 engine pass was captured for this mode" for name in NUM_TERMS}
    within = {}
    for name, (after, before, known) in (rungs.within or {}).items():
        where = known & mask
        within[name] = (_step(after, before, where), where)
    for name in WITHIN:
        if name not in within:
            missing.setdefault(name, "not captured for this mode")
    return Decomposition(mask, total, terms, num, within, missing)


def _assert_sum(what: str, total: Tensor, parts: dict[str, Tensor]) -> None:
    error = float((torch.stack(list(parts.values())).sum(0) - total).abs().max())
    if not error <= TELESCOPE:
        raise ValueError(f"{' + '.join(parts)} misses {what} by {error:.3g} nats (allowed {TELESCOPE:g})")


def summary(decomposition: Decomposition, keep_B: Tensor) -> list[dict[str, Any]]:
    """One row per term over the sequences keep_B: level, mean, mean |.|, rms, p99 |.|, max |.|; unmeasured: reason."""
    d = decomposition
    everywhere = d.mask & keep_B[:, None]
    rows = [_row("total", "total", d.total, everywhere)]
    rows += [_row("term", name, value, everywhere) for name, value in d.terms.items()]
    rows += [_row("delta_num part", name, value, everywhere) for name, value in d.num.items()]
    rows += [_row("inside delta_num", n, value, where & keep_B[:, None]) for n, (value, where) in d.within.items()]
    rows += [{"level": "not measured", "term": name, "note": reason} for name, reason in d.not_measured.items()]
    return rows


def _row(level: str, name: str, value: Tensor, where: Tensor) -> dict[str, Any]:
    d = value[where]
    if not len(d):
        return {"level": "not measured", "term": name, "note": "no token of this seed"}
    size = d.abs()
    return {
        "level": level,
        "term": name,
        "mean_token": d.mean().item(),
        "mean_token_abs": size.mean().item(),
        "rms_token": d.square().mean().sqrt().item(),
        "p99_token_abs": size.quantile(0.99).item(),
        "max_token_abs": size.max().item(),
        "tokens": len(d),
        "note": "",
    }
