# SPDX-License-Identifier: Apache-2.0
"""What a rollout engine multiplies with: which backends can run, and the engine's layers with backend triton.

    backend     product                                    activations             needs
    reference   numerics.qdq.emulated_linear, fp32 torch   numerics.qdq            nothing; it is the definition
    triton      kernels.gemm, q*s in bf16 units            terms, fp8_activation   a GPU (or Triton's interpreter), bf16
    native      kernels.native, FP4 units, Triton          native_quantize, packed compute capability 10, Triton 3.7
    cutlass     kernels.cutlass, FP4 units, vLLM's ops     native_quantize, packed compute capability 10, bf16

    torch.ops.quads.linear        x [T, K], weight bf16 [N, K] = q*s, rcp fp32 [N, 1]  ->  y [T, N] in x's dtype
    torch.ops.quads.expert_rows   x [T, D], rows sorted by expert  ->  y [R, D]: both GEMMs of gated SiLU experts
The last two store packed weights and have ops of their own: `native_layers`.

Contract: nothing falls back. `require` raises RuntimeError with the reason when a backend cannot run here. The products
differ from the reference by the order of fp32 additions, hence by a bf16 step in rare elements (cutlass rounds once
more); quantized activations do not differ. What quantizes them is `activation_kernel`: "triton", or "torch" for
batch masks and token masks by channel, or "none" for bf16 activations.

CUDA graphs and compilers (`graph_safe`): with kernel "triton" or "none" the ops hold no host value and never wait for
the GPU; weights, masks and offsets are read at their addresses when they run, so a captured graph sees what was written
there since. They are opaque to torch.compile. With kernel "torch" the finite check of the definition waits.
Differs from the reference in one more way: a row that is not finite raises nothing, it gives NaN in that row.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import silu

from quads.numerics.nvfp4 import global_scale
from quads.numerics.qdq import Format, quantize_activation
from quads.numerics.rac import RacSpec

BACKENDS = ("reference", "triton", "native", "cutlass")
PACKED = ("native", "cutlass")  # store packed weights and multiply NVFP4 by NVFP4 only


def unavailable(name: str, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> str | None:
    """Why backend `name` cannot run for activations of `dtype` on `device`, or None. ValueError for an unknown name."""
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} is unknown; known: {', '.join(BACKENDS)}")
    if name == "reference":
        return None
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    from quads.kernels.encode import INTERPRETED

    if name in PACKED:
        from quads.kernels import cutlass, native

        if device != "cuda" and not INTERPRETED:
            return f"FP4 units need a CUDA device, the model is on {device}"
        return native.unavailable() if name == "native" else cutlass.unavailable(dtype)
    if not INTERPRETED:
        if device != "cuda":
            return f"its kernels need a CUDA device, the model is on {device}"
        if torch.cuda.get_device_capability() < (9, 0):
            return "its kernels use Hopper's tensor copies (compute capability 9.0 or newer)"
    if dtype != torch.bfloat16:
        return f"q*s must be stored in bfloat16, the model's dtype is {dtype}; serve it in bfloat16"
    return None


def require(name: str, dtype: torch.dtype, device: str, formats: tuple[str, str] | None = None) -> None:
    """RuntimeError naming the backend, the reason and what to do when it cannot run; formats: of weight, activation."""
    reason = unavailable(name, dtype, device) or (unsupported(name, *formats) if formats else None)
    if reason:
        raise RuntimeError(f"backend {name!r} is not available here: {reason}; choose another of {', '.join(BACKENDS)}")


def unsupported(name: str, weight: str, activation: str) -> str | None:
    """Why backend `name` multiplies no operands of these formats on any device, or None."""
    if name in PACKED and (weight, activation) != ("nvfp4", "nvfp4"):
        return f"it multiplies NVFP4 by NVFP4, not {weight} weights by {activation} activations"
    return None


def without_kernel(rac: RacSpec | None) -> str | None:
    """Why no kernel quantizes NVFP4 activations with this compensation, or None when one does."""
    if rac is not None and rac.mask == "batch":
        return "a batch mask needs the scores of all rows before the first output"
    if rac is not None and rac.mask == "token" and rac.granularity != "block16":
        return "token masks are selected by whole 16-blocks only"
    return None


def activation_kernel(backend: str, fmt: str, rac: RacSpec | None) -> tuple[str, str]:
    """(what quantizes activations: "triton", "torch" or "none", the reason)."""
    if fmt == "bf16":
        return "none", "bf16 activations are multiplied as they are"
    if backend == "reference":
        return "torch", "backend reference is quads.numerics"
    if fmt == "fp8":
        return "triton", "quads.kernels.fp8_activation"
    reason = without_kernel(rac)
    kernel = "quads.kernels.terms" if backend == "triton" else "quads.kernels.native_quantize"
    return ("torch", reason) if reason else ("triton", kernel)


def graph_safe(backend: str, fmt: str, rac: RacSpec | None) -> tuple[bool, str]:
    """(whether the layers can be captured in a CUDA graph and compiled around, the reason)."""
    if backend == "reference":
        return False, "backend reference reads row counts and finite checks on the host"
    kernel, reason = activation_kernel(backend, fmt, rac)
    if kernel == "torch":
        return False, f"activations are quantized by torch, whose finite check waits for the device ({reason})"
    return True, "custom ops without host values; weights and masks are read at fixed addresses"


def product(backend: str) -> str:
    """What multiplies and when it rounds, for receipts."""
    return {
        "reference": "quads.numerics in fp32, one rounding; mode bf16: torch's linear",
        "triton": "quads.kernels.gemm, bf16 units on q*s; one rounding",
        "native": "quads.kernels.native, Triton dot_scaled on FP4 units, scales in the epilogue; one rounding",
        "cutlass": "vLLM's cutlass_scaled_fp4_mm and cutlass_fp4_moe_mm, alpha 1; rounded before and after the scales",
    }[backend]


def operands(x: Tensor, fmt: Format, rac: RacSpec | None, static_mask: Tensor | None, amax: Tensor | None = None):
    """x [T, K] -> rac_gemm.Terms in bf16, natural order, by `activation_kernel`. Errors as there.

    amax: fp32 [T, 1] of whole tokens when x holds a part of their channels; checking it waits for the device. Raises
    ValueError when it is not finite, or for a mask whose selection needs the other channels.
    """
    from quads.kernels import fp8_activation, rac_gemm, terms

    x = x.contiguous()
    if fmt == "bf16":
        ones = torch.ones(x.shape[0], 1, dtype=torch.float32, device=x.device)
        return rac_gemm.Terms(_aligned(x.to(torch.bfloat16)), None, ones)
    if fmt == "nvfp4":
        if amax is not None:
            if rac is not None and rac.mask != "static":
                raise ValueError(f"RAC mask {rac.mask!r} ranks all channels of a token, x holds a part; use static")
            return terms.terms(x, rac, static_mask, global_scale(amax))
        quantize = rac_gemm.terms if without_kernel(rac) else terms.terms
        return quantize(x, rac, static_mask)
    if fmt == "fp8" and rac is None and amax is None:
        rows = fp8_activation.per_token(x)
        return rac_gemm.Terms(rows.q, None, rows.scale)
    a = quantize_activation(x, fmt, rac, static_mask, amax)
    return rac_gemm.Terms(a.qs.to(torch.bfloat16).contiguous(), None, a.rcp.contiguous())


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def linear_product(t, weight: Tensor, rcp: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """y [T, N] with backend triton; t: rac_gemm.Terms, a second term in natural order."""
    from quads.kernels import gemm, rac_gemm

    w = gemm.CachedWeight(weight, rcp.reshape(-1))
    if t.second is None:
        return gemm.linear(t.first, t.rcp, w, dtype, bias)
    return rac_gemm.form_d(t, w, dtype, None if bias is None else bias.float())


def grouped_product(t, weight: Tensor, rcp: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """y [R, N] with backend triton; rows sorted by expert, offsets int32 [E + 1] on the device.

    Rows from offsets[E] on belong to no expert here: they cost nothing and what y holds there is undefined.
    """
    from quads.kernels import gemm, rac_gemm

    w = gemm.CachedWeight(weight, rcp.reshape(weight.shape[:-1]))
    if t.second is None:
        return gemm.grouped(t.first, t.rcp, w, offsets, dtype)
    return rac_gemm.form_d_grouped(t, w, offsets, dtype)


def rac_code(rac: RacSpec | None) -> str:
    """A RacSpec as one string, the form in which an op's schema can hold it; "" for none."""
    return "" if rac is None else f"{rac.k!r} {rac.granularity} {rac.mask} {rac.score}"


@functools.lru_cache(maxsize=64)
def _rac(code: str) -> RacSpec | None:
    if not code:
        return None
    k, granularity, mask, score = code.split()
    return RacSpec(float(k), granularity, mask, score)


def _linear(
    x: Tensor, weight: Tensor, rcp: Tensor, mask: Tensor | None, bias: Tensor | None, activation: str, rac: str
) -> Tensor:
    return linear_product(operands(x, activation, _rac(rac), mask), weight, rcp, x.dtype, bias)


def _linear_shape(x, weight, rcp, mask, bias, activation, rac):
    return x.new_empty(x.shape[0], weight.shape[0])


def _expert_rows(
    x: Tensor, token: Tensor | None, offsets: Tensor, w13: Tensor, rcp13: Tensor, w2: Tensor, rcp2: Tensor,
    mask13: Tensor | None, mask2: Tensor | None, activation: str, rac: str,
) -> Tensor:  # fmt: skip
    spec = _rac(rac)
    t = operands(x, activation, spec, mask13)
    if token is not None:
        t = type(t)(*(None if part is None else part[token] for part in t))
    gate, up = grouped_product(t, w13, rcp13, offsets, x.dtype).chunk(2, dim=-1)
    return grouped_product(operands(silu(gate) * up, activation, spec, mask2), w2, rcp2, offsets, x.dtype)


def _expert_rows_shape(x, token, offsets, w13, rcp13, w2, rcp2, mask13, mask2, activation, rac):
    return x.new_empty((x if token is None else token).shape[0], w2.shape[1])


_LIBRARY = torch.library.Library("quads", "FRAGMENT")
# What is registered: name -> (schema, function, function of the output's shape).
SCHEMAS: dict[str, tuple[str, Callable, Callable]] = {}


def define(schemas: Mapping[str, tuple[str, Callable, Callable]]) -> None:
    """Register ops torch.ops.quads.<name> (SCHEMAS); they are opaque to torch.compile."""
    SCHEMAS.update(schemas)
    for name, (schema, function, shape) in schemas.items():
        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"quads::{name}", shape, lib=_LIBRARY)


define(
    {
        "linear": (
            "(Tensor x, Tensor weight, Tensor rcp, Tensor? mask, Tensor? bias, str activation, str rac) -> Tensor",
            _linear,
            _linear_shape,
        ),
        "expert_rows": (
            "(Tensor x, Tensor? token, Tensor offsets, Tensor w13, Tensor rcp13, Tensor w2, Tensor rcp2, "
            "Tensor? mask13, Tensor? mask2, str activation, str rac) -> Tensor",
            _expert_rows,
            _expert_rows_shape,
        ),
    }
)


def linear(
    x: Tensor,
    weight: Tensor,
    rcp: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "nvfp4",
    rac: str = "",
) -> Tensor:
    """y [..., N] of x [..., K] with weight bf16 [N, K] = q*s and rcp fp32 [N, 1]; any leading shape, empty included.

    mask: bool [K] when rac (`rac_code`) is static; bias [N]. Errors as `operands`.
    """
    y = torch.ops.quads.linear(x.reshape(-1, x.shape[-1]), weight, rcp, mask, bias, activation, rac)
    return y.view(*x.shape[:-1], weight.shape[0])


def expert_rows(
    x: Tensor,
    token: Tensor | None,
    offsets: Tensor,
    w13: Tensor,
    rcp13: Tensor,
    w2: Tensor,
    rcp2: Tensor,
    mask13: Tensor | None = None,
    mask2: Tensor | None = None,
    activation: str = "nvfp4",
    rac: str = "",
) -> Tensor:
    """y [R, D] of gated SiLU experts, R rows sorted by expert: row r works on x[token[r]], or on x[r] without token.

    w13 bf16 [E, 2F, D], w2 bf16 [E, D, F] = q*s; rcp13 fp32 [E, 2F, 1], rcp2 fp32 [E, D, 1]; offsets int32 [E + 1] on
    the device. Rows from offsets[E] on have no expert and undefined results; there must be none when activations are
    quantized by torch (`activation_kernel`), which looks at all rows.
    """
    return torch.ops.quads.expert_rows(x, token, offsets, w13, rcp13, w2, rcp2, mask13, mask2, activation, rac)
