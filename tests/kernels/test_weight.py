# SPDX-License-Identifier: Apache-2.0
"""quads.kernels.weight, byte for byte against quads.numerics and the golden vectors; all outputs poisoned."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, VECTORS, assert_bytes, assert_same, hard, load, poison

from quads import numerics
from quads.kernels import weight
from quads.numerics import nvfp4, packed

SHAPES = [(1, 16), (5, 48), (3, 7, 32), (9, 2, 64), (2, 3, 5, 16)]
FILES = sorted(p.name for p in VECTORS.glob("nvfp4_*.npz"))


@pytest.fixture(autouse=True)
def _poison():
    with poison():
        yield


def assert_weight(w: torch.Tensor, amax: torch.Tensor | None = None) -> None:
    assert_bytes(weight.fake_quantize_weight(w, "nvfp4", amax), numerics.fake_quantize_weight(w, "nvfp4", amax))
    got, expected = weight.quantize_weight(w, "nvfp4", amax), numerics.quantize_weight(w, "nvfp4", amax)
    assert got.qs.dtype == torch.bfloat16
    assert_bytes(got.qs.float(), expected.qs)
    assert_bytes(got.rcp, expected.rcp.expand_as(got.rcp))
    for layout in ("linear", "128x4"):
        assert_same(weight.pack_weight(w, amax, layout), packed.pack_weight(w, amax, layout), layout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_hard_values(shape, dtype) -> None:
    w = hard(*shape, dtype=dtype)
    assert_bytes(weight.weight_amax(w), numerics.weight_amax(w))
    assert_weight(w)


@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e-20, 1e20, 1e30])
def test_scales_beyond_the_shortcut(scale: float) -> None:
    """Global scales outside 2^-80 .. 2^80 take plain divisions; subnormal bf16 elements included."""
    w = hard(3, 4, 32)[:, :1].float() * scale
    assert_weight(w.clamp(-1e38, 1e38).to(torch.bfloat16))


def test_fp16() -> None:
    w = hard(2, 32).float().clamp(-6e4, 6e4).to(torch.float16)
    assert_weight(w)


@pytest.mark.parametrize("name", FILES)
def test_golden_vectors(name: str) -> None:
    v = load(VECTORS / name)
    if "x_bf16" not in v or v["x_bf16"].ndim != 2 or not torch.equal(v["gs"], nvfp4.global_scale(v["amax"])):
        pytest.skip("a weight is bf16 [N, K] with gs = 2688 / amax; this file is for activations")
    got = weight.pack_weight(v["x_bf16"])
    assert_bytes(got.codes, v.get("packed__verl_export", v["packed"]))
    assert_bytes(got.scales, v.get("scale__verl_export", v["scale"]))
    assert_bytes(got.gs.reshape(()), v["gs"].reshape(()))
    assert_weight(v["x_bf16"])


def test_golden_experts() -> None:
    v = load(VECTORS / "experts.npz")
    got = weight.pack_weight(v["w_bf16"])
    assert_bytes(got.codes, v["packed__verl_export"])
    assert_bytes(got.scales, v["scale__verl_export"])
    assert_bytes(got.gs.flatten(), v["gs"])
    swizzled = weight.pack_weight(v["w_bf16"], layout="128x4").scales
    assert_bytes(swizzled.flatten(), v["scale_swizzled_128x4__verl_export"].flatten())


def test_fused_group_shares_the_larger_amax() -> None:
    gate, up = hard(3, 2, 32), hard(3, 2, 32, seed=1)
    amax = torch.maximum(weight.weight_amax(gate), weight.weight_amax(up))
    for w in (gate, up):
        assert_weight(w, amax)
    assert_weight(gate, amax.max())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("experts", [1, 3, 11])
def test_both_schedules_with_many_tiles(experts: int, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles: masked tails, several tiles an expert; one launch equals two."""
    monkeypatch.setattr(weight, "TILE", 8)
    monkeypatch.setattr(weight, "AMAX_TILE", 64)
    monkeypatch.setattr(weight, "FUSED_BLOCKS", 8)
    monkeypatch.setattr(weight, "FUSED_TILE", 128)
    monkeypatch.setattr(weight, "FUSED_REPEAT", 2)
    monkeypatch.setattr(weight, "FUSED_EXPERTS", 1 if fused else 1000)
    w = hard(experts, 3, 80)
    assert_bytes(weight.fake_quantize_weight(w, "nvfp4"), numerics.fake_quantize_weight(w, "nvfp4"))
    assert_bytes(weight.weight_amax(w), numerics.weight_amax(w))


@pytest.mark.parametrize("view", ["transposed", "columns", "misaligned", "expanded"])
def test_other_layouts_are_copied(view: str) -> None:
    base = hard(4, 48, 64)
    w = {
        "transposed": base.mT,
        "columns": base[:, :, 16:48],
        "misaligned": base.flatten()[1 : 1 + 2 * 3 * 32].view(2, 3, 32),
        "expanded": base[:1].expand(3, 48, 64)[:, :4],
    }[view]
    assert_weight(w)


def test_non_finite_weights_become_nan_there_and_only_there() -> None:
    w = hard(9, 2, 32)
    w[3, 0, 5] = torch.inf
    w[6, 1, 0] = torch.nan
    got = weight.fake_quantize_weight(w, "nvfp4")
    bad = got.isnan().flatten(1)
    assert bool(bad[3].all() and bad[6].all()) and not bool(bad[[0, 1, 2, 4, 5, 7, 8]].any())
    assert bool(weight.weight_amax(w)[6].isnan().all())
    assert bool(weight.pack_weight(w).gs[[3, 6]].isnan().all())


def test_a_block_above_the_given_amax_becomes_nan() -> None:
    w = hard(1, 64).float().clamp(-1, 1).to(torch.bfloat16)
    w[0, 20] = 4.0
    got = weight.fake_quantize_weight(w, "nvfp4", torch.tensor(2.0, device=DEVICE)).isnan().view(-1, 16)
    assert got.all(-1).tolist() == [False, True, False, False] and not bool(got[[0, 2, 3]].any())


def test_refuses() -> None:
    w = hard(2, 32)
    for call in (weight.quantize_weight, weight.fake_quantize_weight):
        with pytest.raises(ValueError, match="kernels exist for nvfp4"):
            call(w, "fp8")
    with pytest.raises(ValueError, match="unknown layout"):
        weight.pack_weight(w, layout="8x4")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 768, 2048), (24, 96, 512)], ids=["large", "small"])
def test_large_and_repeatable(shape: tuple[int, ...]) -> None:
    """Many experts in flight: the one-launch schedule under real concurrency, twice, in a CUDA graph.

    "small" (3 tiles an expert, one launch fits the GPU) is for compute-sanitizer, where "large" takes long.
    """
    w = torch.randn(*shape, device=DEVICE).to(torch.bfloat16)
    w *= torch.exp2(torch.randn(len(w), 1, 1, device=DEVICE) * 3).to(torch.bfloat16)
    expected = numerics.fake_quantize_weight(w, "nvfp4")
    assert_bytes(weight.fake_quantize_weight(w, "nvfp4"), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = weight.fake_quantize_weight(w, "nvfp4")
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert_bytes(out, expected)


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """The last of 2^31 + elements: wrong with 32-bit offsets."""
    w = torch.zeros(140, 8192, 2048, dtype=torch.bfloat16, device=DEVICE)
    assert w.numel() > 2**31
    w[-1] = torch.randn(8192, 2048, device=DEVICE).to(torch.bfloat16)
    expected = numerics.fake_quantize_weight(w[-1], "nvfp4")
    assert_bytes(weight.fake_quantize_weight(w, "nvfp4")[-1], expected)
    assert_bytes(weight.pack_weight(w).codes[-1], packed.pack_weight(w[-1]).codes)


@pytest.mark.gpu
def test_no_memory_beyond_inputs_and_outputs() -> None:
    w = torch.randn(64, 768, 2048, device=DEVICE).to(torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = weight.fake_quantize_weight(w, "nvfp4")
    extra = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
    assert extra <= 0.01 * (w.numel() + out.numel()) * 2
