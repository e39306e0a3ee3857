# SPDX-License-Identifier: Apache-2.0
"""FP8 E4M3 quantization at four granularities, bit for bit as vLLM and verl compute it.

    per tensor   s = RN(amax / 448)                             q = E4M3(x * RN(1 / s))
    per token    s = max(RN(amax / 448), 1 / (448 * 512))       q = E4M3(RN(x / s))          one s per row
    per group    s = RN(max(amax, 1e-10) / 448)                 q = E4M3(RN(x / s))          1 x 128 along K
    per block    s = RN(max(amax, 1e-10) / 448)                 q = E4M3(w * RN(1 / s))      128 x 128 of a weight

Shapes: x [..., K] or w [..., N, K] in any float dtype, computed in fp32; values ~ q * scale. Edge groups and
blocks are smaller (equivalent to zero padding): scale grids are ceil(K / 128) and [ceil(N / 128), ceil(K / 128)].
Source: vLLM csrc fp8 kernels and its Triton group kernel; verl's blockwise weight quantizer (Triton and torch paths).

Differs from the obvious: multiplying by a reciprocal and dividing are not the same bits, and each engine path has its
own; `variant` arguments name the path. An all-zero tensor gets per-tensor scale 1.0 (vLLM's 0 would decode to NaN).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from quads.numerics.formats import E4M3_MAX, divide, to_e4m3

GROUP = 128
VARIANTS = {"per_group": ("div", "vllm_triton"), "per_block": ("verl_triton", "verl_torch")}
_RCP_448 = float(torch.tensor(1.0) / E4M3_MAX)
_TOKEN_FLOOR = float(torch.tensor(1.0) / (E4M3_MAX * 512))
_GROUP_AMAX_FLOOR = 1e-10


class FP8(NamedTuple):
    """q float8_e4m3fn, shape of the input; scale fp32: per tensor [], token [..., 1], group or block a grid."""

    q: Tensor
    scale: Tensor


def _finite_amax(amax: Tensor, shape: torch.Size) -> Tensor:
    if not bool((amax < torch.inf).all()):
        raise ValueError(f"FP8 input of shape {tuple(shape)} holds NaN or infinity; quantize finite values only")
    return amax


def _check_variant(granularity: str, variant: str) -> None:
    if variant not in VARIANTS[granularity]:
        known = ", ".join(VARIANTS[granularity])
        raise ValueError(f"unknown FP8 {granularity} variant {variant!r}; known: {known}")


def per_tensor(x: Tensor, scale: Tensor | None = None) -> FP8:
    """One fp32 scale [] for the whole tensor; `scale` given = static quantization. Raises ValueError if not finite."""
    xf = x.to(torch.float32)
    amax = _finite_amax(xf.abs().amax(), x.shape)
    if scale is None:
        scale = torch.where(amax == 0, 1.0, divide(amax, E4M3_MAX))
    scale = scale.to(torch.float32)
    return FP8(to_e4m3(xf * scale.reciprocal()), scale)


def per_token(x: Tensor, amax: Tensor | None = None) -> FP8:
    """One scale per row: x [..., K] -> q [..., K], scale [..., 1].

    amax: fp32 [..., 1], of whole rows of which x holds a part of the columns (default: of x). Raises ValueError for a
    non-finite input and for an amax below x's own.
    """
    xf = x.to(torch.float32)
    own = _finite_amax(xf.abs().amax(-1, keepdim=True), x.shape)
    if amax is not None and not bool((own <= _finite_amax(amax, x.shape)).all()):
        raise ValueError(f"FP8 rows of shape {tuple(x.shape)} exceed the given amax; give the maximum of whole rows")
    scale = divide(own if amax is None else amax, E4M3_MAX).clamp_(min=_TOKEN_FLOOR)
    return FP8(to_e4m3(xf / scale), scale)


def per_group(x: Tensor, variant: Literal["div", "vllm_triton"] = "div") -> FP8:
    """1 x 128 groups: x [..., K] -> q [..., K], scale [..., ceil(K / 128)].

    variant: div = vLLM's CUDA kernel (amax / 448), vllm_triton = amax * RN(1 / 448). Raises ValueError if not finite.
    """
    _check_variant("per_group", variant)
    xf = x.to(torch.float32)
    groups = pad(xf, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    amax = _finite_amax(groups.abs().amax(-1), x.shape).clamp_(min=_GROUP_AMAX_FLOOR)
    scale = divide(amax, E4M3_MAX) if variant == "div" else amax * _RCP_448
    q = to_e4m3(groups / scale.unsqueeze(-1)).flatten(-2)[..., : x.shape[-1]]
    return FP8(q, scale)


def per_block(w: Tensor, variant: Literal["verl_triton", "verl_torch"] = "verl_triton") -> FP8:
    """128 x 128 blocks of a weight: w [..., N, K] -> q [..., N, K], scale [..., ceil(N / 128), ceil(K / 128)].

    variant: verl_triton computes s = amax / 448 and multiplies by RN(1 / s); verl_torch computes m = 448 / amax,
    multiplies by m and stores s = RN(1 / m). Raises ValueError for a non-finite input.
    """
    _check_variant("per_block", variant)
    rows, columns = w.shape[-2:]
    padded = pad(w.to(torch.float32), (0, -columns % GROUP, 0, -rows % GROUP))
    blocks = padded.unflatten(-1, (-1, GROUP)).unflatten(-3, (-1, GROUP))  # [..., n, 128, k, 128]
    amax = _finite_amax(blocks.abs().amax((-3, -1), keepdim=True), w.shape)
    if variant == "verl_triton":
        scale = divide(amax.clamp(min=_GROUP_AMAX_FLOOR), E4M3_MAX)
        multiplier = scale.reciprocal()
    else:
        multiplier = divide(E4M3_MAX, amax)
        multiplier = torch.where(torch.isinf(multiplier), 1.0, multiplier)
        scale = multiplier.reciprocal()
    q = to_e4m3((blocks * multiplier).flatten(-2).flatten(-3, -2))[..., :rows, :columns]
    return FP8(q, scale.squeeze(-1).squeeze(-2))


def dequantize(fp8: FP8) -> Tensor:
    """fp32 q * scale, same shape as q, for any of the granularities above.

    They are told apart by shape: a dim of the scale that is neither 1 nor q's own counts groups of 128 along it.
    """
    q, scale = fp8.q.to(torch.float32), fp8.scale
    if scale.ndim == q.ndim:
        if scale.shape[-1] > 1:
            scale = scale.repeat_interleave(GROUP, -1)[..., : q.shape[-1]]
        if q.ndim > 1 and 1 < scale.shape[-2] < q.shape[-2]:
            scale = scale.repeat_interleave(GROUP, -2)[..., : q.shape[-2], :]
    return q * scale
