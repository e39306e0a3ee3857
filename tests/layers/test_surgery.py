"""Surgery: forward against formulas written out here, straight-through gradients, reports, errors."""

import copy
import json

import pytest
import torch
from tiny_moe import tiny_model

from quads.layers.setup import Precision
from quads.layers.surgery import apply_surgery, quads_layers, quantized_weights, set_static_masks
from quads.numerics.rac import RacSpec

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # all non-negative finite values


def nearest(values: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """Closest grid value by exhaustive search, ties to the even index."""
    distance = (values.abs().double()[..., None] - grid.double()).abs()
    best = distance.amin(-1, keepdim=True)
    even = torch.arange(len(grid)) % 2
    index = torch.where(distance == best, even, 9).argmin(-1)
    return grid[index] * values.sign()


def brute_nvfp4(w: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """fp32 dequantized NVFP4 of w [..., N, K] in the export's order: gs = 2688/amax, s = E4M3(gs*(b/6)), q =
    E2M1(w/(s/gs)).
    """
    blocks = w.reshape(*w.shape[:-1], -1, 16)
    gs = (torch.tensor(2688.0) / amax)[..., None]  # "2688.0 / amax" would be 2688 * RN(1/amax)
    s = nearest((gs * (blocks.abs().amax(-1, keepdim=True) / 6)).clamp(max=448), E4M3)
    s = torch.where(s == 0, 0.125, s)
    q = nearest((blocks / (s / gs)).clamp(-6, 6), GRID)
    return ((q * s) * (1 / gs)).reshape(w.shape)


def bf16(w: torch.Tensor) -> torch.Tensor:
    return w.detach().bfloat16().float()


def amax(*weights: torch.Tensor) -> torch.Tensor:
    return torch.stack([w.abs().amax((-2, -1), keepdim=True) for w in weights]).amax(0)


@pytest.fixture(scope="module")
def stock():
    return tiny_model()


def operated(stock, **precision):
    model = copy.deepcopy(stock)
    return model, apply_surgery(model, Precision(**precision))


def expected_weights(model, scale_group):
    """name -> brute-force weight for every quantized parameter."""
    out = {}
    for i, layer in enumerate(model.model.layers):
        attention, experts, head = layer.self_attn, layer.mlp.experts, f"model.layers.{i}"
        q, k, v, o = (bf16(getattr(attention, f"{n}_proj").weight) for n in "qkvo")
        shared = amax(q, k, v)
        for name, w in zip("qkvo", (q, k, v, o), strict=True):
            own = shared if scale_group == "fused" and name != "o" else amax(w)
            out[f"{head}.self_attn.{name}_proj.weight"] = brute_nvfp4(w, own)
        w13, w2 = bf16(experts.gate_up_proj), bf16(experts.down_proj)
        parts = [w13] if scale_group == "fused" else list(w13.chunk(2, 1))
        out[f"{head}.mlp.experts.gate_up_proj"] = torch.cat([brute_nvfp4(p, amax(p)) for p in parts], 1)
        out[f"{head}.mlp.experts.down_proj"] = brute_nvfp4(w2, amax(w2))
    return out


@pytest.mark.parametrize("scale_group", ["fused", "shard"])
def test_quantized_weights_equal_brute_force(stock, scale_group):
    model, _ = operated(stock, weight="nvfp4", scale_group=scale_group)
    got, want = dict(quantized_weights(model)), expected_weights(stock, scale_group)
    assert got.keys() == want.keys()
    assert sum(int((got[n] != want[n]).sum()) for n in want) == 0


def test_scale_groups_differ(stock):
    fused, shard = (
        dict(quantized_weights(operated(stock, weight="nvfp4", scale_group=g)[0])) for g in ("fused", "shard")
    )
    assert any(not torch.equal(fused[n], shard[n]) for n in fused)


@pytest.mark.parametrize("weight", ["bf16", "nvfp4"])
def test_forward_equals_stock_model_with_replaced_weights(stock, weight):
    """The stock forward on brute-force weights is an independent statement of y = x W(w)^T, experts included."""
    model, _ = operated(stock, weight=weight)
    reference = copy.deepcopy(stock)
    replaced = expected_weights(stock, "fused")
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name in replaced:
                parameter.copy_(replaced[name] if weight == "nvfp4" else bf16(parameter))
        ids = torch.randint(0, 43, (3, 9), generator=torch.Generator().manual_seed(0))
        difference = (model(ids).logits - reference(ids).logits).abs().max()
        moved = (stock(ids).logits - reference(ids).logits).abs().max()
    assert difference < 2e-5 < moved


def test_linear_forward_and_straight_through_gradient(stock):
    """y = A(x) W(w)^T; dL/dw and dL/dx are those of a plain product of A(x) and W(w)."""
    model, _ = operated(stock, weight="nvfp4", activation="nvfp4")
    layer = model.model.layers[0].self_attn.o_proj
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(3)).requires_grad_()
    # Activations: one scale per token; the order of operations differs from the export's, rarely in value.
    a = torch.cat([brute_nvfp4(row[None], amax(row[None])) for row in x.detach()])
    w = brute_nvfp4(bf16(layer.weight), amax(bf16(layer.weight)))
    y = layer(x)
    torch.testing.assert_close(y, a @ w.T, rtol=1e-5, atol=1e-5)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(4))
    y.backward(grad)
    torch.testing.assert_close(x.grad, grad @ w, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.weight.grad, grad.T @ a, rtol=1e-5, atol=1e-5)


def test_gradients_reach_every_parameter_and_equal_the_replaced_model(stock):
    model, _ = operated(stock, weight="nvfp4")
    reference = copy.deepcopy(stock)
    replaced = expected_weights(stock, "fused")
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name in replaced:
                parameter.copy_(replaced[name])
    ids = torch.randint(0, 43, (4, 16), generator=torch.Generator().manual_seed(5))
    for m in (model, reference):
        m(ids).logits.square().mean().backward()
    want = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, want[name].grad, rtol=1e-3, atol=1e-5, msg=name)


def test_state_dict_is_unchanged(stock):
    model, _ = operated(stock, weight="nvfp4")
    before, after = stock.state_dict(), model.state_dict()
    assert list(before) == list(after) and all(torch.equal(before[n], after[n]) for n in before)
    assert [n for n, _ in stock.named_modules()] == [n for n, _ in model.named_modules()]


def test_report_lists_every_module(stock):
    _, report = operated(stock, weight="nvfp4", skip=("lm_head", "layers.1.self_attn"))
    status = {row.module: (row.status, row.reason) for row in report.rows}
    assert status["model.layers.0.self_attn.q_proj"] == ("quantized", "")
    assert status["model.layers.0.mlp.experts"] == ("quantized", "")
    assert status["model.layers.1.self_attn.q_proj"] == ("skipped", "listed in skip as 'layers.1.self_attn'")
    assert status["lm_head"] == ("skipped", "listed in skip as 'lm_head'")
    row = next(r for r in report.rows if r.module == "model.layers.0.mlp.experts")
    assert row.shapes == {"gate_up_proj": [8, 64, 64], "down_proj": [8, 64, 32]}
    assert row.keys == ["model.layers.0.mlp.experts.w13", "model.layers.0.mlp.experts.w2"]
    parsed = json.loads(report.to_json())
    assert parsed["counts"] == {"quantized": 6, "skipped": 5} and parsed["precision"]["weight"] == "nvfp4"


def test_rac_masks_static_batch_token(stock):
    ids = torch.randint(0, 43, (2, 8), generator=torch.Generator().manual_seed(6))
    logits = {}
    with torch.no_grad():
        want = operated(stock, weight="nvfp4")[0](ids).logits
        for mask in ("static", "batch", "token", None):
            rac = RacSpec(0.5, mask=mask) if mask else None
            model, _ = operated(stock, weight="nvfp4", activation="nvfp4", rac=rac)
            if mask == "static":
                with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.qkv_proj.*no mask is set"):
                    model(ids)
                everything = {
                    key: torch.ones(k, dtype=torch.bool)
                    for name, m in quads_layers(model)
                    for key, k in (
                        [(m.quads.key(), m.weight.shape[1])]
                        if hasattr(m, "weight")
                        else [(f"{name}.w13", 64), (f"{name}.w2", 32)]
                    )
                }
                with pytest.raises(ValueError, match="no static RAC mask for"):
                    set_static_masks(model, {})
                set_static_masks(model, everything)
            logits[mask] = (model(ids).logits - want).abs().mean()
    assert max(logits["static"], logits["batch"], logits["token"]) < logits[None]


def test_unknown_experts_stop(stock):
    class StrangeExperts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(4, 32, 16))

    model = copy.deepcopy(stock)
    model.model.layers[1].mlp.strange = StrangeExperts()
    with pytest.raises(TypeError, match=r"layers\.1\.mlp\.strange.*\[4, 32, 16\].*StrangeExperts.*Qwen3MoeExperts"):
        apply_surgery(model, Precision(weight="nvfp4"))
    assert not list(quads_layers(model)), "nothing may be swapped when surgery stops"
    report = apply_surgery(model, Precision(weight="nvfp4", skip=("lm_head", "strange")))
    assert next(r for r in report.rows if r.module.endswith("strange")).status == "skipped"


def test_subclass_of_linear_and_second_surgery_stop(stock):
    class Adapter(torch.nn.Linear):
        pass

    model = copy.deepcopy(stock)
    model.model.layers[0].self_attn.o_proj = Adapter(128, 64, bias=False)
    with pytest.raises(TypeError, match=r"o_proj.*Adapter.*subclass"):
        apply_surgery(model, Precision(weight="nvfp4"))
    model, _ = operated(stock, weight="nvfp4")
    with pytest.raises(TypeError, match="already applied"):
        apply_surgery(model, Precision(weight="nvfp4"))


def test_k_not_multiple_of_16_names_the_module():
    model = tiny_model(moe_intermediate_size=24)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts\.down_proj: K=24.*16.*skip"):
        apply_surgery(model, Precision(weight="nvfp4"))


@pytest.mark.parametrize("weight", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("name", ["self_attn.k_proj.weight", "mlp.experts.down_proj"])
def test_non_finite_weight_names_the_tensor(stock, weight, name):
    model, _ = operated(stock, weight=weight)
    with torch.no_grad():
        dict(model.named_parameters())[f"model.layers.1.{name}"].view(-1)[5] = float("nan")
    with pytest.raises(ValueError, match=r"model\.layers\.1\."):
        model(torch.zeros(1, 2, dtype=torch.long))


def test_unknown_precision_names_the_known():
    with pytest.raises(ValueError, match=r"int4.*known: bf16, fp8, nvfp4"):
        Precision(weight="int4")
    with pytest.raises(ValueError, match=r"rac.*nvfp4"):
        Precision(weight="nvfp4", rac=RacSpec(0.5))
