"""Layer by layer, the trainer's blocks against those of the real rollout engine: the comparison behind Fig. 7.

    e(point) = |h_trainer - h_rollout| / |h_rollout|   per token; h [D] at one point of one layer

Points: `model.layers.i.self_attn` and `.mlp` (what a block adds to the residual stream), `model.layers.i` (the stream).
    token_rel_l2              both programs on their own inputs: the mismatch that has built up to here
    same_input_token_rel_l2   the trainer's block fed with the engine's input of that block: what this block adds alone
    token_cosine_distance     1 - cos(h_trainer, h_rollout), own inputs
    log-probs                 |log pi_trainer - log pi_rollout| on all captured tokens (nats), as in every other study
Each as mean_ and max_ over the tokens that predict a response token; mean, standard deviation and number of seeds.

The engine's tensors come from its own forward (bf16 engine, prefill of one sequence), not from an emulation: a
symmetric trainer is compared with the engine that it tries to copy, drift and all. The trainer is in float32.
Source: the paper's Fig. 7, whose exact measure is not known; hence both the built-up and the local mismatch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from quads.diagnostics import capture, figures_arms, metrics
from quads.diagnostics.context import Context, Row, Study, Table
from quads.diagnostics.during_layers import token_rel_l2
from quads.layers.blocks import fed, recorded
from quads.layers.setup import Precision

LOG_PROBS = "log-probs"


class HiddenEngine(Protocol):
    """An engine that shows its blocks' inputs and outputs of one sequence, float32 [T, D] by key."""

    def hidden(self, sequence: Sequence[int]) -> Mapping[str, Tensor]: ...


def capture_hidden(
    engine: HiddenEngine,
    sequences: Sequence[Sequence[int]],
    starts: Sequence[int],
    order: Iterable[int],
    seeds: Sequence[int],
    tokens_per_seed: int,
) -> dict[str, Tensor]:
    """key -> [N, D] over the tokens of some sequences, plus int32 [N] `sequence` and `position`.

    bf16 where that loses nothing (all inputs and outputs of a bf16 engine), else float32 (its streams, see blocks.py).
    Sequences are taken in `order` until their seed's budget is spent; the last one is cut, which changes no hidden
    state of what is left (attention is causal). One that would keep no predicting position is left out.
    """
    spent: dict[int, int] = {}
    parts: dict[str, list[Tensor]] = {}
    for b in order:
        room = tokens_per_seed - spent.get(seeds[b], 0)
        ids = list(sequences[b])[:room]
        if len(ids) < starts[b]:
            continue
        spent[seeds[b]] = spent.get(seeds[b], 0) + len(ids)
        for key, x in engine.hidden(ids).items():
            parts.setdefault(key, []).append(x)
        parts.setdefault("sequence", []).append(torch.full((len(ids),), b, dtype=torch.int32))
        parts.setdefault("position", []).append(torch.arange(len(ids), dtype=torch.int32))
    return {key: _smallest(torch.cat(values)) for key, values in parts.items()}


def _smallest(x: Tensor) -> Tensor:
    short = x.to(torch.bfloat16) if x.is_floating_point() else x
    return short if torch.equal(short.to(x.dtype), x) else x


@torch.no_grad()
def trainer_blocks(
    model: torch.nn.Module, ids: Tensor, hidden: Mapping[str, Tensor], *, same_input: bool
) -> dict[str, Tensor]:
    """key -> float32 [N, D]: the trainer's blocks on the rows of `hidden` (sequences of ids int64 [B, L]).

    same_input: every block gets the engine's input, so that only the `.out` of blocks mean something.
    """
    device = next(model.parameters()).device
    found: dict[str, list[Tensor]] = {}
    for b in hidden["sequence"].unique_consecutive().tolist():
        rows = hidden["sequence"] == b
        tokens = ids[b, : int(rows.sum())][None].to(device)
        inputs = {key: x[rows] for key, x in hidden.items() if key.endswith(".in")} if same_input else {}
        with recorded(model) as kept:
            if same_input:
                with fed(model, inputs):
                    model(input_ids=tokens, use_cache=False)
            else:
                model(input_ids=tokens, use_cache=False)
        for key, values in kept.items():
            found.setdefault(key, []).extend(values)
    return {key: torch.cat(values) for key, values in found.items()}


def fig7(context: Context) -> Study:
    """Every trainer precision against the W4A4, W4A4 + RAC and BF16 engines, block by block."""
    rac = context.rac_mode
    group, skip = rac.mode.scale_group, rac.skip
    trainers = {
        "bf16": Precision(scale_group=group, skip=skip),
        "w4a16": rac.trainer_weights,
        "w4a4": Precision("nvfp4", "nvfp4", group, skip=skip),
        "w4a4+rac": rac.trainer,
    }
    rows: list[Row] = []
    for mode in _rollouts(context):
        hidden = context.hidden(mode.id)
        for name, precision in trainers.items():
            own = _measured(context, mode, hidden, precision)
            for (layer, metric), values in own.items():
                rows.append(_row(layer, name, mode.mode.name, metric, values))
    table = Table("Mismatch by layer", ("rollout", "metric", "layer", "trainer"), ("mean", "sd", "seeds"))
    notes = [
        "step 0: one set of weights behind every trainer; what training with each does to them is not in here",
        "rollout: the real engine in bf16, prefill; the engine's stream is (update + stream) in float32",
    ]
    return Study(rows, figures_arms.layerwise(rows), [table], notes)


def _rollouts(context: Context) -> list[capture.EngineMode]:
    """Plain W4A4, W4A4 + RAC and BF16, as far as they were captured with their blocks."""
    names = ("w4a4", "w4a4+rac", "bf16")
    found = {mode.mode.name: mode for mode in reversed(context.modes.values()) if context.has_hidden(mode.id)}
    found |= {context.rac_mode.mode.name: context.rac_mode} if context.has_hidden(context.rac_mode.id) else {}
    return [found[name] for name in names if name in found]


def _measured(
    context: Context, mode: capture.EngineMode, hidden: Mapping[str, Tensor], precision: Precision
) -> dict[tuple[str, str], list[float]]:
    """(layer, metric) -> one value per seed."""
    dump = context.dump(mode.id)
    model = context.model_at(precision, masks=context.rac_mode)
    own = trainer_blocks(model, dump.tokens.ids, hidden, same_input=False)
    local = trainer_blocks(model, dump.tokens.ids, hidden, same_input=True)
    sequence = hidden["sequence"].long()
    predicting = hidden["position"] >= dump.tokens.start[sequence] - 1
    predicting &= hidden["position"] < dump.tokens.length[sequence] - 1
    scored = context.score(precision, mode.id, masks=context.rac_mode)
    d = metrics.difference(scored.logp, dump.logp, dump.tokens.mask).abs()
    found: dict[tuple[str, str], list[float]] = {}
    for _, seqs in context.seeds(mode.id):
        keep = predicting & seqs[sequence]
        for key in [k for k in own if not k.endswith(".in")]:  # the file has lost the model's order
            layer = key.removesuffix(".out")
            values = _compare(own[key][keep], hidden[key][keep])
            if key.endswith(".out"):
                values["same_input_token_rel_l2"] = _compare(local[key][keep], hidden[key][keep])["token_rel_l2"]
            for name, per_token in values.items():
                found.setdefault((layer, f"mean_{name}"), []).append(per_token.mean().item())
                found.setdefault((layer, f"max_{name}"), []).append(per_token.max().item())
        gap = d[dump.tokens.mask & seqs[:, None]]
        found.setdefault((LOG_PROBS, "mean_token_abs_d"), []).append(gap.mean().item())
        found.setdefault((LOG_PROBS, "max_token_abs_d"), []).append(gap.max().item())
    return found


def _compare(trainer_ND: Tensor, rollout_ND: Tensor) -> dict[str, Tensor]:
    """float64 [N] per metric."""
    a, b = trainer_ND.double(), rollout_ND.double()
    return {
        "token_rel_l2": token_rel_l2(a, b),
        "token_cosine_distance": 1 - torch.nn.functional.cosine_similarity(a, b, dim=-1),
    }


def _row(layer: str, trainer: str, rollout: str, metric: str, values: Sequence[float]) -> dict[str, Any]:
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {"layer": layer, "trainer": trainer, "rollout": rollout, "metric": metric,
            "mean": statistics.fmean(values), "sd": sd, "seeds": len(values)}  # fmt: skip
