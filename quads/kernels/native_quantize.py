# SPDX-License-Identifier: Apache-2.0
"""NVFP4 activations as packed operands of the FP4 GEMMs: both passes in natural block order, one read of x.

    pack_terms   x [T, K] -> Terms(first, second)    operands of codes uint8 [T, K/2], scales uint8 [T, K/16], rcp [T]
                 second: codes and scales of the residual where the mask selects, zero elsewhere; None without RAC
    rcp = 1 / gs, one global scale per token, shared by both passes

Bit-equal to `quads.numerics.packed.pack_rac(..., layout="in_place")`, and for masks that cut blocks to the same with
the residual masked by channel. A program holds whole rows. A static mask is read by the kernel, element by element,
at its address: one that is overwritten in place reaches a captured CUDA graph.

Cost of RAC: the second operand spans all K columns whatever the mask selects, so its quantization, its bytes and its
product are those of k = 100 %. `rac_quantize.pack_rac` writes only the selected blocks, but from a list that the host
reads, and the weight would have to be permuted at every mask update.
Differs from `terms`: packed codes instead of bf16 values. vLLM's `scaled_fp4_quant` is not used: one global scale a
call, no second pass, approximate reciprocals (other bits than the trainer's). Batch masks, and token masks by channel,
are quantized by torch, whose finite check waits for the GPU. Non-finite rows give NaN in the kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.kernels.activation import pack_activation
from quads.kernels.backend import without_kernel
from quads.kernels.blocks import global_scale, load_block
from quads.kernels.encode import LAUNCH
from quads.kernels.host import power_of_two, prepared
from quads.kernels.native import Operand
from quads.kernels.rac_quantize import _pass, _residual_amax, _residuals, _row_amax, _spread
from quads.kernels.terms import LANES, TILE, _selected
from quads.numerics import nvfp4
from quads.numerics.formats import BLOCK
from quads.numerics.qdq import activation_residual
from quads.numerics.rac import RacSpec, residual_mask, units_selected


class Terms(NamedTuple):
    """A quantized activation as packed operands; second has the first's rcp, None without RAC."""

    first: Operand
    second: Operand | None

    def rows(self, index: Tensor | None) -> Terms:
        """The rows `index` int64 [R] of both (None: as they are); plain gathers of packed bytes."""
        if index is None:
            return self
        return Terms(*(None if p is None else Operand(*(part[index] for part in p)) for p in self))  # type: ignore[arg-type]


@triton.jit
def _kernel(
    x_ptr, c1_ptr, s1_ptr, c2_ptr, s2_ptr, mask_ptr, rcp_ptr, rows, groups, selected,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, STATIC: tl.constexpr, ABSOLUTE: tl.constexpr, BF16: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows of WIDTH >= groups blocks."""
    NB: tl.constexpr = ROWS * WIDTH
    lane = tl.arange(0, NB)
    row = tl.program_id(0) * ROWS + lane // WIDTH
    column = lane % WIDTH
    inside = (row < rows) & (column < groups)
    block = row.to(tl.int64) * groups + column
    lo0, hi0, lo1, hi1, amax = load_block(x_ptr, block, inside, NB, BF16, False, "evict_first")
    x = (lo0, hi0, lo1, hi1)
    row_gs = global_scale(_row_amax(amax, ROWS, WIDTH).to(tl.float32, bitcast=True))
    row_rcp = tl.div_rn(1.0, row_gs)
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(rcp_ptr + own, row_rcp, mask=own < rows)
    gs, rcp = _spread(row_gs, ROWS, WIDTH), _spread(row_rcp, ROWS, WIDTH)
    v, t = _pass(x, amax, gs, rcp, c1_ptr, s1_ptr, block, inside, NB)
    r = _residuals(x, v, t)
    r = _selected(r, mask_ptr, column, inside, selected, ROWS, WIDTH, STATIC, ABSOLUTE)
    _pass(r, _residual_amax(r), gs, rcp, c2_ptr, s2_ptr, block, inside, NB)


def _operand(nv: nvfp4.NVFP4) -> Operand:
    return Operand(nvfp4.pack(nv.codes), nv.scales.contiguous(), nv.gs.reciprocal().reshape(-1))


@torch.no_grad()
def torch_terms(x: Tensor, rac: RacSpec | None = None, static_mask: Tensor | None = None) -> Terms:
    """The definition in plain torch, any mask and granularity. Errors as `quads.numerics.quantize_activation`."""
    gs = nvfp4.global_scale(x.float().abs().amax(-1, keepdim=True))
    first = _operand(nvfp4.quantize(x, gs))
    if rac is None:
        return Terms(first, None)
    residual = activation_residual(x)
    mask = residual_mask(residual, rac, static_mask)
    return Terms(first, _operand(nvfp4.quantize(residual.masked_fill(~mask, 0.0), gs)))


@torch.no_grad()
def pack_terms(x: Tensor, rac: RacSpec | None = None, static_mask: Tensor | None = None) -> Terms:
    """Both passes of x [T, K] as packed operands (module docstring); by torch where no kernel selects with this mask.

    Raises ValueError for a missing or misshaped static mask, K % 16 != 0, a dtype without kernel, a CPU tensor.
    """
    if without_kernel(rac):
        return torch_terms(x.contiguous(), rac, static_mask)
    if rac is None:
        p = pack_activation(x)
        return Terms(Operand(p.codes, p.scales, p.gs.reciprocal().reshape(-1)), None)
    flat = prepared(x, "pack_terms")
    rows, groups = x.shape[0], x.shape[1] // BLOCK
    static = rac.mask == "static"
    mask = residual_mask(x, rac, static_mask).contiguous().view(torch.uint8) if static else flat
    c1, s1, c2, s2 = (
        torch.empty(rows, n, dtype=torch.uint8, device=x.device) for n in (8 * groups, groups, 8 * groups, groups)
    )
    rcp = torch.empty(rows, dtype=torch.float32, device=x.device)
    width = power_of_two(groups)
    per = max(1, TILE // width)
    if rows:
        _kernel[(triton.cdiv(rows, per),)](
            flat, c1, s1, c2, s2, mask, rcp, rows, groups, units_selected(groups, rac.k), ROWS=per, WIDTH=width,
            STATIC=static, ABSOLUTE=rac.score == "abs", BF16=flat.dtype == torch.bfloat16,
            num_warps=max(1, min(8, per * width // (32 * LANES))), **LAUNCH,
        )  # fmt: skip
    return Terms(Operand(c1, s1, rcp), Operand(c2, s2, rcp))
