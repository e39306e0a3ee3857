# SPDX-License-Identifier: Apache-2.0
"""The engine's layers with packed weights (backends native and cutlass): against the reference, without a wait.

In Triton's interpreter; cutlass with a stand-in for vLLM's ops (fp4_cases). On FP4 units: marker blackwell, NOT RUN.
"""

from __future__ import annotations

import pytest
import torch
from fp4_cases import Recorder
from gemm_cases import DEVICE, gaussian, poison
from layer_cases import Layers, NoWait, close, inputs

from quads.kernels import backend, cutlass, native, native_layers  # imported during collection: interpreter
from quads.kernels.native_quantize import torch_terms
from quads.layers.weights import pack_rows, quantize_rows
from quads.numerics import nvfp4
from quads.numerics.rac import RacSpec

STATIC = RacSpec(0.5)
CASES = [None, STATIC, RacSpec(0.3, "channel"), RacSpec(0.5, mask="token")]
BY_TORCH = [RacSpec(0.5, mask="batch"), RacSpec(0.5, "channel", "token")]
BOTH = ["native", "cutlass"]
runs = pytest.mark.skipif(
    not native.INTERPRETED and native.unavailable() is not None, reason="needs FP4 units or Triton's interpreter"
)
pytestmark = runs


class PackedLayers(Layers):
    """The same layers with packed weights; qs and rcp stay for the reference, which for cutlass rounds twice."""

    def __init__(self, name: str, spec: RacSpec | None, **shapes: int) -> None:
        self.name, self.packed = name, {}
        super().__init__(("nvfp4", "nvfp4", spec), **shapes)

    def load(self, seed: int) -> None:
        super().load(seed)
        for i, (name, shape) in enumerate(self.shapes.items()):
            w = gaussian(*shape, seed=10 * seed + i) / 8
            parts = native_layers.layout(self.name, pack_rows(w, [shape[-2]], "fused", name))
            if name in self.packed:
                for old, new in zip(self.packed[name], parts, strict=True):
                    old.copy_(new)
            else:
                self.packed[name] = parts

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        return native_layers.linear(x, self.packed["w"], self.masks.get("w"), self.bias, self.code, self.name)

    def product(self, x: torch.Tensor, name: str, expert: int | None = None, bias=None) -> torch.Tensor:
        if self.name == "native":
            return super().product(x, name, expert, bias)
        own = slice(None) if expert is None else expert
        w_qs, w_rcp = self.qs[name][own].float(), self.rcp[name][own]
        t = torch_terms(x, self.spec, self.masks.get(name))
        total = torch.zeros(())
        for p in t if t.second else t[:1]:
            qs = nvfp4.to_qs(nvfp4.NVFP4(nvfp4.unpack(p.codes), p.scales, p.rcp))
            total = total.to(DEVICE) + (qs @ w_qs.mT).bfloat16().float()
        y = total * t.first.rcp[:, None] * w_rcp.mT
        return (y if bias is None else y + bias.float()).to(x.dtype)

    def expert_rows(self, x, token, offsets) -> torch.Tensor:
        masks = (self.masks.get("w13"), self.masks.get("w2"))
        return native_layers.expert_rows(
            x, token, offsets, self.packed["w13"], self.packed["w2"], masks, self.code, self.name
        )


@pytest.fixture(autouse=True)
def _ops(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    if native.INTERPRETED:
        monkeypatch.setattr(cutlass, "_ops", recorder)
    return recorder


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("spec", CASES, ids=str)
def test_against_a_loop(name, spec) -> None:
    """Experts that get no rows, experts held elsewhere, poisoned outputs; then other weights and masks in place."""
    layers = PackedLayers(name, spec)
    addresses = [t.data_ptr() for parts in layers.packed.values() for t in parts]
    for seed in (0, 3):
        if seed:
            layers.load(seed)
        given = inputs(13, seed=seed)
        expected = layers.reference(*given)
        with poison():
            close(layers.both(*given), expected)
    assert addresses == [t.data_ptr() for parts in layers.packed.values() for t in parts]


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("spec", [None, STATIC], ids=str)
@pytest.mark.parametrize("shapes", [dict(D=48, N=20, F=16, E=3), dict(D=80, N=132, F=48, E=5), dict(D=16, N=1, F=16)])
def test_odd_shapes(name, spec, shapes) -> None:
    layers = PackedLayers(name, spec, **shapes)
    given = inputs(5, shapes["D"], highest=5)
    close(layers.both(*given), layers.reference(*given))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("spec", BY_TORCH, ids=str)
def test_masks_without_a_kernel(name, spec) -> None:
    layers, (x, _, _) = PackedLayers(name, spec), inputs(7)
    close((layers.linear(x),), (layers.reference(x, *inputs(7)[1:])[0],))
    safe, reason = backend.graph_safe(name, "nvfp4", spec)
    assert not safe and "waits" in reason and backend.activation_kernel(name, "nvfp4", spec)[0] == "torch"
    with pytest.raises(AssertionError, match="is_nonzero"), NoWait():
        layers.linear(x)


@pytest.mark.parametrize("spec", CASES, ids=str)
def test_no_operation_waits(spec) -> None:
    """cutlass too, but its stand-in reads sizes on the host: the ops themselves are left out there."""
    assert all(backend.graph_safe(name, "nvfp4", spec)[0] for name in BOTH)
    given = inputs(6)
    layers = PackedLayers("native", spec)
    with NoWait():
        layers.both(*given)


def test_cutlass_schedule_without_a_wait() -> None:
    with NoWait():
        cutlass.group(torch.tensor([0, 3, 3, 5], dtype=torch.int32, device=DEVICE), 6, 128, 64)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("spec", CASES, ids=str)
def test_no_tokens(name, spec) -> None:
    layers = PackedLayers(name, spec)
    linear, experts = layers.both(*inputs(0))
    assert linear.shape == (0, 48) and experts.shape == (0, 64)
    assert layers.linear(inputs(0)[0].view(0, 3, 64)).shape == (0, 3, 48)


@pytest.mark.parametrize("name", BOTH)
def test_all_experts_elsewhere(name) -> None:
    x, ids, weights = inputs(4, lowest=5)
    assert not bool(PackedLayers(name, None).experts(x, ids, weights).any())


@pytest.mark.parametrize("name", BOTH)
def test_strided_inputs(name) -> None:
    layers = PackedLayers(name, STATIC)
    x, ids, weights = inputs(7)
    wide = torch.zeros(7, 160, dtype=x.dtype, device=DEVICE)
    wide[:, 3:67] = x
    expected = layers.both(x, ids, weights)
    got = layers.both(wide[:, 3:67], ids.T.contiguous().T, weights.T.contiguous().T)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("name", BOTH)
def test_compiled_without_a_break(name) -> None:
    """One graph for all token counts; weights and masks that change in place afterwards reach it."""
    layers = PackedLayers(name, STATIC)
    compiled = torch.compile(layers.both, fullgraph=True, dynamic=True, backend="eager")
    for tokens, seed in ((6, 1), (9, 2)):
        layers.load(seed)
        given = inputs(tokens, seed=seed)
        assert all(torch.equal(g, e) for g, e in zip(compiled(*given), layers.both(*given), strict=True))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("group", ["fused", "shard"])
@pytest.mark.parametrize("shape", [(40, 48), (3, 40, 64), (128, 64), (2, 130, 80)])
def test_stored_weight_is_the_quantized_one(name, group, shape) -> None:
    """Packed, padded, swizzled and back: what a dump shows is `quantize_rows`, bit for bit."""
    w = gaussian(*shape) * torch.exp2(torch.arange(shape[-2], device=DEVICE).float() / 16 - 4)[:, None]
    widths = [shape[-2] - 8, 8]
    parts = native_layers.layout(name, pack_rows(w, widths, group, "w"))
    expected = quantize_rows(w, "nvfp4", widths, group, "w")
    got = native_layers.unpacked(name, *parts, shape[-1])
    assert torch.equal(got.qs, expected.qs) and torch.equal(got.rcp, expected.rcp)
    assert torch.equal(got.dequantize(), expected.dequantize())
    assert sum(p.nbytes for p in parts[:2]) < 2 * w.numel() or shape[-2] < 128


def test_shard_scales_differ_by_row() -> None:
    """A fused linear with one scale per part: no single alpha could serve it."""
    w = gaussian(40, 64) * torch.tensor([1.0] * 32 + [8.0] * 8, device=DEVICE)[:, None]
    _, _, rcp = native_layers.layout("cutlass", pack_rows(w, [32, 8], "shard", "w"))
    assert rcp[0] != rcp[-1]


@pytest.mark.parametrize("name", BOTH)
def test_formats_without_an_fp4_product(name) -> None:
    assert backend.unsupported(name, "nvfp4", "nvfp4") is None
    for formats in (("bf16", "bf16"), ("fp8", "fp8"), ("nvfp4", "bf16")):
        assert "NVFP4 by NVFP4" in backend.unsupported(name, *formats)
    assert backend.unsupported("triton", "fp8", "fp8") is None


@pytest.mark.blackwell
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("spec", CASES, ids=str)
def test_on_hardware_and_in_a_graph(name, spec) -> None:
    """NOT RUN so far: layers against the loop, then captured and replayed with other weights and masks."""
    if name == "cutlass":
        from vllm import _custom_ops

        major, minor = torch.cuda.get_device_capability()
        cutlass.use(_custom_ops, 10 * major + minor)
    layers = PackedLayers(name, spec, D=256, N=384, F=128, E=5)
    static = [t.clone() for t in inputs(33, D=256)]
    close(layers.both(*static), layers.reference(*static))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers.both(*static)
    layers.load(1)
    graph.replay()
    torch.cuda.synchronize()
    close(captured, layers.reference(*static))
