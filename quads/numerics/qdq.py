# SPDX-License-Identifier: Apache-2.0
"""Quantize-dequantize: the one path that trainer and rollout share, so that both see the same bits.

    weight       w [..., N, K]  ->  WeightQ(qs [..., N, K], rcp)       w ~ qs * rcp
    activation   x [..., K]     ->  ActivationQ(qs [..., K], rcp)      x ~ qs * rcp;  with RAC qs = q1 s1 + q2 s2
    linear       y = ((a.qs @ w.qs^T in fp32) * a.rcp) * w.rcp + bias

Formats: bf16 (rounding only), fp8 (E4M3, one scale per output row or token), nvfp4 (weights: profile verl_export, one
global scale per leading index, that is per expert; activations: profile vllm_cuda, one global scale per token, shared
by the RAC pass, residual in fp32). Weights are first rounded to bf16, the dtype an engine receives and stores.
Shapes: T tokens, N outputs, K inputs, leading dims = experts.

`WeightQ.dequantize()` is *the* definition of the dequantized weight on both sides, hence a weight gap of exactly 0.
Differs from the obvious: an NVFP4 GEMM never sees dequantized operands. Rounding q*s/gs to bf16 before the product is
a different number; here the product runs on q*s (at most 6 significant bits, exact in bf16; a RAC sum q1 s1 + q2 s2
needs 23 bits, exact in fp32 only) and the global scales enter in the fp32 epilogue, as in the hardware.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from quads.numerics import fp8
from quads.numerics.formats import BLOCK
from quads.numerics.nvfp4 import PROFILES, check_k, global_scale, quantize_blocks
from quads.numerics.rac import RacSpec, residual_mask

Format = Literal["bf16", "fp8", "nvfp4"]
_FORMATS = ("bf16", "fp8", "nvfp4")
_WEIGHT, _ACTIVATION = PROFILES["verl_export"], PROFILES["vllm_cuda"]


class WeightQ(NamedTuple):
    """qs fp32 [..., N, K], exact in bf16 (cast it for storage at no loss); rcp fp32 [..., 1, 1] or [..., N, 1]."""

    qs: Tensor
    rcp: Tensor

    def dequantize(self) -> Tensor:
        """fp32 [..., N, K]: the dequantized weight."""
        return self.qs.to(torch.float32) * self.rcp


class ActivationQ(NamedTuple):
    """qs fp32 [..., K]; rcp fp32 [..., 1], one per token."""

    qs: Tensor
    rcp: Tensor

    def dequantize(self) -> Tensor:
        """fp32 [..., K]: the dequantized activation."""
        return self.qs * self.rcp


def check_finite(tensor: Tensor, name: str) -> None:
    """Raises ValueError naming the tensor when it holds NaN or infinity (one pass over it)."""
    if tensor.numel() == 0:
        return
    low, high = torch.aminmax(tensor)  # NaN wins both; one pass without a temporary
    if not bool((low > -torch.inf) & (high < torch.inf)):
        bad = tensor.numel() - int(torch.isfinite(tensor).sum())
        raise ValueError(
            f"{name} is not finite: {bad} of {tensor.numel()} elements of shape {tuple(tensor.shape)} are NaN or "
            f"infinity; stop and look at the step that produced it"
        )


def _unknown(fmt: str) -> ValueError:
    return ValueError(f"unknown number format {fmt!r}; known: {', '.join(_FORMATS)}")


@torch.no_grad()
def weight_amax(w: Tensor) -> Tensor:
    """fp32 [..., 1, 1]: largest magnitude of the bf16-rounded weight [..., N, K], one per leading index (expert).

    For a fused group (q/k/v, gate/up) pass the elementwise maximum over its members to `quantize_weight`.
    """
    # Rounding is monotonic, so the amax of the rounded weight is the rounded amax.
    return w.abs().amax((-2, -1), keepdim=True).to(torch.bfloat16).to(torch.float32)


@torch.no_grad()
def weight_row_amax(w: Tensor) -> Tensor:
    """fp32 [..., N, 1]: largest magnitude of every row of the bf16-rounded weight [..., N, K]."""
    return w.abs().amax(-1, keepdim=True).to(torch.bfloat16).to(torch.float32)


@torch.no_grad()
def activation_amax(x: Tensor) -> Tensor:
    """fp32 [..., 1]: largest magnitude of every row (token) of x [..., K], what fixes its scale."""
    return x.abs().amax(-1, keepdim=True).to(torch.float32)


@torch.no_grad()
def quantize_weight(w: Tensor, fmt: Format, amax: Tensor | None = None, row_amax: Tensor | None = None) -> WeightQ:
    """Quantize a weight [..., N, K] of any float dtype; nothing is shared between leading indices.

    amax: fp32 broadcastable to [..., 1, 1], only used by nvfp4, at least the weight's own (default: `weight_amax`).
    row_amax: fp32 [..., N, 1], only used by fp8, at least the rows' own (default: `weight_row_amax`).
    Raises ValueError for K % 16 != 0 (nvfp4), a non-finite weight, an amax that is too small, an unknown format.
    """
    stored = w.to(torch.bfloat16).to(torch.float32)
    if fmt == "nvfp4":
        return _nvfp4_weight(stored, amax)
    if fmt == "fp8":
        q, scale = fp8.per_token(stored, row_amax)
        return WeightQ(q.to(torch.float32), scale)
    if fmt == "bf16":
        check_finite(stored, "weight")
        return WeightQ(stored, stored.new_ones((*w.shape[:-2], 1, 1)))
    raise _unknown(fmt)


def _nvfp4_weight(stored: Tensor, amax: Tensor | None) -> WeightQ:
    check_k(stored.shape)
    blocks = stored.unflatten(-1, (-1, BLOCK))
    block_amax = blocks.abs().amax(-1)
    own_amax = block_amax.amax((-2, -1), keepdim=True)
    if amax is None:
        amax = own_amax
    elif not bool((own_amax <= amax).all()):  # False for NaN too
        raise ValueError(
            f"weight of shape {tuple(stored.shape)}: it is not finite or exceeds the given amax (it would saturate); "
            f"own amax up to {float(own_amax.max())}, given down to {float(amax.min())}; a fused group needs the "
            f"maximum over all its members"
        )
    gs = global_scale(amax)
    q, s = quantize_blocks(blocks, block_amax, gs, _WEIGHT)
    return WeightQ(q.mul_(s.unsqueeze(-1)).flatten(-2), gs.reciprocal())


@torch.no_grad()
def fake_quantize_weight(w: Tensor, fmt: Format, amax: Tensor | None = None) -> Tensor:
    """`quantize_weight(...).dequantize()` cast once to w.dtype; same shape. Errors as there. No gradient."""
    return quantize_weight(w, fmt, amax).dequantize().to(w.dtype)


@torch.no_grad()
def quantize_activation(
    x: Tensor,
    fmt: Format,
    rac: RacSpec | None = None,
    static_mask: Tensor | None = None,
    amax: Tensor | None = None,
) -> ActivationQ:
    """Quantize an activation [..., K] of any float dtype, each row (token) with its own scale.

    rac, static_mask: second pass over part of the residual, nvfp4 only (static_mask: bool [K] if rac.mask is static).
    amax: fp32 [..., 1] of whole tokens of which x holds a part of the channels (default: `activation_amax(x)`); with it
    the parts of a token quantize to the parts of the quantized token.
    Raises ValueError for K % 16 != 0 (nvfp4), non-finite rows or an amax below x's own (nvfp4, fp8), rac with another
    format, unknown format.
    """
    if rac is not None and fmt != "nvfp4":
        raise ValueError(f"RAC compensates the NVFP4 activation error, got activation format {fmt!r}; drop rac")
    if fmt == "nvfp4":
        return _nvfp4_activation(x, rac, static_mask, amax)
    if fmt == "fp8":
        q, scale = fp8.per_token(x, amax)
        return ActivationQ(q.to(torch.float32), scale)
    if fmt == "bf16":
        qs = x.to(torch.float32)
        return ActivationQ(qs, qs.new_ones((*x.shape[:-1], 1)))
    raise _unknown(fmt)


def _first_pass(x: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [..., K] -> blocks fp32 [..., G, 16], its q of the same shape, s [..., G, 1], gs [..., 1] (one per token)."""
    check_k(x.shape)
    blocks = x.to(torch.float32).unflatten(-1, (-1, BLOCK))
    block_amax = blocks.abs().amax(-1)
    own_amax = block_amax.amax(-1, keepdim=True)
    if amax is not None and not bool((own_amax <= amax).all()):  # False for NaN too
        raise ValueError(
            f"activation of shape {tuple(x.shape)}: a row is not finite or exceeds the given amax (it would saturate); "
            f"give the maximum over whole tokens"
        )
    gs = global_scale(own_amax if amax is None else amax)
    q, s = quantize_blocks(blocks, block_amax, gs, _ACTIVATION)
    return blocks, q, s.unsqueeze(-1), gs


def _residual_blocks(blocks: Tensor, q: Tensor, s: Tensor, gs: Tensor) -> Tensor:
    return blocks - q * _ACTIVATION.decode(s, gs.unsqueeze(-1))


def _nvfp4_activation(x: Tensor, rac: RacSpec | None, static_mask: Tensor | None, amax: Tensor | None) -> ActivationQ:
    blocks, q, s, gs = _first_pass(x, amax)
    if rac is None:
        return ActivationQ(q.mul_(s).flatten(-2), gs.reciprocal())
    residual = _residual_blocks(blocks, q, s, gs)
    mask = residual_mask(residual.flatten(-2), rac, static_mask)
    residual.masked_fill_(~mask.unflatten(-1, (-1, BLOCK)), 0.0)
    q2, s2 = quantize_blocks(residual, residual.abs().amax(-1), gs, _ACTIVATION)
    return ActivationQ(q.mul_(s).add_(q2.mul_(s2.unsqueeze(-1))).flatten(-2), gs.reciprocal())


@torch.no_grad()
def activation_residual(x: Tensor) -> Tensor:
    """fp32 [..., K]: x - Q(x) with the per-token NVFP4 scale, what RAC ranks (calibration accumulates its scores)."""
    return _residual_blocks(*_first_pass(x)).flatten(-2)


@torch.no_grad()
def fake_quantize_activation(
    x: Tensor, fmt: Format, rac: RacSpec | None = None, static_mask: Tensor | None = None
) -> Tensor:
    """Dequantized activation cast once to x.dtype, same shape; bf16 returns x. Errors as `quantize_activation`."""
    if fmt == "bf16" and rac is None:
        return x
    return quantize_activation(x, fmt, rac, static_mask).dequantize().to(x.dtype)


def emulated_linear(a: ActivationQ, w: WeightQ, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """y [..., N] = (a.qs @ w.qs^T) * a.rcp * w.rcp (+ bias in fp32), rounded once to out_dtype.

    w is one matrix [N, K] or broadcasts as a batch of them. fp32 accumulation; call it without autocast.
    """
    y = torch.matmul(a.qs, w.qs.to(torch.float32).mT) * a.rcp * w.rcp.mT
    return (y if bias is None else y + bias.to(torch.float32)).to(out_dtype)
