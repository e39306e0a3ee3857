# SPDX-License-Identifier: Apache-2.0
"""The variants that `quads.bench.block_variants` times: every shape of the launch is exact, settings are put back."""

from __future__ import annotations

import pytest
from kernel_cases import assert_bytes, hard, poison

from quads import numerics
from quads.bench import block_variants
from quads.bench.protocol import Measured
from quads.kernels import weight
from quads.layers import grouped


@pytest.mark.parametrize("name", block_variants.KERNELS)
def test_every_shape_is_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two matrices with a masked tail: one and a bit tiles of the smallest shape."""
    monkeypatch.setattr(weight, "FUSED_EXPERTS", 1)
    w = hard(2, 33, 128)
    with poison(), block_variants.applied(block_variants.KERNELS[name], None):
        got = weight.fake_quantize_weight(w, "nvfp4")
    assert_bytes(got, numerics.fake_quantize_weight(w, "nvfp4"))


def test_settings_are_put_back() -> None:
    before = weight.FUSED, grouped.BESIDE
    with pytest.raises(RuntimeError), block_variants.applied(block_variants.KERNELS["paired"], 16):
        assert weight.FUSED.paired and grouped.BESIDE == 16
        raise RuntimeError
    assert (weight.FUSED, grouped.BESIDE) == before


def row(group: str, name: str, us: float | None) -> Measured:
    return Measured(group, name, us, None, None, None, "", 1, {})


def test_the_fastest_kernel_is_exact_on_both_weights() -> None:
    rows = [row("a", "copy", 1.0), row("a", "apart", 9.0), row("a", "paired", 5.0), row("a", "paired, lag 2", 2.0)]
    rows += [row("b", "copy", 1.0), row("b", "apart", 6.0), row("b", "paired", 6.0), row("b", "paired, lag 2", None)]
    assert block_variants.fastest_kernel(rows) == "paired"


def test_the_tree_is_timed_once_and_marked() -> None:
    found = block_variants.block_variants("paired")
    idle = len(block_variants.IDLE_SMS) + len(block_variants.IDLE_SMS_APART)
    assert len(found) == len(set(found.values())) == 2 + idle
    assert [settings for name, settings in found.items() if name.endswith("(tree)")] == [(weight.FUSED, grouped.BESIDE)]
