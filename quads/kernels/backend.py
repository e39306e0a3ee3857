# SPDX-License-Identifier: Apache-2.0
"""What a rollout engine multiplies with: the backend's availability and its linear and grouped products.

    backend     product                                    activations             needs
    reference   numerics.qdq.emulated_linear, fp32 torch   numerics.qdq            nothing; it is the definition
    triton      kernels.gemm, q*s in bf16 units            kernels.activation      a GPU (or Triton's interpreter), bf16
    native      kernels.native, FP4 units                  packed operands         compute capability 10

    linear_product   x [T, K], weight bf16 [N, K] = q*s, rcp fp32 [N, 1]   ->  y [T, N] in x's dtype
    grouped_product  the same with weight [E, N, K], rows sorted by expert, offsets int32 [E + 1]

Contract: nothing falls back. `require` raises RuntimeError with the reason when a backend cannot run here; the caller
records the backend it got. Every activation format works with triton: bf16 and FP8 values, NVFP4 q*s are exact in
bf16; a RAC activation is two of them (form D). CUDA graphs: the products hold no host value and no synchronisation;
a static RAC mask is applied in natural block order, so a mask that changes in place reaches a captured graph.
Differs from the reference by the order of fp32 additions, hence by a bf16 step in rare elements.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from quads.numerics.qdq import Format, quantize_activation
from quads.numerics.rac import RacSpec

BACKENDS = ("reference", "triton", "native")


def unavailable(name: str, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> str | None:
    """Why backend `name` cannot run for activations of `dtype` on `device`, or None. ValueError for an unknown name."""
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} is unknown; known: {', '.join(BACKENDS)}")
    if name == "reference":
        return None
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if name == "native":
        from quads.kernels import native

        return native.unavailable() or "the engine keeps q*s, not packed codes: the native kernels are not wired in yet"
    from quads.kernels.encode import INTERPRETED

    if not INTERPRETED:
        if device != "cuda":
            return f"its kernels need a CUDA device, the model is on {device}"
        if torch.cuda.get_device_capability() < (9, 0):
            return "its kernels use Hopper's tensor copies (compute capability 9.0 or newer)"
    if dtype != torch.bfloat16:
        return f"q*s must be stored in bfloat16, the model's dtype is {dtype}; serve it in bfloat16"
    return None


def require(name: str, dtype: torch.dtype, device: str) -> None:
    """RuntimeError naming the backend, the reason and what to do when it cannot run."""
    reason = unavailable(name, dtype, device)
    if reason:
        raise RuntimeError(f"backend {name!r} is not available here: {reason}; choose another of {', '.join(BACKENDS)}")


def operands(x: Tensor, fmt: Format, rac: RacSpec | None, static_mask: Tensor | None):
    """x [T, K] -> rac_gemm.Terms in bf16, natural order. Errors as `quantize_activation`."""
    from quads.kernels import rac_gemm

    if fmt == "nvfp4" and rac is not None:
        return rac_gemm.terms(x, rac, static_mask)
    a = quantize_activation(x, fmt, rac, static_mask)
    return rac_gemm.Terms(a.qs.to(torch.bfloat16).contiguous(), None, a.rcp.contiguous())


def linear_product(t, weight: Tensor, rcp: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """y [T, N] with backend triton; t: rac_gemm.Terms, a second term in natural order."""
    from quads.kernels import gemm, rac_gemm

    w = gemm.CachedWeight(weight, rcp.reshape(-1))
    if t.second is None:
        return gemm.linear(t.first, t.rcp, w, dtype, bias)
    return rac_gemm.form_d(t, w, dtype, None if bias is None else bias.float())


def grouped_product(t, weight: Tensor, rcp: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """y [R, N] with backend triton; rows sorted by expert, offsets int32 [E + 1] on the device."""
    from quads.kernels import gemm, rac_gemm

    w = gemm.CachedWeight(weight, rcp.reshape(weight.shape[:-1]))
    if t.second is None:
        return gemm.grouped(t.first, t.rcp, w, offsets, dtype)
    return rac_gemm.form_d_grouped(t, w, offsets, dtype)
