# SPDX-License-Identifier: Apache-2.0
"""Scale swizzle: the tiled order in which tensor cores read NVFP4 block scales.

    128x4   byte (m, g) -> tile (m / 128, g / 4), inside it  (m % 32) * 16 + (m / 32 % 4) * 4 + g % 4
    8x4     byte (m, g) -> tile (m / 8, g / 4),   inside it  (m % 8) * 4 + g % 4        (small-batch kernels, M <= 32)

Shapes: M rows, G = K / 16 scales per row; both are padded with zero bytes to whole tiles, tiles are stored row-major.
The swizzled bytes keep the padded shape [..., ceil(M), ceil(G)] although rows no longer mean rows.
Source: layout of the block-scaled MMA's scale factors (cuBLAS documentation); tests/vectors.

Differs from the obvious: in 128x4 the four rows 32 apart sit next to each other, not the rows 0..3.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn.functional import pad

Layout = Literal["128x4", "8x4"]
_COLUMNS = 4
_ROWS = {"128x4": 128, "8x4": 8}


def _tile_rows(layout: str) -> int:
    if layout not in _ROWS:
        raise ValueError(f"unknown scale layout {layout!r}; known: {', '.join(_ROWS)}")
    return _ROWS[layout]


def swizzled_shape(rows: int, groups: int, layout: Layout = "128x4") -> tuple[int, int]:
    """(rows, groups) rounded up to whole tiles."""
    tile = _tile_rows(layout)
    return -(-rows // tile) * tile, -(-groups // _COLUMNS) * _COLUMNS


def swizzle(scales: Tensor, layout: Layout = "128x4") -> Tensor:
    """scales uint8 [..., M, G] -> uint8 [..., ceil(M), ceil(G)] in tile order, padding bytes 0."""
    rows, groups = scales.shape[-2:]
    padded_rows, padded_groups = swizzled_shape(rows, groups, layout)
    padded = pad(scales, (0, padded_groups - groups, 0, padded_rows - rows))
    tiles = padded.unflatten(-1, (-1, _COLUMNS)).unflatten(-3, (-1, _tile_rows(layout)))  # [..., tm, rows, tg, 4]
    tiles = tiles.transpose(-3, -2)  # [..., tm, tg, rows, 4]
    if layout == "128x4":
        tiles = tiles.unflatten(-2, (4, 32)).transpose(-3, -2)  # row = 32 a + b  ->  stored as [b, a]
    return tiles.reshape(padded.shape)


def unswizzle(swizzled: Tensor, rows: int, groups: int, layout: Layout = "128x4") -> Tensor:
    """Inverse of `swizzle`: uint8 [..., ceil(M), ceil(G)] -> uint8 [..., M, G]. ValueError on another padded shape."""
    expected = swizzled_shape(rows, groups, layout)
    if tuple(swizzled.shape[-2:]) != expected:
        raise ValueError(
            f"{layout} scales of {rows} x {groups} occupy {expected[0]} x {expected[1]} bytes, "
            f"got shape {tuple(swizzled.shape)}"
        )
    tile = _tile_rows(layout)
    tiles = swizzled.reshape(*swizzled.shape[:-2], expected[0] // tile, expected[1] // _COLUMNS, tile, _COLUMNS)
    if layout == "128x4":
        tiles = tiles.unflatten(-2, (32, 4)).transpose(-3, -2).flatten(-3, -2)
    return tiles.transpose(-3, -2).reshape(*swizzled.shape[:-2], *expected)[..., :rows, :groups]
