# SPDX-License-Identifier: Apache-2.0
"""quads.kernels.activation, byte for byte against quads.numerics and the golden vectors; all outputs poisoned."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DEVICE, VECTORS, assert_bytes, assert_same, hard, load, poison

from quads import numerics
from quads.kernels import activation
from quads.numerics import packed, qdq

SHAPES = [(1, 16), (7, 48), (3, 320), (2, 5, 64), (32,)]
FILES = sorted(p.name for p in VECTORS.glob("nvfp4_*.npz"))


@pytest.fixture(autouse=True)
def _poison():
    with poison():
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_hard_values(shape, dtype) -> None:
    x = hard(*shape, dtype=dtype)
    got, expected = activation.quantize_activation(x, "nvfp4"), numerics.quantize_activation(x, "nvfp4")
    assert got.qs.dtype == torch.bfloat16
    assert_bytes(got.qs.float(), expected.qs)
    assert_bytes(got.rcp, expected.rcp)
    assert_bytes(activation.fake_quantize_activation(x, "nvfp4"), numerics.fake_quantize_activation(x, "nvfp4"))
    for layout in ("linear", "128x4")[: x.ndim]:
        assert_same(activation.pack_activation(x, None, layout), packed.pack_activation(x, None, layout), layout)


@pytest.mark.parametrize("layout", ["linear", "128x4"])
@pytest.mark.parametrize("per_row", [False, True])
def test_given_scales(per_row: bool, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "TILE", 8)
    for shape in ((1, 16), (9, 48), (2, 3, 272)):
        x = hard(*shape)
        gs = torch.rand(*shape[:-1], 1) * 500 + 1 if per_row else torch.tensor(300.0)
        gs = gs.to(DEVICE)
        assert_same(activation.pack_activation(x, gs, layout), packed.pack_activation(x, gs, layout))


@pytest.mark.parametrize("name", FILES)
def test_golden_vectors(name: str) -> None:
    v = load(VECTORS / name)
    x = v["x_bf16"] if "x_bf16" in v else v["x_f32"]
    got = activation.pack_activation(x, v["gs"])
    assert_bytes(got.codes, v["packed"])
    assert_bytes(got.scales, v["scale"])
    if "scale_swizzled_128x4" in v:
        swizzled = activation.pack_activation(x, v["gs"], "128x4").scales
        assert_bytes(swizzled.flatten(), v["scale_swizzled_128x4"].flatten())


def test_no_rows() -> None:
    x = torch.empty(0, 32, dtype=torch.bfloat16, device=DEVICE)
    assert activation.pack_activation(x).codes.shape == (0, 16)


@pytest.mark.parametrize("view", ["columns", "misaligned", "transposed"])
def test_other_layouts_are_copied(view: str) -> None:
    base = hard(64, 80)
    x = {
        "columns": base[:, 32:64],
        "misaligned": base.flatten()[3 : 3 + 5 * 48].view(5, 48),
        "transposed": base.mT,
    }[view]
    assert_same(activation.pack_activation(x), packed.pack_activation(x))


def test_non_finite_rows_get_nan_scales_alone() -> None:
    x = hard(5, 48)
    x[1, 3], x[3, 40] = torch.nan, -torch.inf
    got = activation.fake_quantize_activation(x, "nvfp4").isnan()
    assert got.all(-1).tolist() == [False, True, False, True, False] and not bool(got[[0, 2, 4]].any())
    scales = activation.pack_activation(x, torch.tensor(100.0, device=DEVICE)).scales
    assert ((scales & 0x7F) == 0x7F).nonzero().tolist() == [[1, 0], [3, 2]]


def test_refuses() -> None:
    x = hard(2, 32)
    with pytest.raises(ValueError, match="kernels exist for nvfp4"):
        activation.quantize_activation(x, "fp8")
    with pytest.raises(ValueError, match="use pack_rac"):
        activation.fake_quantize_activation(x, "nvfp4", numerics.RacSpec(0.5, mask="token"))
    with pytest.raises(ValueError, match="unknown layout"):
        activation.pack_activation(x, layout="4x128")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1000, 2048), (33, 768), (7, 16384), (4099, 48)])
def test_large(shape) -> None:
    x = (torch.randn(shape, device=DEVICE) * torch.exp2(torch.randn(shape[0], 1, device=DEVICE) * 4)).to(torch.bfloat16)
    assert_same(activation.pack_activation(x), packed.pack_activation(x))
    assert_same(activation.pack_activation(x, layout="128x4"), packed.pack_activation(x, layout="128x4"))
    gs = torch.tensor(2688.0, device=DEVICE) / x.abs().max().float()
    assert_same(activation.pack_activation(x, gs), packed.pack_activation(x, gs))
    assert_bytes(activation.fake_quantize_activation(x, "nvfp4"), numerics.fake_quantize_activation(x, "nvfp4"))


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    x = torch.zeros(2**20 + 2**17, 2048, dtype=torch.bfloat16, device=DEVICE)
    assert x.numel() > 2**31
    x[-8:] = torch.randn(8, 2048, device=DEVICE).to(torch.bfloat16)
    got, expected = activation.pack_activation(x), packed.pack_activation(x[-8:])
    assert_bytes(got.codes[-8:], expected.codes)
    assert_bytes(got.scales[-8:], expected.scales)


def test_amax_of_whole_tokens() -> None:
    """A part of the channels quantizes to that part of the quantized token, as in the definition."""
    x = hard(9, 64)
    amax = qdq.activation_amax(x)
    for part in (slice(0, 32), slice(32, 64)):
        got = activation.quantize_activation(x[:, part].contiguous(), "nvfp4", amax=amax)
        want = qdq.quantize_activation(x[:, part], "nvfp4", amax=amax)
        assert torch.equal(got.qs.float(), want.qs) and torch.equal(got.rcp, want.rcp)
