# SPDX-License-Identifier: Apache-2.0
"""The engine's layers with packed weights: backend native (Triton's FP4 product) and cutlass (vLLM's ops).

    torch.ops.quads.fp4_linear        x [T, K], packed weight  ->  y [T, N] in x's dtype
    torch.ops.quads.fp4_expert_rows   x [T, D], rows sorted by expert  ->  y [R, D]: both GEMMs of gated SiLU experts

    packed weight   codes, scales, rcp    native   uint8 [(E,) N, K/2], uint8 [(E,) N, K/16], fp32 [(E,) N, 1]
                                          cutlass  the first two as `quads.kernels.cutlass.Weight` (padded, swizzled)

Which op serves what, and why: activations have one global scale per token. The Triton product multiplies it in its
epilogue (one rounding, the definition's), so it is backend native. vLLM's op has one alpha and a bf16 output, so there
the factors come after a rounding: backend cutlass, another name, never chosen by itself.
Activations are packed by `quads.kernels.native_quantize` for both. RAC multiplies a second operand over all K columns:
its cost is that of k = 100 %, whatever the mask.
Custom ops without host values (CUDA graphs, torch.compile) where a kernel packs the activations. NOT RUN on FP4 units;
in Triton's interpreter both are compared with the reference (cutlass: with a stand-in for vLLM's ops).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from quads.kernels.backend import _rac, define
from quads.numerics import nvfp4
from quads.numerics.packed import Packed
from quads.numerics.qdq import WeightQ


def layout(backend: str, p: Packed) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales, rcp fp32 [(E,) N, 1]) as `backend` stores them, from codes [(E,) N, K/2], row-major scales and
    p.gs fp32 [(E,) N, 1]. Shapes depend on the weight's shape only."""
    rcp = p.gs.reciprocal().expand(*p.codes.shape[:-1], 1).contiguous()
    if backend == "native":
        return p.codes.contiguous(), p.scales.contiguous(), rcp
    from quads.kernels import cutlass

    return (*cutlass.store(p.codes, p.scales, rcp.squeeze(-1))[:2], rcp)


def unpacked(backend: str, codes: Tensor, scales: Tensor, rcp: Tensor, inner: int) -> WeightQ:
    """Inverse of `layout`: qs fp32 [(E,) N, K = inner], rcp [(E,) N, 1]; what dumps and parity checks compare."""
    if backend == "cutlass":
        from quads.kernels import cutlass

        codes, scales, _ = cutlass.load(cutlass.Weight(codes, scales, rcp.squeeze(-1)), inner)
    return WeightQ(nvfp4.to_qs(nvfp4.NVFP4(nvfp4.unpack(codes), scales, rcp)), rcp)


def _product(t, weight: tuple[Tensor, Tensor, Tensor], offsets: Tensor | None, dtype, bias, backend: str) -> Tensor:
    """y of one GEMM; t: native_quantize.Terms, offsets for experts."""
    codes, scales, rcp = weight
    if backend == "cutlass":
        from quads.kernels import cutlass

        w = cutlass.Weight(codes, scales, rcp.squeeze(-1))
        return cutlass.linear(t, w, dtype, bias) if offsets is None else cutlass.grouped(t, w, offsets, dtype)
    from quads.kernels import native

    p = native.Operand(codes, scales, rcp.squeeze(-1))
    if offsets is None:
        return native.linear(t.first, p, dtype, t.second, bias)
    return native.grouped(t.first, p, offsets, dtype, t.second)


def _linear(x, codes, scales, rcp, mask, bias, rac: str, backend: str) -> Tensor:
    from quads.kernels.native_quantize import pack_terms

    return _product(pack_terms(x, _rac(rac), mask), (codes, scales, rcp), None, x.dtype, bias, backend)


def _linear_shape(x, codes, scales, rcp, mask, bias, rac, backend):
    return x.new_empty(x.shape[0], rcp.shape[0])


def _expert_rows(x, token, offsets, c13, s13, r13, c2, s2, r2, mask13, mask2, rac: str, backend: str) -> Tensor:
    from quads.kernels.native_quantize import pack_terms

    spec = _rac(rac)
    t = pack_terms(x, spec, mask13).rows(token)
    gate, up = _product(t, (c13, s13, r13), offsets, x.dtype, None, backend).chunk(2, dim=-1)
    return _product(pack_terms(silu(gate) * up, spec, mask2), (c2, s2, r2), offsets, x.dtype, None, backend)


def _expert_rows_shape(x, token, offsets, c13, s13, r13, c2, s2, r2, mask13, mask2, rac, backend):
    return x.new_empty((x if token is None else token).shape[0], r2.shape[1])


define({
    "fp4_linear": (
        "(Tensor x, Tensor codes, Tensor scales, Tensor rcp, Tensor? mask, Tensor? bias, str rac, str backend) "
        "-> Tensor",
        _linear,
        _linear_shape,
    ),
    "fp4_expert_rows": (
        "(Tensor x, Tensor? token, Tensor offsets, Tensor c13, Tensor s13, Tensor r13, Tensor c2, Tensor s2, "
        "Tensor r2, Tensor? mask13, Tensor? mask2, str rac, str backend) -> Tensor",
        _expert_rows,
        _expert_rows_shape,
    ),
})  # fmt: skip


def linear(
    x: Tensor, weight: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, bias: Tensor | None, rac: str, backend: str
) -> Tensor:
    """y [..., N] of x [..., K]; weight (codes, scales, rcp [N, 1]) of `layout`; any leading shape, empty included.

    mask: bool [K] when rac (`backend.rac_code`) is static; bias [N]. Errors as `native_quantize.pack_terms` and the
    backend's product.
    """
    y = torch.ops.quads.fp4_linear(x.reshape(-1, x.shape[-1]), *weight, mask, bias, rac, backend)
    return y.view(*x.shape[:-1], weight[2].shape[0])


def expert_rows(
    x: Tensor,
    token: Tensor | None,
    offsets: Tensor,
    w13: tuple[Tensor, Tensor, Tensor],
    w2: tuple[Tensor, Tensor, Tensor],
    masks: tuple[Tensor | None, Tensor | None],
    rac: str,
    backend: str,
) -> Tensor:
    """y [R, D] of gated SiLU experts, R rows sorted by expert: row r works on x[token[r]], or on x[r] without token.

    w13, w2 (codes, scales, rcp) of [E, 2F, D] and [E, D, F]; offsets int32 [E + 1] on the device. Rows from offsets[E]
    on have no expert and undefined results; there must be none when activations are packed by torch.
    """
    return torch.ops.quads.fp4_expert_rows(x, token, offsets, *w13, *w2, *masks, rac, backend)
