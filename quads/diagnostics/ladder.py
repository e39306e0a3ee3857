"""The trainer's log-probs of given tokens at any precision: the rungs T0, T1, T2 of the decomposition.

    T0 = weights bf16, activations bf16      T1 = Wq, bf16      T2 = Wq, Q(A) [+ RAC]      each log pi(token | prefix)

A rung is the Hugging Face model in float32 after quads.layers surgery, the trainer's own code, without gradients.
`stored` also rounds what surgery leaves alone (embeddings, norms, routers, head) to bf16, the dtype in which an engine
stores it. Shapes: B sequences, L tokens (prompt + response), R response tokens, N MoE layers, S choices per token.
Sequences of equal length share a forward and nothing is padded, because a padding row would take part in a batch mask
or in a batch-wide scale. Any causal LM that transformers loads and surgery knows works (Qwen3-MoE, OLMoE, Mixtral...).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quads.layers.setup import Precision
from quads.layers.surgery import apply_surgery, quads_layers, set_static_masks
from quads.numerics.rac import RacSpec
from quads.trainer.calibration import calibrate
from quads.trainer.stored import load_widened


@dataclass(frozen=True)
class Tokens:
    """What a ladder scores: ids int64 [B, L] (anything right of `length`); start (of the response) and length, [B]."""

    ids: Tensor
    start: Tensor
    length: Tensor

    @property
    def mask(self) -> Tensor:
        """bool [B, R]: real response tokens; R is the longest response."""
        count = self.length - self.start
        return torch.arange(int(count.max()))[None] < count[:, None]

    def take(self, index: Tensor) -> Tokens:
        """A subset of sequences."""
        return Tokens(self.ids[index], self.start[index], self.length[index])

    def batches(self, tokens_per_forward: int) -> Iterator[Tensor]:
        """Indices of sequences of one length, at most `tokens_per_forward` tokens (at least one sequence)."""
        for length in self.length.unique().tolist():
            same = (self.length == length).nonzero().flatten()
            yield from same.split(max(1, tokens_per_forward // length))


@dataclass(frozen=True)
class Scored:
    """logp, entropy float32 [B, R] (0 right of the response); routed int16 [B, L, N, S], -1 where there is no token."""

    logp: Tensor
    entropy: Tensor
    routed: Tensor | None


def load_model(
    checkpoint: Path,
    precision: Precision,
    *,
    masks: Mapping[str, Tensor] | None = None,
    stored: bool = False,
    device: str = "cpu",
) -> torch.nn.Module:
    """The checkpoint in float32 after surgery, in eval mode. Raises what surgery and set_static_masks raise."""
    from transformers import AutoModelForCausalLM

    model = load_widened(
        AutoModelForCausalLM, checkpoint, torch.float32, attn_implementation="eager", local_files_only=True
    )
    return prepare_model(model.to(device), precision, masks=masks, stored=stored)


def prepare_model(
    model: torch.nn.Module,
    precision: Precision,
    *,
    masks: Mapping[str, Tensor] | None = None,
    stored: bool = False,
) -> torch.nn.Module:
    """Surgery, masks and storage rounding on a model in memory (changed in place)."""
    apply_surgery(model.eval(), precision)
    if precision.rac is not None and precision.rac.mask == "static":
        set_static_masks(model, dict(masks or {}))
    if stored:
        _round_unquantized(model)
    return model


@torch.no_grad()
def _round_unquantized(model: torch.nn.Module) -> None:
    swapped = {id(p) for _, module in quads_layers(model) for p in module.parameters(recurse=False)}
    for parameter in model.parameters():
        if id(parameter) not in swapped:
            parameter.copy_(parameter.to(torch.bfloat16))


@torch.no_grad()
def score(
    model: torch.nn.Module,
    tokens: Tokens,
    *,
    tokens_per_forward: int = 8192,
    routing: bool = False,
    replay: Tensor | None = None,
) -> Scored:
    """Teacher-forced log-probs and entropies (nats, float32 log-softmax) of the response tokens.

    routing: also return the experts chosen. replay int [B, L, N, S]: route by these instead (the scores are still the
    model's own, over the given experts). Raises ValueError when the model has no router to record or to steer.
    """
    device = next(model.parameters()).device
    mask_BR = tokens.mask
    logp_BR, entropy_BR = torch.zeros(mask_BR.shape), torch.zeros(mask_BR.shape)
    routed: list[tuple[Tensor, Tensor]] = []
    for index in tokens.batches(tokens_per_forward):
        length = int(tokens.length[index[0]])
        ids = tokens.ids[index, :length].to(device)
        given = replay[index, :length].flatten(0, 1) if replay is not None else None
        with _routers(model, given, needed=routing or replay is not None) as chosen:
            logits = model(input_ids=ids, use_cache=False).logits
        if routing:
            routed.append((index, torch.stack(chosen, 1).view(len(index), length, len(chosen), -1)))
        for row, b in enumerate(index.tolist()):
            start = int(tokens.start[b])
            # The logits at position t predict the token at t + 1.
            log_prob = logits[row, start - 1 : length - 1].float().log_softmax(-1)
            token = ids[row, start:, None]
            logp_BR[b, : length - start] = log_prob.gather(-1, token)[:, 0].cpu()
            entropy_BR[b, : length - start] = -(log_prob.exp() * log_prob).sum(-1).cpu()
    return Scored(logp_BR, entropy_BR, _gather_routing(routed, tokens) if routing else None)


def _gather_routing(parts: Sequence[tuple[Tensor, Tensor]], tokens: Tokens) -> Tensor:
    layers, slots = parts[0][1].shape[2:]
    routed = torch.full((*tokens.ids.shape, layers, slots), -1, dtype=torch.int16)
    for index, part in parts:
        routed[index, : part.shape[1]] = part
    return routed


def router_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Top-k routers of transformers' MoE models, in model order: they return (logits, weights, experts)."""
    return [m for m in model.modules() if is_router(m)]


def is_router(module: torch.nn.Module) -> bool:
    """Whether `module` is such a router."""
    return type(module).__name__.endswith("TopKRouter")


@contextmanager
def _routers(model: torch.nn.Module, replay_TNS: Tensor | None, *, needed: bool) -> Iterator[list[Tensor]]:
    """Record every router's experts (int16 [T, S] on the CPU), and steer them when replay_TNS is given."""
    modules = router_modules(model) if needed else []
    if needed and not modules:
        raise ValueError(f"{type(model).__name__} has no module whose class ends in TopKRouter: no routing to record")
    chosen: list[Tensor] = []

    def hook(layer: int) -> Any:
        def after(module: torch.nn.Module, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
            logits, weights, experts = output
            if replay_TNS is not None:
                experts = replay_TNS[:, layer].to(experts)
                weights = router_weights(module, logits, experts).to(weights)
            chosen.append(experts.to("cpu", torch.int16))
            return logits, weights, experts

        return after

    handles = [module.register_forward_hook(hook(layer)) for layer, module in enumerate(modules)]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


def router_weights(module: torch.nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    """Router weights of given experts: softmax over all experts, gathered, renormalised where the model does so."""
    weights = logits.float().softmax(-1).gather(-1, experts.long())
    # Mixtral has no such switch and always renormalises.
    return weights / weights.sum(-1, keepdim=True) if getattr(module, "norm_topk_prob", True) else weights


def routing_difference(a: Tensor, b: Tensor) -> dict[str, float]:
    """int [B, L, N, S] twice, -1 where unknown: share of (token, layer) whose expert *set* differs, share of tokens
    with a difference in any layer, and the number of tokens compared.
    """
    known = ((a >= 0) & (b >= 0)).all(-1).all(-1)
    differs = (a[known].sort(-1).values != b[known].sort(-1).values).any(-1).double()
    if not len(differs):
        raise ValueError("no token has its routing on both sides")
    return {
        "share_token_layer_routing_differs": differs.mean().item(),
        "share_token_any_layer_differs": differs.amax(-1).mean().item(),
        "tokens_routing_known": float(len(differs)),
    }


def static_masks(
    checkpoint: Path, spec: RacSpec, ids_BT: Tensor, *, precision: Precision, device: str = "cpu"
) -> dict[str, Tensor]:
    """Static RAC masks, bool [K] by engine key, calibrated as in training: on the trainer's model at `precision`."""
    model = load_model(checkpoint, precision, device=device)
    return calibrate(model, ids_BT, torch.ones_like(ids_BT), spec)
