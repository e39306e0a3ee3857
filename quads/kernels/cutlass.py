# SPDX-License-Identifier: Apache-2.0
"""Backend cutlass: NVFP4 GEMMs on FP4 units through vLLM's CUTLASS ops, for stacks whose Triton has no such product.

    acc  [T, N] bf16 = round(sum_k (q_tk s_t) (q_nk s_n) * alpha)            the op; alpha = 1
    y    [T, N] = (acc1 (+ acc2)) * ar_t * wr_n (+ bias_n), rounded once more   acc2: the residual's pass (RAC)
    grouped  the same per expert, cutlass_fp4_moe_mm, rows sorted by expert

What the ops take (read from vLLM's csrc, 0.26 to 0.31):
    a, b        uint8 [T, K/2], [N, K/2] (b [E, N, K/2]); contiguous, low nibble first; K, N % 32, grouped: N % 128
    scales      float8_e4m3fn in the 128x4 swizzle: [ceil128(T), ceil4(K/16)], [ceil128(N), ceil4(K/16)]; b 3-D if
                grouped; a's then holds, from row sf_offsets[e], the ceil128(rows) rows of expert e, swizzled as one
    alpha       fp32 [1], grouped [E], on the device; the multiplier form 1 / (gs_a gs_w)
    out         bf16 or fp16 only: `nvfp4 mm` refuses fp32
    problem_sizes int32 [E, 3] = rows, N, K; expert_offsets, sf_offsets int32 [E]: first row, first scale row
Weights are padded to N % 128 and K % 64 with zero codes and scales, once per update; activations at every call (no
copy for the usual model widths).

Why alpha = 1 and not the weight's factor: factors differ by row of a fused weight (scale_group "shard") and by token;
bf16 has fp32's range, so sums of q s (at most 2688^2 K) do not overflow and a power-of-two factor would change no bit.
**It rounds twice**: to bf16 in the op, then after the factors. That is at most 2^-7 relative instead of 2^-8, an error
that `quads.kernels.native` does not have; RAC adds two rounded sums. Static activation scales (alpha = 1 / (gs_a gs_w))
would round once, but the method's scale is per token. `scaled_fp4_quant` is not used (`native_quantize`).
NOT RUN: no machine of compute capability 10 has executed it. Ops come from `use`; this package never imports vLLM.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from quads.kernels import native
from quads.kernels.encode import INTERPRETED, LAUNCH
from quads.kernels.gemm import round_to
from quads.kernels.native import Operand
from quads.kernels.native_quantize import Terms
from quads.numerics.formats import BLOCK
from quads.numerics.swizzle import swizzle, unswizzle

ROWS, COLUMNS = 128, 64  # of N and K in stored weights: whole 128x4 tiles of scales, as the grouped op's pointers need
MAX_EXPERTS = 1024  # the op starts one thread per expert in one block
# Parameters of the functions of vLLM's _custom_ops that this module calls.
CONTRACT = {
    "cutlass_scaled_fp4_mm": ("a", "b", "block_scale_a", "block_scale_b", "alpha", "out_dtype"),
    "cutlass_fp4_moe_mm": (
        "out_tensors", "a_tensors", "b_tensors", "a_scales", "b_scales", "alphas", "problem_sizes", "expert_offsets",
        "sf_offsets",
    ),
    "cutlass_scaled_mm_supports_fp4": ("cuda_device_capability",),
}  # fmt: skip
_ops: Any = None


class Weight(NamedTuple):
    """codes uint8 [(E,) N', K'/2], scales uint8 [(E,) N', K'/16] swizzled, N' % 128 and K' % 64 padded; rcp fp32
    [(E,) N]: its last dim is the N that counts."""

    codes: Tensor
    scales: Tensor
    rcp: Tensor


class Rows(NamedTuple):
    """Where the routed rows of a grouped call lie, all int32 on the device: expert [R] (clamped), place [R] of their
    scale rows, problem sizes [E, 3], first rows [E], first scale rows [E]; `height` scale rows in all."""

    expert: Tensor
    place: Tensor
    sizes: Tensor
    first: Tensor
    scale_first: Tensor
    height: int


def unavailable(dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why the backend cannot run here, or None. Whether vLLM's build has the ops is `use`'s question."""
    if reason := native.incapable():
        return reason
    return None if dtype == torch.bfloat16 else f"the ops write bfloat16, the model's dtype is {dtype}"


def contract_problems(ops: Any) -> list[str]:
    """How vLLM's `_custom_ops` (module `ops`) differs from CONTRACT; empty when it fits."""
    problems = []
    for name, expected in CONTRACT.items():
        function = getattr(ops, name, None)
        if function is None:
            problems.append(f"{name} is missing")
        elif (found := tuple(inspect.signature(function).parameters)) != expected:
            problems.append(f"{name}{found} instead of {expected}")
    return problems


def use(ops: Any, capability: int) -> None:
    """Take the ops from vLLM's module _custom_ops. capability: major * 10 + minor.

    RuntimeError when a signature differs or vLLM's build has no FP4 kernel for this device.
    """
    global _ops
    problems = contract_problems(ops)
    if problems:
        raise RuntimeError(f"vLLM's FP4 ops have changed: {'; '.join(problems)}; adapt quads.kernels.cutlass")
    if not ops.cutlass_scaled_mm_supports_fp4(capability):
        raise RuntimeError(
            f"this build of vLLM has no CUTLASS FP4 kernels for compute capability {capability // 10}.{capability % 10}"
            f"; choose backend native, triton or reference"
        )
    _ops = ops


def _taken() -> Any:
    if _ops is None:
        raise RuntimeError("backend cutlass has no ops yet; call quads.kernels.cutlass.use(vllm._custom_ops, 100)")
    return _ops


def _fitted(codes: Tensor, scales: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Zero codes and scales up to `rows` rows and a K that is a multiple of COLUMNS."""
    more = -(-2 * codes.shape[-1] // COLUMNS) * COLUMNS - 2 * codes.shape[-1]
    extra = rows - codes.shape[-2]
    if not (more or extra):
        return codes, scales
    return pad(codes, (0, more // 2, 0, extra)), pad(scales, (0, more // BLOCK, 0, extra))


def store(codes: Tensor, scales: Tensor, rcp: Tensor) -> Weight:
    """codes uint8 [(E,) N, K/2], scales [(E,) N, K/16] row-major, rcp [(E,) N] -> Weight; once per weight update."""
    codes, scales = _fitted(codes, scales, -(-codes.shape[-2] // ROWS) * ROWS)
    return Weight(codes.contiguous(), swizzle(scales).contiguous(), rcp)


def load(w: Weight, inner: int) -> Operand:
    """Inverse of `store` for a weight with K = inner."""
    n = w.rcp.shape[-1]
    scales = unswizzle(w.scales, w.codes.shape[-2], w.codes.shape[-1] // 8)
    return Operand(w.codes[..., :n, : inner // 2], scales[..., :n, : inner // BLOCK], w.rcp)


@triton.jit
def _rescale(
    acc_ptr, acc2_ptr, y_ptr, ar_ptr, wr_ptr, b_ptr, expert_ptr, N, stride, BN: tl.constexpr, GROUPED: tl.constexpr,
    RAC: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    on = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = on < N
    y = tl.load(acc_ptr + t * stride + on, mask=inside, other=0.0).to(tl.float32)
    if RAC:
        y += tl.load(acc2_ptr + t * stride + on, mask=inside, other=0.0).to(tl.float32)
    if GROUPED:
        wr_ptr += tl.load(expert_ptr + t).to(tl.int64) * N
    y = y * tl.load(ar_ptr + t) * tl.load(wr_ptr + on, mask=inside, other=0.0)
    if BIAS:
        y += tl.load(b_ptr + on, mask=inside, other=0.0)
    tl.store(y_ptr + t * N + on, round_to(y, y_ptr.dtype.element_ty, HARDWARE), mask=inside)


def rescale(
    acc: Tensor, acc2: Tensor | None, ar: Tensor, wr: Tensor, dtype: torch.dtype, bias: Tensor | None = None,
    expert: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y [T, N] = (acc + acc2) * ar_t * wr_n + bias_n in fp32, rounded once; acc bf16 [T, N' >= N], wr fp32 [(E,) N]."""
    T, N = acc.shape[0], wr.shape[-1]
    y = torch.empty(T, N, dtype=dtype, device=acc.device)
    BN = min(2048, triton.next_power_of_2(N))
    if T:
        _rescale[(T, triton.cdiv(N, BN))](
            acc, acc2, y, ar, wr, bias, expert, N, acc.shape[1], BN=BN, GROUPED=expert is not None,
            RAC=acc2 is not None, BIAS=bias is not None, HARDWARE=not INTERPRETED, num_warps=8, **LAUNCH,
        )  # fmt: skip
    return y


def _both(t: Terms, multiply: Any) -> tuple[Tensor, Tensor | None]:
    return multiply(t.first), None if t.second is None else multiply(t.second)


def linear(t: Terms, w: Weight, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """y [T, N]; t packed terms of K columns. RuntimeError before `use`."""
    ops = _taken()
    one = torch.ones(1, dtype=torch.float32, device=w.codes.device)

    def multiply(p: Operand) -> Tensor:
        codes, scales = _fitted(p.codes, p.scales, p.codes.shape[0])
        tiles = [s.view(torch.float8_e4m3fn) for s in (swizzle(scales).contiguous(), w.scales)]
        return ops.cutlass_scaled_fp4_mm(codes, w.codes, *tiles, one, torch.bfloat16)

    if not t.first.codes.shape[0]:
        return torch.empty(0, w.rcp.shape[-1], dtype=out_dtype, device=w.codes.device)
    bias = None if bias is None else bias.float().contiguous()
    return rescale(*_both(t, multiply), t.first.rcp, w.rcp, out_dtype, bias)


def group(offsets: Tensor, rows: int, n: int, k: int) -> Rows:
    """The op's description of `rows` rows sorted by expert, offsets int32 [E + 1]; computed on the device.

    Rows from offsets[E] on get scale rows of their own behind all experts', in no problem.
    """
    experts = offsets.numel() - 1
    if experts > MAX_EXPERTS:
        raise ValueError(f"cutlass_fp4_moe_mm starts one block of {MAX_EXPERTS} threads, got {experts} experts")
    counts = offsets[1:] - offsets[:-1]
    padded = (counts + ROWS - 1) // ROWS * ROWS
    ends = torch.cumsum(padded, 0, dtype=torch.int32)
    scale_first = ends - padded
    index = torch.arange(rows, dtype=torch.int32, device=offsets.device)
    expert = torch.searchsorted(offsets[1:].contiguous(), index, right=True, out_int32=True)
    safe = expert.clamp(max=experts - 1)
    height = (-(-rows // ROWS) + min(experts, rows) + 1) * ROWS  # worst case, and one tile for rows of nobody
    place = torch.where(expert < experts, scale_first[safe.long()] + index - offsets[safe.long()], height - 1)
    sizes = torch.stack([counts, torch.full_like(counts, n), torch.full_like(counts, k)], 1)
    return Rows(safe, place, sizes.contiguous(), offsets[:-1], scale_first, height)


def grouped(t: Terms, w: Weight, offsets: Tensor, out_dtype: torch.dtype) -> Tensor:
    """y [R, N] with w.codes [E, N', K'/2]; rows from offsets[E] on hold nothing defined. RuntimeError before `use`."""
    ops = _taken()
    count, (experts, n, half) = t.first.codes.shape[0], w.codes.shape
    if not count:
        return torch.empty(0, w.rcp.shape[-1], dtype=out_dtype, device=w.codes.device)
    rows = group(offsets, count, n, 2 * half)
    ones = torch.ones(experts, dtype=torch.float32, device=w.codes.device)

    def multiply(p: Operand) -> Tensor:
        codes, scales = _fitted(p.codes, p.scales, count)
        tall = torch.zeros(rows.height, scales.shape[1], dtype=torch.uint8, device=scales.device)
        tall = swizzle(tall.index_copy_(0, rows.place.long(), scales)).contiguous()
        out = torch.empty(count, n, dtype=torch.bfloat16, device=codes.device)
        ops.cutlass_fp4_moe_mm(
            out, codes, w.codes, tall.view(torch.float8_e4m3fn), w.scales.view(torch.float8_e4m3fn), ones,
            rows.sizes, rows.first, rows.scale_first,
        )  # fmt: skip
        return out

    return rescale(*_both(t, multiply), t.first.rcp, w.rcp, out_dtype, expert=rows.expert)
