# SPDX-License-Identifier: Apache-2.0
"""Inputs of the quantizer kernel tests: golden vectors, hard random tensors, byte comparison.

Import before quads.kernels (through gemm_cases it turns Triton's interpreter on where there is no GPU).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gemm_cases import DEVICE, poison

VECTORS = Path(__file__).resolve().parent.parent / "vectors"
__all__ = ["DEVICE", "VECTORS", "assert_bytes", "assert_same", "hard", "load", "poison"]


def load(path: Path) -> dict[str, torch.Tensor]:
    """Arrays of a vector file on DEVICE; bf16 patterns become bfloat16."""
    with np.load(path, allow_pickle=False) as npz:
        arrays = {name: np.asarray(npz[name]) for name in npz.files}
    found = {}
    for name, array in arrays.items():
        if name.endswith("_bf16") and array.dtype == np.uint16:
            found[name] = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(DEVICE)
        else:
            found[name] = torch.from_numpy(array).to(DEVICE)
    return found


def bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """bool [count] of a packbits mask."""
    return torch.from_numpy(np.unpackbits(packed.cpu().numpy())[:count].astype(bool)).to(DEVICE)


def hard(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Rows of every kind in turn: Gaussian, exact ties, outliers, all zero, tiny, huge, block scales over 2^-20 .. 1.

    Elements are signed, with some zeros and negative zeros; tiny rows hold subnormal block scales.
    """
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g)
    rows = x.view(-1, shape[-1])
    grid = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.5, 1.0, -0.0, 0.0])
    for i, row in enumerate(rows):
        kind = i % 7
        if kind == 1:
            row.copy_(grid[torch.randint(0, len(grid), row.shape, generator=g)] * row.sign() * 2.0 ** (i % 5))
        elif kind == 2:
            row[:: max(1, row.numel() // 3)] *= 300
        elif kind == 3:
            row.zero_()
            row[::2] = -0.0
        elif kind == 4:
            row.mul_(1e-20)
        elif kind == 5:
            row.mul_(1e30)
        elif kind == 6:
            row.mul_(torch.exp2(-torch.randint(0, 20, (row.numel() // 16,), generator=g).float()).repeat_interleave(16))
    return x.to(dtype).to(DEVICE)


def assert_bytes(got: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Same shape, dtype and bytes: the sign of zero counts."""
    assert got.shape == expected.shape and got.dtype == expected.dtype, (what, got.shape, got.dtype, expected.shape)
    fresh = torch.contiguous_format  # a new tensor even for one element of stride 0, which has no byte view
    a, b = (t.clone(memory_format=fresh).view(-1).view(torch.uint8) for t in (got, expected.to(got.device)))
    different = (a != b).nonzero()
    assert not len(different), f"{what}: {len(different)} of {len(a)} bytes differ, first at byte {int(different[0])}"


def assert_same(got: tuple, expected: tuple, what: str = "") -> None:
    """`assert_bytes` over (nested) named tuples."""
    for name, g, e in zip(got._fields, got, expected, strict=True):
        if isinstance(g, torch.Tensor):
            assert_bytes(g, e, f"{what} {name}")
        else:
            assert_same(g, e, f"{what} {name}")
