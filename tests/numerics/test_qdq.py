"""The path that trainer and rollout share: definitions, independence of rows and experts, exactness, errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tolerances import TOLERANCES

from quads.numerics import (
    RacSpec,
    activation_residual,
    check_finite,
    emulated_linear,
    fake_quantize_activation,
    fake_quantize_weight,
    nvfp4,
    quantize_activation,
    quantize_weight,
    residual_mask,
    weight_amax,
)
from quads.numerics.qdq import activation_amax, weight_row_amax

FORMATS = ("bf16", "fp8", "nvfp4")
STATIC_32_OF_64 = torch.arange(64) < 32
RAC = [RacSpec(0.5), RacSpec(0.5, mask="batch"), RacSpec(0.5, mask="token"), RacSpec(0.3, "channel", "token", "abs")]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mask_for(spec: RacSpec | None) -> torch.Tensor | None:
    return STATIC_32_OF_64 if spec is not None and spec.mask == "static" else None


# Weights


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_weight_is_the_dequantized_weight(fmt: str, dtype: torch.dtype):
    w = random(3, 24, 64).to(dtype)
    q = quantize_weight(w, fmt)
    assert q.qs.dtype == q.rcp.dtype == torch.float32
    assert torch.equal(q.dequantize(), q.qs * q.rcp)
    fake = fake_quantize_weight(w, fmt)
    assert fake.dtype == dtype
    assert torch.equal(fake, q.dequantize().to(dtype))
    assert torch.equal(q.qs.bfloat16().float(), q.qs)  # an engine may store qs in bf16


@pytest.mark.parametrize("fmt", FORMATS)
def test_weight_is_rounded_to_bf16_first(fmt: str):
    w = random(16, 64)
    assert not torch.equal(w.bfloat16().float(), w)
    master, stored = quantize_weight(w, fmt), quantize_weight(w.bfloat16(), fmt)
    assert torch.equal(master.dequantize(), stored.dequantize())
    assert torch.equal(weight_amax(w), weight_amax(w.bfloat16()))


def test_bf16_weight_is_only_rounded():
    w = random(4, 16)
    assert torch.equal(fake_quantize_weight(w, "bf16"), w.bfloat16().float())


@pytest.mark.parametrize("fmt", FORMATS)
def test_experts_do_not_influence_each_other(fmt: str):
    w = random(5, 24, 64) * torch.tensor([1e-4, 0, 1, 30, 1e-8]).view(5, 1, 1)
    together = fake_quantize_weight(w, fmt)
    for expert in range(5):
        assert torch.equal(fake_quantize_weight(w[expert], fmt), together[expert])
    assert together[1].abs().max() == 0
    assert together.isfinite().all()


def test_nvfp4_weight_is_the_export_profile():
    w = random(24, 64)
    gs = nvfp4.global_scale(weight_amax(w))
    stored = nvfp4.quantize(w.bfloat16(), gs, "verl_export")
    assert torch.equal(quantize_weight(w, "nvfp4").qs, nvfp4.to_qs(stored))
    assert torch.equal(quantize_weight(w, "nvfp4").rcp, gs.reciprocal())


def test_fp8_weight_has_one_scale_per_output_row():
    w = random(2, 24, 64)
    q = quantize_weight(w, "fp8")
    assert q.rcp.shape == (2, 24, 1)
    assert torch.allclose(q.rcp * 448, w.bfloat16().float().abs().amax(-1, keepdim=True))


def test_fused_group_equals_quantizing_the_concatenation():
    gate, up = random(3, 24, 64, seed=1), random(3, 24, 64, seed=2) * 4
    amax = torch.maximum(weight_amax(gate), weight_amax(up))
    fused = quantize_weight(torch.cat((gate, up), dim=1), "nvfp4")
    for part, rows in ((gate, slice(0, 24)), (up, slice(24, 48))):
        shard = quantize_weight(part, "nvfp4", amax)
        assert torch.equal(shard.qs, fused.qs[:, rows])
        assert torch.equal(shard.rcp, fused.rcp)
    alone = quantize_weight(gate, "nvfp4")
    assert not torch.equal(alone.qs, fused.qs[:, :24])


def test_amax_of_another_tensor_that_would_saturate_is_an_error():
    w = random(24, 64)
    with pytest.raises(ValueError, match="exceeds the given amax"):
        quantize_weight(w, "nvfp4", weight_amax(w) / 2)


# Activations


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activation_rows_are_independent(fmt: str, dtype: torch.dtype):
    x = (random(7, 64) * torch.logspace(-4, 4, 7).unsqueeze(-1)).to(dtype)
    x[3] = 0
    q = quantize_activation(x, fmt)
    assert q.qs.shape == (7, 64)
    assert q.rcp.shape == (7, 1)
    fake = fake_quantize_activation(x, fmt)
    assert fake.dtype == dtype
    assert torch.equal(fake, q.dequantize().to(dtype))
    for row in range(7):
        assert torch.equal(fake_quantize_activation(x[row : row + 1], fmt)[0], fake[row])
    assert fake[3].abs().max() == 0


def test_bf16_activation_is_untouched():
    x = random(3, 20)
    assert fake_quantize_activation(x, "bf16") is x
    assert torch.equal(quantize_activation(x, "bf16").qs, x)


def test_nvfp4_activation_is_the_cuda_profile_per_token():
    x = random(9, 64)
    gs = nvfp4.global_scale(x.abs().amax(-1, keepdim=True))
    nv = nvfp4.quantize(x, gs)
    assert torch.equal(quantize_activation(x, "nvfp4").qs, nvfp4.to_qs(nv))
    assert torch.equal(activation_residual(x), x - nvfp4.dequantize(nv))


@pytest.mark.parametrize("spec", RAC)
def test_rac_is_a_second_exact_pass_on_the_mask(spec: RacSpec):
    x = random(9, 64) * torch.logspace(-2, 2, 64)
    gs = nvfp4.global_scale(x.abs().amax(-1, keepdim=True))
    first = nvfp4.quantize(x, gs)
    residual = x - nvfp4.dequantize(first)
    mask = residual_mask(residual, spec, mask_for(spec))
    second = nvfp4.quantize(torch.where(mask, residual, 0.0), gs)
    q = quantize_activation(x, "nvfp4", spec, mask_for(spec))
    exact = nvfp4.to_qs(first).double() + nvfp4.to_qs(second).double()
    assert torch.equal(q.qs.double(), exact)  # the sum of both passes needs no rounding in fp32
    off = ~mask.expand_as(x)
    assert torch.equal(q.qs[off], nvfp4.to_qs(first)[off])
    assert not torch.equal(q.qs, nvfp4.to_qs(first))


def test_only_the_batch_mask_lets_rows_influence_each_other():
    x = random(2, 64)
    x[0, :16] *= 10  # row 0 has its residual in block 0, row 1 in block 2
    x[1, 32:48] *= 10
    for spec in (RacSpec(0.25), RacSpec(0.25, mask="token")):
        together = quantize_activation(x, "nvfp4", spec, mask_for(spec)).qs
        assert torch.equal(quantize_activation(x[1:], "nvfp4", spec, mask_for(spec)).qs[0], together[1])
    x[0] *= 100
    spec = RacSpec(0.25, mask="batch")
    together = quantize_activation(x, "nvfp4", spec).qs
    assert not torch.equal(quantize_activation(x[1:], "nvfp4", spec).qs[0], together[1])


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_tokens_at_all(fmt: str):
    q = quantize_activation(torch.zeros(0, 64), fmt)
    assert q.qs.shape == (0, 64)
    assert emulated_linear(q, quantize_weight(random(8, 64), fmt), torch.float32).shape == (0, 8)


@pytest.mark.parametrize("mask", ["batch", "token"])
def test_no_tokens_with_rac(mask: str):
    assert quantize_activation(torch.zeros(0, 64), "nvfp4", RacSpec(0.5, mask=mask)).qs.shape == (0, 64)


matrices = st.integers(1, 4).flatmap(
    lambda rows: arrays("float32", (rows, 32), elements=st.floats(-1000, 1000, width=16)).map(torch.from_numpy)
)


@settings(deadline=None, max_examples=50)
@given(x=matrices, exponent=st.integers(-20, 20))
def test_activation_properties(x: torch.Tensor, exponent: int):
    for spec in (None, RacSpec(0.5, mask="token"), RacSpec(1.0, mask="batch")):
        q = quantize_activation(x, "nvfp4", spec)
        limit = 2688 if spec is None else 2 * 2688
        assert q.qs.abs().max() <= limit
        assert torch.equal(quantize_activation(-x, "nvfp4", spec).qs, -q.qs)
        scaled = quantize_activation(x * 2.0**exponent, "nvfp4", spec)
        assert torch.equal(scaled.dequantize(), q.dequantize() * 2.0**exponent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("fmt", "spec"), [("bf16", None), ("fp8", None), ("nvfp4", None), ("nvfp4", RacSpec(0.5))])
def test_parts_of_a_token_with_its_amax_are_parts_of_the_token(fmt: str, spec: RacSpec | None, dtype: torch.dtype):
    x = (random(9, 64) * torch.logspace(-3, 3, 9).unsqueeze(-1)).to(dtype)
    x[:, 50] *= 20
    x[4] = 0
    mask = None if spec is None else torch.arange(64) % 32 < 16
    whole = quantize_activation(x, fmt, spec, mask)
    amax = x.float().abs().amax(-1, keepdim=True)
    assert torch.equal(activation_amax(x), amax)
    differs = False
    for part in (slice(0, 32), slice(32, 64)):
        own = None if mask is None else mask[part]
        got = quantize_activation(x[:, part], fmt, spec, own, amax)
        assert torch.equal(got.qs, whole.qs[:, part]) and torch.equal(got.rcp, whole.rcp)
        differs |= not torch.equal(quantize_activation(x[:, part], fmt, spec, own).qs, got.qs)
    assert differs == (fmt != "bf16")
    if fmt != "bf16":
        with pytest.raises(ValueError, match="given amax"):
            quantize_activation(x, fmt, spec, mask, amax / 2)
        with pytest.raises(ValueError, match=r"finite|infinity"):
            quantize_activation(x, fmt, spec, mask, amax + torch.inf)


def test_fp8_rows_with_the_amax_of_whole_rows():
    w = random(2, 24, 64) * torch.linspace(0.1, 3, 64)
    whole = quantize_weight(w, "fp8")
    for part in (slice(0, 32), slice(32, 64)):
        got = quantize_weight(w[..., part], "fp8", row_amax=weight_row_amax(w))
        assert torch.equal(got.qs, whole.qs[..., part]) and torch.equal(got.rcp, whole.rcp)
    with pytest.raises(ValueError, match="exceed the given amax"):
        quantize_weight(w, "fp8", row_amax=weight_row_amax(w[..., :32]))


# GEMM


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("spec", [None, *RAC])
def test_linear_is_the_product_of_the_dequantized_operands(fmt: str, spec: RacSpec | None):
    if spec is not None and fmt != "nvfp4":
        with pytest.raises(ValueError, match=f"got activation format '{fmt}'; drop rac"):
            quantize_activation(random(2, 64), fmt, spec, mask_for(spec))
        return
    a = quantize_activation(random(9, 64), fmt, spec, mask_for(spec))
    w = quantize_weight(random(24, 64, seed=1), fmt)
    bias = random(24, seed=2)
    y = emulated_linear(a, w, torch.float32, bias)
    a64, w64 = a.qs.double() * a.rcp.double(), w.qs.double() * w.rcp.double()
    scale = a64.abs() @ w64.abs().mT + bias.abs()
    assert ((y - (a64 @ w64.mT + bias)).abs() / scale).max() <= TOLERANCES["emulated_linear_fp32"].limit
    assert torch.equal(emulated_linear(a, w, torch.bfloat16, bias), y.bfloat16())
    stored = type(w)(w.qs.bfloat16(), w.rcp)
    assert torch.equal(emulated_linear(a, stored, torch.float32, bias), y)


@pytest.mark.parametrize("fmt", FORMATS)
def test_linear_over_experts(fmt: str):
    x, w = random(3, 5, 64), random(3, 24, 64, seed=1)
    y = emulated_linear(quantize_activation(x, fmt), quantize_weight(w, fmt), torch.float32)
    for expert in range(3):
        a = quantize_activation(x[expert], fmt)
        one = emulated_linear(a, quantize_weight(w[expert], fmt), torch.float32)
        assert torch.allclose(y[expert], one, rtol=1e-5, atol=1e-5)


# Errors


@pytest.mark.parametrize("quantize", [quantize_weight, quantize_activation])
def test_k_and_format_errors(quantize):
    with pytest.raises(ValueError, match=r"multiple of 16, got shape \(4, 24\); pad K"):
        quantize(torch.ones(4, 24), "nvfp4")
    with pytest.raises(ValueError, match="unknown number format 'int8'; known: bf16, fp8, nvfp4"):
        quantize(torch.ones(4, 16), "int8")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("fmt", FORMATS)
def test_non_finite_weight(fmt: str, bad: float):
    w = torch.ones(2, 4, 32)
    w[1, 2, 3] = bad
    with pytest.raises(ValueError, match=r"finite|infinity"):
        quantize_weight(w, fmt)
    if fmt == "nvfp4":
        with pytest.raises(ValueError, match="not finite"):
            quantize_weight(w, fmt, torch.full((2, 1, 1), 5.0))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
def test_non_finite_activation(fmt: str, bad: float):
    x = torch.ones(3, 32)
    x[1, 31] = bad
    with pytest.raises(ValueError, match=r"finite|infinity"):
        quantize_activation(x, fmt)


def test_check_finite_names_the_tensor():
    x = torch.ones(3, 5)
    check_finite(x, "layer.weight")
    check_finite(x[:0], "layer.weight")
    x[1, 1], x[2, 2] = torch.nan, -torch.inf
    with pytest.raises(ValueError, match=r"layer.weight is not finite: 2 of 15 elements of shape \(3, 5\)"):
        check_finite(x, "layer.weight")


def test_no_gradient_leaks():
    w = random(4, 32).requires_grad_()
    assert not fake_quantize_weight(w, "nvfp4").requires_grad
    assert not fake_quantize_activation(w, "nvfp4", RacSpec(0.5, mask="batch")).requires_grad
