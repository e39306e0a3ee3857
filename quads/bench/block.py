# SPDX-License-Identifier: Apache-2.0
"""Expert block of the trainer, forward and backward, with and without QAT; bar 10.

    block    128 experts, top-8, D = 2048, F = 768 (a 30B-A3B layer), T = 16384 tokens, bf16, random routing
    with     the swapped layer: fake-quantized weights (Triton), grouped products; every forward quantizes ("single")
             or the first of 4 micro-batches does ("amortised", the weight cache)
    without  the faster of the same grouped block on the plain weights and transformers' own grouped experts

Gradients of x, routing weights and both expert tensors are computed; they are not accumulated over micro-batches,
which both sides would pay alike (that makes the ratio larger, not smaller). No attention, router, optimizer.
Check: outputs and gradients equal those of the plain block on weights from `quads.numerics`, bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quads.bench.protocol import Bar, Case, Measured, best, measure, ratio, require_equal
from quads.layers.execution import Execution
from quads.layers.grouped import grouped_experts
from quads.layers.setup import Precision
from quads.layers.surgery import apply_surgery, invalidate_weight_cache
from quads.numerics import qdq

EXPERTS, SLOTS, D, F, TOKENS, MICRO_BATCHES = 128, 8, 2048, 768, 16384, 4
GROUP = f"block {TOKENS} tokens"
CEILINGS = {GROUP: "without QAT, grouped"}
# Forward, and two products of the same size backward.
FLOPS = 3 * 2 * TOKENS * SLOTS * 3 * F * D


def stock_experts(implementation: str) -> torch.nn.Module:
    """transformers' Qwen3-MoE experts of one layer with random bf16 weights on the GPU."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        hidden_size=D, moe_intermediate_size=F, num_experts=EXPERTS, num_experts_per_tok=SLOTS, num_hidden_layers=1
    )
    config._experts_implementation = implementation
    with torch.device("cuda"):
        experts = Qwen3MoeExperts(config).bfloat16()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return experts


class Block:
    """Operands shared by all cases: one layer's weights, one micro-batch."""

    def __init__(self) -> None:
        self.plain = stock_experts("grouped_mm")
        self.params = [self.plain.gate_up_proj, self.plain.down_proj]
        self.x = torch.randn(TOKENS, D, device="cuda").bfloat16().requires_grad_()
        logits = torch.randn(TOKENS, EXPERTS, device="cuda")
        top = logits.softmax(-1).topk(SLOTS)
        self.ids = top.indices
        self.weights = (top.values / top.values.sum(-1, keepdim=True)).bfloat16().requires_grad_()
        self.grad = torch.randn(TOKENS, D, device="cuda").bfloat16()

    def swapped(self, cache: str, activation: str = "bf16") -> torch.nn.Module:
        """The layer after surgery, on the same parameters."""
        experts = stock_experts("grouped_mm")
        experts.gate_up_proj, experts.down_proj = self.params
        holder = torch.nn.ModuleDict({"experts": experts})
        apply_surgery(holder, Precision("nvfp4", activation), Execution("triton", "grouped", cache))
        return holder

    def step(self, out: Tensor, params: list[Tensor] | None = None) -> list[Tensor]:
        """Output and gradients."""
        return [out, *torch.autograd.grad(out, [self.x, self.weights, *(params or self.params)], self.grad)]

    def grouped(self, w13: Tensor, w2: Tensor) -> Tensor:
        """Plain forward."""
        return grouped_experts(self.x, self.ids, self.weights, w13, w2, self.plain.act_fn)

    def reference(self) -> list[Tensor]:
        """Output and gradients of the plain block on the definition's weights."""
        replaced = [qdq.fake_quantize_weight(p.detach(), "nvfp4").requires_grad_() for p in self.params]
        return self.step(self.grouped(*replaced), replaced)


def _check(block: Block, holder: torch.nn.Module) -> str:
    # A second pass meets what the first one kept, if it keeps anything.
    for _ in range(2):
        got = block.step(holder["experts"](block.x, block.ids, block.weights))
    names = ("out", "dx", "dweights", "dW13", "dW2")
    return ", ".join(require_equal(n, a, b) for n, a, b in zip(names, got, block.reference(), strict=True))


def cases(block: Block) -> list[Case]:
    """Rows of the group; "4 micro-batches" rows take four times the work."""

    def with_qat(name: str, cache: str, micro: int, activation: str = "bf16") -> Case:
        holder = block.swapped(cache, activation)

        def run(_: int) -> None:
            invalidate_weight_cache(holder)
            for _ in range(micro):
                block.step(holder["experts"](block.x, block.ids, block.weights))

        check = (lambda: _check(block, holder)) if activation == "bf16" else (lambda: "not compared: cost only")
        return Case(name, run, flops=micro * FLOPS, check=check)

    def plain(_: int) -> None:
        block.step(block.grouped(*block.params))

    def plain_micro(_: int) -> None:
        for i in range(MICRO_BATCHES):
            plain(i)

    def stock(_: int) -> None:
        block.step(block.plain(block.x, block.ids, block.weights))

    peer = "peer: transformers' own"
    return [
        Case("without QAT, grouped", plain, flops=FLOPS),
        Case("without QAT, transformers grouped_mm", stock, flops=FLOPS, check=lambda: peer),
        with_qat("with QAT, single", "off", 1),
        with_qat("with QAT and A4, single", "off", 1, "nvfp4"),
        Case("4 micro-batches without QAT, grouped", plain_micro, flops=MICRO_BATCHES * FLOPS),
        with_qat("4 micro-batches with QAT, cached", "on", MICRO_BATCHES),
        with_qat("4 micro-batches with QAT, not cached", "off", MICRO_BATCHES),
    ]


def rows(repeats: int = 41) -> list[Measured]:
    """The group; needs about 60 GB."""
    block = Block()
    found = measure(GROUP, cases(block), 1, repeats)
    del block
    torch.cuda.empty_cache()
    return found


def bars(found: list[Measured]) -> list[Bar]:
    """Bar 10, single and amortised over 4 micro-batches."""
    own = [row for row in found if row.group == GROUP]

    def us(prefix: str) -> float | None:
        row = best(own, prefix)
        return row.us if row else None

    without = us("without QAT")
    four = us("4 micro-batches without QAT")
    fastest = min(four or float("inf"), MICRO_BATCHES * without) if without else None
    return [
        Bar("10", "expert block forward+backward with QAT / without, single", ratio(us("with QAT, single"), without),
            1.07, 1.05, "lower"),
        Bar("10a", "the same amortised over 4 micro-batches", ratio(us("4 micro-batches with QAT, cached"), fastest),
            1.03, 1.01, "lower"),
    ]  # fmt: skip
