# SPDX-License-Identifier: Apache-2.0
"""Swapped layers with backend triton: the bits of backend reference, weights, activations and gradients."""

from __future__ import annotations

import pytest
import torch
from gemm_cases import DEVICE
from tiny_moe import tiny_model

from quads.kernels import activation, weight  # imported during collection, where the interpreter is chosen
from quads.layers.execution import Execution
from quads.layers.setup import Precision
from quads.layers.surgery import apply_surgery, quads_layers, weight_cache

assert activation and weight
IDS = torch.randint(0, 43, (1, 3), generator=torch.Generator().manual_seed(0))


def operated(backend: str, dtype: torch.dtype = torch.float32, cache: str = "on", **precision) -> torch.nn.Module:
    size = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model = tiny_model(num_hidden_layers=1, num_experts=2, moe_intermediate_size=16, **size).to(DEVICE, dtype)
    apply_surgery(model, Precision(**precision), Execution(backend=backend, cache=cache))
    return model


@pytest.mark.parametrize(
    ("activation", "scale_group", "dtype"),
    [
        ("bf16", "fused", torch.float32),
        ("nvfp4", "shard", torch.bfloat16),
        pytest.param("nvfp4", "fused", torch.float32, marks=pytest.mark.gpu),
        pytest.param("nvfp4", "fused", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("bf16", "shard", torch.float32, marks=pytest.mark.gpu),
    ],
)
def test_same_bits_as_reference(activation: str, scale_group: str, dtype: torch.dtype) -> None:
    models = [
        operated(b, dtype, weight="nvfp4", activation=activation, scale_group=scale_group)
        for b in ("triton", "reference")
    ]
    logits = []
    for model in models:
        out = model(IDS.to(DEVICE)).logits
        out.float().square().mean().backward()
        logits.append(out)
    assert torch.equal(*logits)
    for (name, ours), theirs in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name


def test_bf16_weights_are_rounded_once() -> None:
    assert torch.equal(*(operated(b, weight="bf16")(IDS.to(DEVICE)).logits for b in ("triton", "reference")))


def test_cached_values_are_those_of_the_definition() -> None:
    """Kept values after an update, element by element against the definition."""
    model = operated("triton", cache="verify", weight="nvfp4")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(2):
        model(IDS.to(DEVICE)).logits.square().mean().backward()
        optimizer.step()
    model(IDS.to(DEVICE))
    kept = {key: entry.value for key, entry in weight_cache(model)._entries.items() if not key.endswith("amax")}
    assert len(kept) == 6
    for name, module in quads_layers(model):
        for param, w in module.named_parameters(recurse=False):
            setup = module.quads
            want = setup.dequantized(w.detach(), setup.shared_amax(), param).to(w.dtype)
            assert torch.equal(kept[f"{name}.{param}"], want), name


def test_non_finite_weight_becomes_nan() -> None:
    model = operated("triton", weight="nvfp4")
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.view(-1)[5] = float("inf")
    assert bool(model(IDS.to(DEVICE)).logits.isnan().any())


def test_both_expert_tensors_take_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """With eight experts or more, amax and quantization of W13 and of W2 are one launch each."""
    size = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model = tiny_model(num_hidden_layers=1, num_experts=8, moe_intermediate_size=16, **size).to(DEVICE, torch.bfloat16)
    apply_surgery(model, Precision("nvfp4"), Execution(backend="triton"))
    launched, kernel = [], weight._fused_kernel

    class Spy:
        def __getitem__(self, grid):
            def run(x, *given, **settings):
                launched.append(tuple(x.shape))
                return kernel[grid](x, *given, **settings)

            return run

    monkeypatch.setattr(weight, "_fused_kernel", Spy())
    model(IDS.to(DEVICE))
    assert launched == [(8, 32, 32), (8, 32, 16)]


@pytest.mark.gpu
def test_grouped_experts_equal_the_loop() -> None:
    """On the GPU both products add in orders of their own: relative to each tensor's norm."""
    from tolerances import TOLERANCES

    found = []
    for kind in ("grouped", "loop"):
        model = tiny_model(hidden_size=512, moe_intermediate_size=256, num_experts=16, num_experts_per_tok=4)
        model = model.to(DEVICE, torch.bfloat16)
        apply_surgery(model, Precision("nvfp4", "nvfp4"), Execution("triton", kind, "on"))
        experts, g = model.model.layers[0].mlp.experts, torch.Generator().manual_seed(8)
        x = torch.randn(300, 512, generator=g).bfloat16().to(DEVICE).requires_grad_()
        weights = torch.rand(300, 4, generator=g).bfloat16().to(DEVICE).requires_grad_()
        ids = torch.stack([torch.randperm(16, generator=g)[:4] for _ in range(300)]).to(DEVICE)
        out = experts(x, ids, weights)
        grad = torch.randn(out.shape, generator=g).bfloat16().to(DEVICE)
        found.append((out, *torch.autograd.grad(out, [x, weights, experts.gate_up_proj, experts.down_proj], grad)))
    relative = [
        float((a.double() - b.double()).norm().detach() / b.double().norm().detach())
        for a, b in zip(*found, strict=True)
    ]
    print("grouped against loop, relative:", relative)
    assert max(relative) <= TOLERANCES["grouped_experts_gpu"].limit
