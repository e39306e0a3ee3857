# SPDX-License-Identifier: Apache-2.0
"""Inputs and references of the GEMM kernel tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    """fp32 on DEVICE."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def wide_range(*shape: int, seed: int = 0) -> torch.Tensor:
    """Blocks of 16 columns whose magnitudes spread over 2^-8 .. 2^8: fp32 sums of their products must round."""
    x = gaussian(*shape, seed=seed)
    exponent = torch.randint(-8, 9, (shape[-1] // 16,), generator=torch.Generator().manual_seed(seed + 1))
    return x * torch.exp2(exponent.float()).repeat_interleave(16).to(DEVICE)


def exact(first, second, rcp, w_qs, w_rcp) -> torch.Tensor:
    """float64 [T, N]: the definition without any rounding; second may be None; w_rcp [N, 1]."""
    a = first.double() if second is None else first.double() + second.double()
    return (a @ w_qs.double().mT) * rcp.double() * w_rcp.double().mT


def relative_error(y: torch.Tensor, first, second, rcp, w_qs, w_rcp) -> float:
    """max |y - exact| / (sum of magnitudes of the products): fp32 accumulation alone stays near 1e-7."""
    a = first.double().abs() if second is None else first.double().abs() + second.double().abs()
    scale = (a @ w_qs.double().abs().mT) * rcp.double() * w_rcp.double().mT
    difference = (y.double() - exact(first, second, rcp, w_qs, w_rcp)).abs()
    return float((difference / scale.clamp(min=1e-300)).max())


@contextmanager
def poison() -> Iterator[None]:
    """Fill every torch.empty with NaN: an output element that a kernel does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
