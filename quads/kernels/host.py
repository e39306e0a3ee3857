# SPDX-License-Identifier: Apache-2.0
"""What every kernel wrapper does on the host: refuse what it cannot compute, lay inputs out, size the grid.

Kernels read contiguous, 16-byte aligned tensors: anything else is copied first (`prepared`), which costs one more read
and write and is exact. Nothing here waits for the GPU. Non-finite data therefore raises nothing on the host: the
affected scales become NaN (byte 0x7F) and the decoded values NaN, where `quads.numerics` raises ValueError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quads.kernels.encode import INTERPRETED
from quads.numerics.formats import BLOCK
from quads.numerics.nvfp4 import check_k

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_MAX_GRID_Y = 65535


def require_nvfp4(fmt: str, what: str) -> None:
    """Raises ValueError for a format that has no kernel."""
    if fmt != "nvfp4":
        raise ValueError(f"{what}: kernels exist for nvfp4, got format {fmt!r}; use the reference backend for it")


def check_input(x: Tensor, what: str) -> None:
    """Raises ValueError for a CPU tensor (accepted only in Triton's interpreter) and for a dtype without kernel."""
    if x.device.type != "cuda" and not INTERPRETED:
        raise ValueError(f"{what}: Triton kernels need a CUDA tensor, got one on {x.device}; use the reference backend")
    if x.dtype not in FLOATS:
        raise ValueError(f"{what}: dtype {x.dtype} has no kernel; known: {', '.join(map(str, FLOATS))}")


def prepared(x: Tensor, what: str) -> Tensor:
    """x as the kernels need it: on a GPU, float, K % 16 == 0, contiguous, 16-byte aligned (copied if it is not).

    Raises ValueError naming what is wrong.
    """
    check_input(x, what)
    check_k(x.shape)
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def matrices(x: Tensor, what: str) -> tuple[int, int, int]:
    """(leading, rows, blocks per row) of [..., M, K]; raises ValueError when a grid cannot hold them."""
    rows, groups = (x.shape[-2] if x.ndim > 1 else 1), x.shape[-1] // BLOCK
    leading = x.numel() // max(1, rows * x.shape[-1])
    if leading > _MAX_GRID_Y or rows * groups >= 2**31 - 2**20:
        raise ValueError(f"{what}: shape {tuple(x.shape)} exceeds {_MAX_GRID_Y} matrices or 2^31 blocks each; split it")
    return leading, rows, groups


def power_of_two(n: int) -> int:
    """Smallest power of two >= n."""
    return 1 << max(0, n - 1).bit_length()
