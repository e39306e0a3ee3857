"""Scale swizzle against the address formula, byte by byte, and as a round trip."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quads.numerics import swizzle

LAYOUTS = ("128x4", "8x4")


def address(m: int, g: int, groups: int, layout: str) -> int:
    """Offset of scale (m, g), from the layout's definition."""
    tiles = -(-groups // 4)
    if layout == "128x4":
        return ((m // 128) * tiles + g // 4) * 512 + (m % 32) * 16 + (m // 32 % 4) * 4 + g % 4
    return ((m // 8) * tiles + g // 4) * 32 + (m % 8) * 4 + g % 4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (32, 3), (128, 4), (130, 6), (257, 9)])
def test_every_byte_is_where_the_formula_says(layout: str, rows: int, groups: int):
    scales = torch.randint(1, 256, (rows, groups), dtype=torch.uint8, generator=torch.Generator().manual_seed(rows))
    swizzled = swizzle.swizzle(scales, layout).flatten()
    used = {address(m, g, groups, layout): int(scales[m, g]) for m in range(rows) for g in range(groups)}
    assert {a: int(swizzled[a]) for a in used} == used
    padding = [a for a in range(swizzled.numel()) if a not in used]
    assert not swizzled[padding].any()


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300), st.integers(1, 12), st.sampled_from(LAYOUTS))
def test_round_trip_with_leading_dims(rows: int, groups: int, layout: str):
    scales = torch.randint(0, 256, (2, rows, groups), dtype=torch.uint8)
    swizzled = swizzle.swizzle(scales, layout)
    assert swizzled.shape[-2:] == swizzle.swizzled_shape(rows, groups, layout)
    assert torch.equal(swizzle.unswizzle(swizzled, rows, groups, layout), scales)
    assert torch.equal(swizzle.swizzle(scales[1], layout), swizzled[1])


def test_errors():
    with pytest.raises(ValueError, match="unknown scale layout '32x4'; known: 128x4, 8x4"):
        swizzle.swizzle(torch.zeros(1, 1, dtype=torch.uint8), "32x4")
    with pytest.raises(ValueError, match=r"occupy 128 x 4 bytes, got shape \(64, 4\)"):
        swizzle.unswizzle(torch.zeros(64, 4, dtype=torch.uint8), 60, 3)
