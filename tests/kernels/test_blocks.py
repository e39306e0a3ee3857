# SPDX-License-Identifier: Apache-2.0
"""Device functions of quads.kernels.blocks: the shared-divisor quotient exhaustively (GPU), layout helpers."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from kernel_cases import DEVICE

from quads.kernels import blocks
from quads.kernels.encode import INTERPRETED, LAUNCH
from quads.numerics.swizzle import swizzle


@triton.jit
def _quotients(differ_ptr, first, N: tl.constexpr):
    """Count significand pairs (x of 8 bits, d of 24 bits) whose shared quotient is not the IEEE one."""
    mantissa = first + tl.program_id(0) * N + tl.arange(0, N)
    d = (mantissa | 0x3F800000).to(tl.float32, bitcast=True)
    r = tl.div_rn(1.0, d)
    count = tl.zeros((N,), tl.int32)
    for i in range(128):
        x = ((i << 16) | 0x3F800000).to(tl.float32, bitcast=True)
        x = tl.zeros((N,), tl.float32) + x
        count += (blocks.divide_shared(x, d, r) != tl.div_rn(x, d)).to(tl.int32)
    tl.atomic_add(differ_ptr, tl.sum(count, axis=0))


@pytest.mark.gpu
def test_shared_divisor_quotient_is_ieee_for_every_significand() -> None:
    """Exhaustive: 2^7 significands of a bf16 dividend times 2^23 of an fp32 divisor; exponents only rescale."""
    differ = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    _quotients[(2**23 // 1024,)](differ, 0, N=1024, **LAUNCH)
    assert int(differ) == 0


@triton.jit
def _round_trip(x_ptr, y_ptr, NB: tl.constexpr):
    i = tl.arange(0, NB)[:, None] * 4 + tl.arange(0, 4)[None, :]
    x0, x1, x2, x3 = blocks.split4(tl.load(x_ptr + i), NB)
    row = tl.arange(0, NB)
    tl.store(y_ptr + row, x0)
    tl.store(y_ptr + NB + row, x1)
    tl.store(y_ptr + 2 * NB + row, x2)
    tl.store(y_ptr + 3 * NB + row, x3)


def test_split4_gives_columns() -> None:
    x = torch.arange(64, dtype=torch.int32, device=DEVICE).view(16, 4)
    y = torch.full((4, 16), -1, dtype=torch.int32, device=DEVICE)
    _round_trip[(1,)](x, y, NB=16)
    assert torch.equal(y, x.mT)


@triton.jit
def _swizzled(y_ptr, rows, groups, tiles, N: tl.constexpr):
    i = tl.arange(0, N)
    row = i // groups
    tl.store(y_ptr + blocks.swizzled(row, i % groups, tiles), (i % 251).to(tl.uint8), mask=row < rows)


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (128, 4), (130, 5), (257, 6)])
def test_swizzled_offsets(rows: int, groups: int) -> None:
    expected = swizzle((torch.arange(rows * groups) % 251).to(torch.uint8).view(rows, groups))
    y = torch.zeros(expected.numel(), dtype=torch.uint8, device=DEVICE)
    _swizzled[(1,)](y, rows, groups, -(-groups // 4), N=2048)
    assert torch.equal(y.cpu().view(expected.shape), expected)


@triton.jit
def _global_scale(x_ptr, y_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y_ptr + i, blocks.global_scale(tl.load(x_ptr + i)))


def test_global_scale() -> None:
    from quads.numerics.nvfp4 import global_scale

    amax = torch.tensor([0.0, 1.0, 3.1, 448.0, 1e-38, 1e-45, 3.3e38, 0.7], device=DEVICE)
    y = torch.empty_like(amax)
    _global_scale[(1,)](amax, y, N=8, **LAUNCH)
    assert torch.equal(y, global_scale(amax))
    bad = torch.tensor([torch.inf, torch.nan], device=DEVICE)
    y = torch.zeros_like(bad)
    _global_scale[(1,)](bad, y, N=2, **LAUNCH)
    assert bool(y.isnan().all())


def test_interpreter_never_takes_the_fma_shortcut() -> None:
    assert (DEVICE == "cpu") == INTERPRETED
