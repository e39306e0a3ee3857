# SPDX-License-Identifier: Apache-2.0
"""The engine's layers with backend triton: no wait for the device, opaque to the compiler, exact in CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from gemm_cases import DEVICE, poison
from layer_cases import Layers, NoWait, close, inputs

from quads.kernels import backend, gemm, rac_gemm, terms  # imported during collection, where the interpreter is chosen
from quads.numerics.qdq import WeightQ, emulated_linear
from quads.numerics.rac import RacSpec

assert gemm and rac_gemm and terms
# (weight format, activation format, compensation), all that are graph-safe
CASES = [
    ("bf16", "bf16", None),
    ("nvfp4", "bf16", None),
    ("nvfp4", "nvfp4", None),
    ("nvfp4", "nvfp4", RacSpec(0.5)),
    ("nvfp4", "nvfp4", RacSpec(0.3, "channel")),
    ("nvfp4", "nvfp4", RacSpec(0.5, mask="token")),
    ("fp8", "fp8", None),
]
NOT_SAFE = [
    ("nvfp4", "nvfp4", RacSpec(0.5, mask="batch")),
    ("nvfp4", "nvfp4", RacSpec(0.5, "channel", "token")),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_a_loop(case) -> None:
    """Experts that get no rows, experts held elsewhere, poisoned outputs."""
    layers, given = Layers(case), inputs(13)
    expected = layers.reference(*given)
    with poison():
        close(layers.both(*given), expected)
    assert not bool(given[1].eq(3).any()) and bool(given[1].lt(0).any()) and bool(given[1].ge(5).any())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_operation_waits(case) -> None:
    assert backend.graph_safe("triton", case[1], case[2])[0]
    layers, given = Layers(case), inputs(6)
    with NoWait():
        layers.both(*given)


@pytest.mark.parametrize("case", NOT_SAFE, ids=str)
def test_what_waits_is_said(case) -> None:
    """`graph_safe` is false exactly where the kernel is torch, and that does wait: the mode of above sees it."""
    safe, reason = backend.graph_safe("triton", case[1], case[2])
    assert (safe, backend.activation_kernel("triton", case[1], case[2])[0]) == (False, "torch") and "waits" in reason
    layers, (x, _, _) = Layers(case), inputs(6)
    y = emulated_linear(layers.quantized(x, "w"), WeightQ(layers.qs["w"], layers.rcp["w"]), x.dtype, layers.bias)
    close((layers.linear(x),), (y,))
    with pytest.raises(AssertionError, match="is_nonzero"), NoWait():
        layers.linear(x)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_tokens(case) -> None:
    layers = Layers(case)
    x, ids, weights = inputs(0)
    linear, experts = layers.both(x, ids, weights)
    assert linear.shape == (0, 48) and experts.shape == (0, 64)
    assert layers.linear(x.view(0, 3, 64)).shape == (0, 3, 48)


def test_all_experts_elsewhere() -> None:
    layers = Layers(CASES[2])
    x, ids, weights = inputs(4, lowest=5)
    assert not bool(layers.experts(x, ids, weights).any())


@pytest.mark.parametrize("case", NOT_SAFE, ids=str)
def test_strided_inputs_quantized_by_torch(case) -> None:
    layers, (x, _, _) = Layers(case), inputs(7)
    assert torch.equal(layers.linear(x.T.contiguous().T), layers.linear(x))


def test_strided_inputs() -> None:
    layers = Layers(CASES[3])
    x, ids, weights = inputs(7)
    wide = torch.zeros(7, 160, dtype=x.dtype, device=DEVICE)
    wide[:, 3:67] = x
    expected = layers.both(x, ids, weights)
    got = layers.both(wide[:, 3:67], ids.T.contiguous().T, weights.T.contiguous().T)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))
    assert torch.equal(layers.linear(x.T.contiguous().T.unsqueeze(1)), expected[0].unsqueeze(1))


def test_a_mask_of_zeros_is_no_compensation() -> None:
    """What an engine runs before its masks arrive."""
    layers, given = Layers(CASES[3]), inputs(9)
    for mask in layers.masks.values():
        mask.zero_()
    plain = Layers(CASES[2])
    plain.qs, plain.rcp, plain.bias = layers.qs, layers.rcp, layers.bias
    close(layers.both(*given), plain.both(*given))


def test_compiled_without_a_break() -> None:
    """One graph for all token counts; weights and masks that change in place afterwards reach it."""
    layers = Layers(CASES[3])
    compiled = torch.compile(layers.both, fullgraph=True, dynamic=True, backend="eager")
    for tokens, seed in ((6, 1), (9, 2)):
        layers.load(seed)
        given = inputs(tokens, seed=seed)
        assert all(torch.equal(g, e) for g, e in zip(compiled(*given), layers.both(*given), strict=True))


def test_rac_code_round_trip() -> None:
    for spec in (None, RacSpec(0.1), RacSpec(1 / 3, "channel", "token", "abs")):
        assert backend._rac(backend.rac_code(spec)) == spec


def test_reference_is_never_graph_safe() -> None:
    safe, reason = backend.graph_safe("reference", "bf16", None)
    assert not safe and "host" in reason
    assert backend.activation_kernel("reference", "nvfp4", None)[0] == "torch"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuda_graph(case, tokens: int) -> None:
    """Replay after new inputs, weights and masks is bit-equal to eager; capture itself fails on any wait."""
    layers = Layers(case, D=256, N=384, F=128, E=5)
    static = [t.clone() for t in inputs(tokens, D=256)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            layers.both(*static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers.both(*static)
    seen = []
    for seed in (1, 2, 3):
        if seed > 1:
            layers.load(seed)
        for old, new in zip(static, inputs(tokens, D=256, seed=seed), strict=True):
            old.copy_(new)
        for out in captured:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        got = [out.clone() for out in captured]
        for g, e in zip(got, layers.both(*static), strict=True):
            assert torch.equal(g, e), seed
        close(tuple(got), layers.reference(*static))
        seen.append(got[0])
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    if layers.masks:  # the mask alone, with everything else unchanged
        for mask in layers.masks.values():
            mask.copy_(~mask)
        graph.replay()
        torch.cuda.synchronize()
        assert not torch.equal(captured[0], seen[2])
        assert all(torch.equal(g, e) for g, e in zip(captured, layers.both(*static), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_waits_on_a_gpu(case) -> None:
    layers, given = Layers(case), inputs(33)
    layers.both(*given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layers.both(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
