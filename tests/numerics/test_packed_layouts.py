# SPDX-License-Identifier: Apache-2.0
"""Packed operands: what the bytes decode to, layouts, masks; golden bytes are compared in tests/kernels."""

from __future__ import annotations

import pytest
import torch

from quads.numerics import packed, qdq
from quads.numerics.nvfp4 import NVFP4, to_qs, unpack
from quads.numerics.rac import RacSpec, select
from quads.numerics.swizzle import unswizzle


def values(p: packed.Packed) -> torch.Tensor:
    return to_qs(NVFP4(unpack(p.codes), p.scales, p.gs))


def test_weight_bytes_decode_to_the_shared_path() -> None:
    w = torch.randn(3, 20, 48).to(torch.bfloat16)
    p = packed.pack_weight(w)
    assert torch.equal(values(p), qdq.quantize_weight(w, "nvfp4").qs)
    swizzled = packed.pack_weight(w, layout="128x4")
    assert torch.equal(unswizzle(swizzled.scales, 20, 3), p.scales) and torch.equal(swizzled.codes, p.codes)


def test_activation_bytes_decode_to_the_shared_path() -> None:
    x = torch.randn(5, 64)
    assert torch.equal(values(packed.pack_activation(x)), qdq.quantize_activation(x, "nvfp4").qs)


@pytest.mark.parametrize("mask", ["static", "token"])
def test_both_passes_add_up_to_the_shared_path(mask) -> None:
    x, spec = torch.randn(6, 96), RacSpec(0.3, mask=mask)
    static = select(torch.rand(96, dtype=torch.float64), spec) if mask == "static" else None
    expected = qdq.quantize_activation(x, "nvfp4", spec, static).qs
    p = packed.pack_rac(x, spec, static, layout="in_place")
    assert torch.equal(values(p.first) + values(p.second), expected)
    compact = packed.pack_rac(x, spec, static)
    assert compact.blocks.shape[-1] == 2 and compact.second.codes.shape == (6, 16)
    spread = torch.zeros(6, 6, 16)
    rows = compact.blocks.long().expand(6, 2)
    spread.scatter_(1, rows.unsqueeze(-1).expand(6, 2, 16), values(compact.second).view(6, 2, 16))
    assert torch.equal(values(compact.first) + spread.flatten(1), expected)


def test_errors() -> None:
    x = torch.randn(2, 32)
    with pytest.raises(ValueError, match="unknown layout"):
        packed.pack_activation(x, layout="8x4")
    with pytest.raises(ValueError, match="whole 16-blocks"):
        packed.pack_rac(x, RacSpec(0.5, "channel", "token"))
    with pytest.raises(ValueError, match="cuts one"):
        packed.rac_blocks(torch.arange(32) < 8)
