"""Gradients of the swapped layers against autograd through w + (W(w) - w).detach(), all in float64.

W(w) comes from the exhaustive search of test_surgery, so neither the quantizer nor the estimator is asked about itself.
float64 makes w + (W - w) equal W up to 1e-16, where float32 would round once more.
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from test_surgery import amax, bf16, brute_nvfp4
from tiny_moe import tiny_model
from tolerances import TOLERANCES

from quads.layers.execution import Execution
from quads.layers.grouped import grouped_experts, plan
from quads.layers.setup import Precision
from quads.layers.surgery import apply_surgery, set_static_masks
from quads.numerics.qdq import fake_quantize_activation
from quads.numerics.rac import RacSpec

WIDTHS = {"self_attn.qkv_proj": 64, "self_attn.o_proj": 128, "mlp.experts.w13": 64, "mlp.experts.w2": 32}
CLOSE = {"rtol": 1e-12, "atol": 1e-13}
ACTIVATIONS = {
    "asymmetric": ("bf16", None),
    "symmetric": ("nvfp4", None),
    "rac static": ("nvfp4", RacSpec(0.5)),
    "rac token": ("nvfp4", RacSpec(0.5, mask="token")),
    "rac batch": ("nvfp4", RacSpec(0.5, mask="batch")),
}


def through(value: torch.Tensor, quantized: torch.Tensor) -> torch.Tensor:
    """The straight-through estimator as it is usually written."""
    return value + (quantized.to(value.dtype) - value).detach()


def operated(activation: str, cache: str = "on", scale_group: str = "fused", kind: str = "reference"):
    fmt, rac = ACTIVATIONS[activation]
    model = tiny_model().double()
    with torch.no_grad():
        for layer in model.model.layers:  # three scales, so that sharing one matters
            layer.self_attn.k_proj.weight.mul_(3)
            layer.mlp.experts.gate_up_proj[:, 32:].mul_(0.3)
    apply_surgery(model, Precision("nvfp4", fmt, scale_group, rac), Execution(cache=cache, backend=kind))
    mask = None
    if rac is not None and rac.mask == "static":
        masks = {}
        for i in range(2):
            for key, k in WIDTHS.items():
                masks[f"model.layers.{i}.{key}"] = (torch.arange(k) // 16 % 2).bool()
        set_static_masks(model, masks)
        mask = masks

    def quantize(x: torch.Tensor, key: str) -> torch.Tensor:
        if fmt == "bf16":
            return x
        own = None if mask is None else mask[f"model.layers.0.{key}"]
        return through(x, fake_quantize_activation(x.detach(), fmt, rac, own))

    return model.model.layers[0], quantize


def leaf(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def assert_gradients(got: torch.Tensor, want: torch.Tensor, ours: list, theirs: list) -> None:
    torch.testing.assert_close(got, want, **CLOSE)
    grad = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(99))
    for a, b in zip(torch.autograd.grad(got, ours, grad), torch.autograd.grad(want, theirs, grad), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
        assert bool(b.any())


@pytest.mark.parametrize("scale_group", ["fused", "shard"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fused_linears(activation, scale_group):
    """q, k and v share one scale; their gradients stay their own."""
    layer, quantize = operated(activation, scale_group=scale_group)
    attention, x = layer.self_attn, leaf(2, 5, 64, seed=1)
    ours, y = leaf(2, 5, 64, seed=1), leaf(2, 5, 64, seed=1)
    weights = [copy.deepcopy(getattr(attention, f"{n}_proj").weight) for n in "qkv"]
    shared = amax(*(bf16(w) for w in weights))
    got = torch.cat([getattr(attention, f"{n}_proj")(ours) for n in "qkv"], -1)
    a = quantize(y.reshape(10, 64), "self_attn.qkv_proj")
    own = [shared if scale_group == "fused" else amax(bf16(w)) for w in weights]
    rows = [a @ through(w, brute_nvfp4(bf16(w), m)).T for w, m in zip(weights, own, strict=True)]
    want = torch.cat(rows, -1).view(2, 5, -1)
    assert torch.equal(ours, x)
    assert_gradients(got, want, [ours, *(getattr(attention, f"{n}_proj").weight for n in "qkv")], [y, *weights])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_single_linear(activation):
    layer, quantize = operated(activation)
    linear, x, y = layer.self_attn.o_proj, leaf(7, 128, seed=2), leaf(7, 128, seed=2)
    w = copy.deepcopy(linear.weight)
    want = quantize(y, "self_attn.o_proj") @ through(w, brute_nvfp4(bf16(w), amax(bf16(w)))).T
    assert_gradients(linear(x), want, [x, linear.weight], [y, w])


def experts_by_hand(x, ids, weights, w13, w2, act, quantize_x, quantize_h):
    """Row after row; the weighted sum over choices in float32, as the layer defines it."""
    rows = torch.argsort(ids.reshape(-1), stable=True).tolist()
    a, slots = quantize_x(x), ids.shape[1]
    hidden = []
    for r in rows:
        u = w13[ids.reshape(-1)[r]] @ a[r // slots]
        hidden.append(act(u[:32]) * u[32:])
    h = quantize_h(torch.stack(hidden))
    out = [None] * len(rows)
    for place, r in enumerate(rows):
        out[r] = (w2[ids.reshape(-1)[r]] @ h[place]).float() * weights.reshape(-1)[r].float()
    return torch.stack(out).view(len(ids), slots, -1).sum(1).to(x.dtype)


@pytest.mark.parametrize("scale_group", ["fused", "shard"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_experts(activation, scale_group):
    layer, quantize = operated(activation, scale_group=scale_group)
    experts = layer.mlp.experts
    ids = torch.randint(0, 8, (6, 2), generator=torch.Generator().manual_seed(3))
    leaves = [[leaf(6, 64, seed=4), leaf(6, 2, seed=5)] for _ in range(2)]
    w13, w2 = copy.deepcopy(experts.gate_up_proj), copy.deepcopy(experts.down_proj)
    halves = [bf16(w13)] if scale_group == "fused" else list(bf16(w13).chunk(2, 1))
    q13 = torch.cat([brute_nvfp4(half, amax(half)) for half in halves], 1)
    q2 = brute_nvfp4(bf16(w2), amax(bf16(w2)))
    want = experts_by_hand(
        *(leaves[1][0], ids, leaves[1][1], through(w13, q13), through(w2, q2), experts.act_fn),
        lambda x: quantize(x, "mlp.experts.w13"),
        lambda h: quantize(h, "mlp.experts.w2"),
    )
    got = experts(leaves[0][0], ids, leaves[0][1])
    # The sum over choices rounds to float32; its two gradients are products of float32 values.
    limit = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(got, want, **limit)
    grad = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(99))
    ours = torch.autograd.grad(got, [*leaves[0], experts.gate_up_proj, experts.down_proj], grad)
    theirs = torch.autograd.grad(want, [*leaves[1], w13, w2], grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **limit)
        assert bool(b.any())


def test_plan_by_hand():
    p = plan(torch.tensor([[2, 0], [0, 3], [2, 2]]), 5)
    assert p.order.tolist() == [1, 2, 0, 4, 5, 3] and p.token.tolist() == [0, 1, 0, 2, 2, 1]
    assert p.ends.tolist() == [2, 2, 5, 6, 6] and p.ends.dtype == torch.int32
    assert p.inverse[p.order].tolist() == list(range(6))


def grouped_and_loop(activation: str, scale_group: str):
    """[(output, gradients)] of the grouped and of the loop product, bf16, 8 experts, 48 tokens."""
    fmt, rac = ACTIVATIONS[activation]
    found = []
    for kind in ("grouped", "loop"):
        model = tiny_model(hidden_size=128, moe_intermediate_size=64).bfloat16()
        apply_surgery(model, Precision("nvfp4", fmt, scale_group, rac), Execution(experts=kind))
        experts = model.model.layers[0].mlp.experts
        g = torch.Generator().manual_seed(8)
        x = torch.randn(48, 128, generator=g).bfloat16().requires_grad_()
        weights = torch.rand(48, 2, generator=g).bfloat16().requires_grad_()
        ids = torch.stack([torch.randperm(8, generator=g)[:2] for _ in range(48)])
        out = experts(x, ids, weights)
        grad = torch.randn(out.shape, generator=g).bfloat16()
        found.append((out, *torch.autograd.grad(out, [x, weights, experts.gate_up_proj, experts.down_proj], grad)))
    return found


@pytest.mark.parametrize("scale_group", ["fused", "shard"])
@pytest.mark.parametrize("activation", ["asymmetric", "symmetric"])
def test_grouped_equals_loop(activation, scale_group):
    """Same bf16 operands, additions in another order: relative to each tensor's norm."""
    grouped, loop = grouped_and_loop(activation, scale_group)
    for a, b in zip(grouped, loop, strict=True):
        a, b = a.detach(), b.detach()
        relative = float((a.double() - b.double()).norm() / b.double().norm())
        assert relative <= TOLERANCES["grouped_experts_relative"].limit
        assert a.shape == b.shape and a.dtype == b.dtype


def test_grouped_backward_against_autograd_of_the_formula(monkeypatch):
    """In float64 with products written out: the two backwards written by hand equal autograd's to 1e-12."""

    def products(x, w, ends):
        starts = [0, *ends.tolist()[:-1]]
        return torch.cat([x[a:b] @ w[e] for e, (a, b) in enumerate(zip(starts, ends.tolist(), strict=True))])

    monkeypatch.setattr(torch, "_grouped_mm", products)
    monkeypatch.setattr("quads.layers.grouped.torch", SimpleNamespace(**{**vars(torch), "bfloat16": torch.float64}))
    ids = torch.randint(0, 5, (9, 3), generator=torch.Generator().manual_seed(0))
    make = lambda: [leaf(9, 16, seed=1), leaf(9, 3, seed=2), leaf(5, 64, 16, seed=3), leaf(5, 16, 32, seed=4)]  # noqa: E731
    act = torch.nn.functional.silu
    (x, weights, w13, w2), theirs = make(), make()
    got = grouped_experts(x, ids, weights, w13, w2, act)
    y, v, u13, u2 = theirs
    rows = []
    for t in range(9):
        parts = []
        for s in range(3):
            u = u13[ids[t, s]] @ y[t]
            parts.append(v[t, s] * (u2[ids[t, s]] @ (act(u[:32]) * u[32:])))
        rows.append(torch.stack(parts).sum(0))
    assert_gradients(got, torch.stack(rows), [x, weights, w13, w2], theirs)


def test_grouped_refuses_other_dtypes():
    model = tiny_model()
    apply_surgery(model, Precision("nvfp4"), Execution(experts="grouped"))
    with pytest.raises(ValueError, match=r"bfloat16, x is torch\.float32.*loop"):
        model(torch.zeros(1, 2, dtype=torch.long))


def test_grouped_under_autocast_multiplies_in_bf16():
    model = tiny_model()
    apply_surgery(model, Precision("nvfp4"), Execution(experts="grouped"))
    ids = torch.randint(0, 43, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids).logits.float().square().mean()
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
