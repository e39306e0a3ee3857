"""Supervised warm-up of the toy: clean demonstrations until the chain is known, then noisy ones until it is blurred.

    loss   mean cross-entropy over the answer's N+1 tokens  (+ 0.01 * balance in the clean phase)
    balance = mean over layers of E / k * sum_e (share of tokens routed to e) * (mean router probability of e)
    lr     clean: lr * min(1, (s+1)/30);  noisy: lr * min(1, (s+1)/10) * (1 - 0.9 s/S)        s = 0 .. S-1

Noise 0.12 replaces each digit with probability 0.12 and goes on from it, so a model that fits it samples a right
chain in about (1 - 0.12 * 0.9)^6 = 0.50 of cases, more where errors cancel (x*0), while its most likely answer stays
right: what GRPO then has to sharpen. Differs from plain SFT by that second phase; with clean data alone RL has nothing
to do, with few steps alone the skill is missing. AdamW, betas (0.9, 0.98), no weight decay, gradient norm 1.
Legend: B batch, N operations, V vocabulary, E experts, k experts per token. Deterministic given the seed on 1 CPU
thread; on a GPU the same up to the order of additions. Runs where the model is; batches are drawn on the CPU.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional
from transformers import Qwen3MoeForCausalLM

from quads.config import Data, Warmup
from quads.data import chain

log = logging.getLogger(__name__)

BALANCE = 0.01
BETAS = (0.9, 0.98)
LOG_EVERY = 20


@dataclass(frozen=True)
class Accuracy:
    """Share of problems whose answer ends in the right digit and the end mark right after it."""

    sampled: float
    greedy: float
    problems: int


def balance_loss(router_logits: Sequence[torch.Tensor], k: int) -> torch.Tensor:
    """Load-balancing loss over layers; router_logits: per layer [T,E]. 1 when perfectly balanced."""
    total = router_logits[0].new_zeros(())
    for logits_TE in router_logits:
        E = logits_TE.shape[-1]
        prob_TE = logits_TE.softmax(-1)
        routed_TE = functional.one_hot(prob_TE.topk(k, dim=-1).indices, E).sum(1).float()
        total = total + E / k * (routed_TE.mean(0) * prob_TE.mean(0)).sum()
    return total / len(router_logits)


def draw_unseen(count: int, data: Data, rng: np.random.Generator, excluded: chain.Ints) -> chain.Problems:
    """`count` problems (repeats possible) without those in `excluded` (keys)."""
    kept: list[chain.Problems] = []
    missing = count
    while missing:
        batch = chain.draw(missing, data.operations, data.operators, rng)
        batch = batch.take(~np.isin(chain.keys(batch), excluded))
        kept.append(batch)
        missing -= len(batch)
    return chain.concatenate(kept)


def demonstrations(
    data: Data, batch: int, noise: float, rng: np.random.Generator, excluded: chain.Ints
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids of `batch` problems with answers, int64 [B,2N+4], and the answers alone [B,N+1]."""
    problems = draw_unseen(batch, data, rng, excluded)
    answers = chain.answer_ids(chain.answer_digits(problems, noise, rng))
    ids = np.concatenate([chain.prompt_ids(problems), answers], axis=1)
    return torch.from_numpy(ids), torch.from_numpy(answers)


def learning_rates(warmup: Warmup) -> list[float]:
    """The rate of every step, both phases."""
    clean = [warmup.clean_lr * min(1.0, (s + 1) / 30) for s in range(warmup.clean_steps)]
    S = warmup.noisy_steps
    return clean + [warmup.noisy_lr * min(1.0, (s + 1) / 10) * (1 - 0.9 * s / S) for s in range(S)]


def train(model: Qwen3MoeForCausalLM, data: Data, warmup: Warmup, excluded: chain.Ints) -> list[float]:
    """Warm `model` up in place; `excluded` are keys of problems it must not see. Returns the loss of every step.

    Raises FloatingPointError naming the step if the loss is not finite.
    """
    rng = np.random.default_rng(warmup.seed)
    rates = learning_rates(warmup)
    losses: list[float] = []
    optimizer = None
    started = time.monotonic()
    model.train()
    for s, rate in enumerate(rates):
        clean = s < warmup.clean_steps
        if s in (0, warmup.clean_steps):  # the noisy phase starts with fresh moments
            optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=0.0)
        assert optimizer is not None
        optimizer.param_groups[0]["lr"] = rate
        ids_BT, answers_BR = demonstrations(data, warmup.batch, 0.0 if clean else warmup.noise, rng, excluded)
        losses.append(_update(model, optimizer, ids_BT, answers_BR, balance=BALANCE if clean else 0.0))
        if not np.isfinite(losses[-1]):
            raise FloatingPointError(f"warm-up loss is {losses[-1]} at step {s + 1}; lower warmup.clean_lr")
        if (s + 1) % LOG_EVERY == 0 or s + 1 == len(rates):
            seconds = time.monotonic() - started
            eta = seconds / (s + 1) * (len(rates) - s - 1)
            phase = "clean" if clean else "noisy"
            log.info("step %d/%d %s loss %.3f %.0f s, %.0f s left", s + 1, len(rates), phase, losses[-1], seconds, eta)
    model.eval()
    return losses


def _update(
    model: Qwen3MoeForCausalLM,
    optimizer: torch.optim.Optimizer,
    ids_BT: torch.Tensor,
    answers_BR: torch.Tensor,
    balance: float,
) -> float:
    """One optimizer step; the cross-entropy before it, without the balance term."""
    R = answers_BR.shape[1]
    ids_BT, answers_BR = ids_BT.to(model.device), answers_BR.to(model.device)
    out = model(ids_BT[:, :-1], output_router_logits=balance > 0, use_cache=False, logits_to_keep=R)
    cross_entropy = functional.cross_entropy(out.logits.flatten(0, 1), answers_BR.flatten())
    loss = cross_entropy
    if balance > 0:
        loss = loss + balance * balance_loss(out.router_logits, model.config.num_experts_per_tok)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(cross_entropy.detach())


@torch.no_grad()
def answer(
    model: Qwen3MoeForCausalLM, prompts_BP: torch.Tensor, length: int, generator: torch.Generator | None
) -> torch.Tensor:
    """`length` tokens after each prompt, int64 [B,length] on the CPU; sampled at T = 1, or greedy where `generator` (of
    the CPU) is None.

    Rows are not stopped at the end mark: the caller reads only what stands before it.
    """
    out = model(prompts_BP.to(model.device), use_cache=True, logits_to_keep=1)
    tokens = []
    for r in range(length):
        logits_BV = out.logits[:, -1].float().cpu()
        if generator is None:
            next_B1 = logits_BV.argmax(-1, keepdim=True)
        else:
            next_B1 = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)
        tokens.append(next_B1)
        if r + 1 < length:
            out = model(next_B1.to(model.device), past_key_values=out.past_key_values, use_cache=True)
    return torch.cat(tokens, dim=1)


def is_right(answers_BR: torch.Tensor, digits_BN: torch.Tensor) -> torch.Tensor:
    """Bool [B]: N digits, the last one right, then the end mark. The reward of the task, on tokens."""
    N = digits_BN.shape[1]
    all_digits_B = (answers_BR[:, :N] < 10).all(1)
    return all_digits_B & (answers_BR[:, N - 1] == digits_BN[:, -1]) & (answers_BR[:, N] == chain.ID[chain.END])


def measure(model: Qwen3MoeForCausalLM, problems: chain.Problems, seed: int) -> Accuracy:
    """Accuracy on `problems`, one sample each at T = 1 and one greedy answer."""
    prompts_BP = torch.from_numpy(chain.prompt_ids(problems))
    digits_BN = torch.from_numpy(chain.answer_digits(problems))
    length = problems.operations + 1
    generator = torch.Generator().manual_seed(seed)
    sampled = is_right(answer(model, prompts_BP, length, generator), digits_BN)
    greedy = is_right(answer(model, prompts_BP, length, None), digits_BN)
    return Accuracy(sampled.float().mean().item(), greedy.float().mean().item(), len(problems))
