# SPDX-License-Identifier: Apache-2.0
"""quads.kernels.backend: reasons, and the engine's products with backend triton against the reference."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from gemm_cases import DEVICE, gaussian

from quads.kernels import backend, gemm, native, rac_gemm  # imported during collection, where the interpreter is chosen
from quads.kernels.encode import INTERPRETED
from quads.numerics.qdq import (
    ActivationQ,
    WeightQ,
    activation_amax,
    emulated_linear,
    quantize_activation,
    quantize_weight,
)
from quads.numerics.rac import RacSpec

assert gemm and rac_gemm
STATIC = RacSpec(0.5)
CASES = [("bf16", "nvfp4", None), ("fp8", "fp8", None), ("nvfp4", "nvfp4", None), ("nvfp4", "nvfp4", STATIC)]


def mask(k: int) -> torch.Tensor:
    return (torch.arange(k, device=DEVICE) // 16 % 2).bool()


@pytest.mark.parametrize(("activation", "weight", "rac"), CASES)
def test_linear_product(activation, weight, rac) -> None:
    x, w = gaussian(9, 96).bfloat16(), gaussian(40, 96, seed=7)
    wq = quantize_weight(w, weight)
    static = mask(96) if rac else None
    t = backend.operands(x, activation, rac, static)
    rcp = wq.rcp.expand(40, 1).contiguous()
    y = backend.linear_product(t, wq.qs.bfloat16(), rcp, torch.float32, gaussian(40, seed=3))
    expected = emulated_linear(
        quantize_activation(x, activation, rac, static), WeightQ(wq.qs, rcp), torch.float32, gaussian(40, seed=3)
    )
    assert torch.allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("activation", "weight", "rac"), CASES)
def test_grouped_product(activation, weight, rac) -> None:
    x, w = gaussian(11, 96).bfloat16(), gaussian(3, 40, 96, seed=7)
    wq = quantize_weight(w, weight)
    static = mask(96) if rac else None
    bounds = [0, 4, 4, 11]
    offsets = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    rcp = wq.rcp.expand(3, 40, 1).contiguous()
    t = backend.operands(x, activation, rac, static)
    y = backend.grouped_product(t, wq.qs.bfloat16(), rcp, offsets, torch.float32)
    a = quantize_activation(x, activation, rac, static)
    for e, (lo, hi) in enumerate(pairwise(bounds)):
        own = ActivationQ(a.qs[lo:hi], a.rcp[lo:hi])
        expected = emulated_linear(own, WeightQ(wq.qs[e], rcp[e]), torch.float32)
        assert torch.allclose(y[lo:hi], expected, rtol=1e-5, atol=1e-5)


def test_formats_are_part_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "unavailable", lambda *args: None)
    backend.require("native", torch.bfloat16, "cuda", ("nvfp4", "nvfp4"))
    with pytest.raises(RuntimeError, match=r"'cutlass' .*NVFP4 by NVFP4, not nvfp4 weights by bf16 activations"):
        backend.require("cutlass", torch.bfloat16, "cuda", ("nvfp4", "bf16"))


def test_reference_is_always_available() -> None:
    assert backend.unavailable("reference", torch.float32, "cpu") is None


def test_reasons() -> None:
    with pytest.raises(ValueError, match="known: reference, triton, native"):
        backend.unavailable("cuda")
    with pytest.raises(RuntimeError, match=r"backend 'triton' .*bfloat16"):
        backend.require("triton", torch.float32, DEVICE)
    for name in backend.PACKED if native.incapable() else ():
        with pytest.raises(RuntimeError, match=rf"backend '{name}' is not available here: .+; choose another") as said:
            backend.require(name, torch.bfloat16, DEVICE)
        assert "compute capability" in str(said.value) or "CUDA" in str(said.value)
    if not INTERPRETED:
        with pytest.raises(RuntimeError, match="CUDA device"):
            backend.require("triton", torch.bfloat16, "cpu")
    else:
        backend.require("triton", torch.bfloat16, "cpu")


@pytest.mark.parametrize(("activation", "weight", "rac"), CASES)
def test_partial_products_of_split_tokens_add_up(activation, weight, rac) -> None:
    """Two ranks with half of the channels each, given the tokens' amax: operands are slices, outputs add up."""
    x, w = gaussian(9, 96).bfloat16(), gaussian(40, 96, seed=7)
    x[:, -3] *= 30
    wq, static = quantize_weight(w, weight), mask(96) if rac else None
    rcp = wq.rcp.expand(40, 1).contiguous()
    whole = backend.operands(x, activation, rac, static)
    y = 0
    for part in (slice(0, 48), slice(48, 96)):
        own = None if static is None else static[part].contiguous()
        amax = None if activation == "bf16" else activation_amax(x)
        t = backend.operands(x[:, part], activation, rac, own, amax)
        assert torch.equal(t.first, whole.first[:, part]) and torch.equal(t.rcp, whole.rcp)
        y = y + backend.linear_product(t, wq.qs[:, part].bfloat16().contiguous(), rcp, torch.float32)
    expected = backend.linear_product(whole, wq.qs.bfloat16(), rcp, torch.float32)
    assert torch.allclose(y, expected, rtol=1e-5, atol=1e-4)


def test_a_token_mask_over_split_tokens_is_refused() -> None:
    x = gaussian(3, 32).bfloat16()
    with pytest.raises(ValueError, match="use static"):
        backend.operands(x, "nvfp4", RacSpec(0.5, mask="token"), None, activation_amax(x))
