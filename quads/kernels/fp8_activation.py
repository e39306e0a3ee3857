# SPDX-License-Identifier: Apache-2.0
"""FP8 E4M3 activations on the GPU, one scale per token: the operand of backend triton's GEMMs in mode fp8.

    per_token   x [T, K] -> FP8(q bf16 [T, K], scale fp32 [T, 1])
                s = max(RN(amax / 448), floor),  q = E4M3(RN(x / s))

Bit-equal to `quads.numerics.fp8.per_token`, which says where the formula is from. A program holds whole rows: x is read
once, nothing waits for the GPU and nothing on the host depends on values, so that a CUDA graph can capture it.
Differs from the definition: q is stored as bf16 (every E4M3 value is one), amax cannot be given, and a row that is not
finite gets the scale NaN, hence NaN in its row of the product, where the definition raises ValueError.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.kernels.encode import HARDWARE, INFINITY_BITS, LAUNCH, MAGNITUDE_BITS, e4m3_decode, e4m3_encode
from quads.kernels.host import check_input, power_of_two
from quads.numerics.fp8 import FP8

E4M3_MAX = tl.constexpr(448.0)
TOKEN_FLOOR = tl.constexpr(4.359654212748865e-06)  # RN32(1 / (448 * 512)); the test compares it with the definition's
# Elements of a program; a longer row is a program of its own.
TILE = 2048


@triton.jit
def _per_token_kernel(
    x_ptr, q_ptr, scale_ptr, rows, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr, BF16: tl.constexpr
):
    """ROWS whole rows of WIDTH >= columns elements."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    if BF16:
        bits = tl.load(x_ptr.to(tl.pointer_type(tl.int16)) + place, mask=inside, other=0).to(tl.int32) << 16
    else:
        bits = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & MAGNITUDE_BITS
    amax = tl.max(magnitude, axis=1)  # of bit patterns: float maxima lose NaN
    scale = tl.maximum(tl.div_rn(amax.to(tl.float32, bitcast=True), E4M3_MAX), TOKEN_FLOOR)
    scale = tl.where(amax < INFINITY_BITS, scale, float("nan"))
    tl.store(scale_ptr + row, scale, mask=row < rows)
    spread = tl.broadcast_to(scale[:, None], (ROWS, WIDTH))
    byte = e4m3_encode(tl.div_rn(magnitude.to(tl.float32, bitcast=True), spread), HARDWARE)
    value = e4m3_decode(byte, HARDWARE).to(tl.int32, bitcast=True) | (bits & ~MAGNITUDE_BITS)
    tl.store(q_ptr.to(tl.pointer_type(tl.int16)) + place, (value >> 16).to(tl.int16), mask=inside)


@torch.no_grad()
def per_token(x: Tensor) -> FP8:
    """One scale per row of x [T, K], any strides; T may be 0. No wait for the GPU.

    Raises ValueError for a dtype without kernel and for a CPU tensor outside Triton's interpreter.
    """
    check_input(x, "fp8.per_token")
    x = x.contiguous()
    rows, columns = x.shape
    q = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    width = power_of_two(columns)
    per = max(1, TILE // width)
    if rows:
        _per_token_kernel[(triton.cdiv(rows, per),)](
            x, q, scale, rows, columns, ROWS=per, WIDTH=width, BF16=x.dtype == torch.bfloat16,
            num_warps=max(4, min(16, per * width // 1024)), **LAUNCH,
        )  # fmt: skip
    return FP8(q, scale)
