# SPDX-License-Identifier: Apache-2.0
"""Native NVFP4 GEMMs for compute capability 10 and newer: Triton's `tl.dot_scaled` and vLLM's CUTLASS ops.

    y [T, N] = (sum_k (q_tk s_t(k/16)) (q_nk s_n(k/16))) * ar_t * wr_n           both operands packed FP4
    RAC      + the same product of the residual's codes on the first KS columns (form D: W tile loaded once)

    codes uint8 [T, K/2], [N, K/2]  two E2M1 codes a byte, low nibble first; scales uint8 E4M3 [T, K/16], [N, K/16]
    Triton reads scales row-major; CUTLASS reads them in the 128x4 swizzle (quads.numerics.swizzle)

`compile_ahead` compiles the kernel for sm_100a without such a GPU; the PTX then holds tcgen05.mma with
kind::mxf4nvf4.block_scale.block16. The interpreter runs the kernel on a CPU with the product written
out (loads, masks, residual and epilogue are the same). NOT RUN: neither path has been
executed on compute capability 10 hardware; tests that need it are marked `blackwell`.
Needs a Triton that lowers E2M1 with E4M3 block-16 scales (3.9 does; 3.6 fails for sm_90, where there is no FP4 unit).
The CUTLASS op takes one alpha for the whole product: only activations with one global scale are exact through it.
Differs from the emulation (quads.kernels.gemm) in the hardware's accumulation order only.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.kernels.encode import INTERPRETED, LAUNCH, e2m1_decode, e4m3_decode
from quads.kernels.gemm import round_to
from quads.numerics.formats import BLOCK
from quads.numerics.swizzle import swizzle

MIN_CAPABILITY = (10, 0)
MIN_TRITON = (3, 7)
# Parameters of the functions of vLLM's _custom_ops that this module calls.
CUTLASS_CONTRACT = {
    "cutlass_scaled_fp4_mm": ("a", "b", "block_scale_a", "block_scale_b", "alpha", "out_dtype"),
    "cutlass_fp4_moe_mm": (
        "out_tensors", "a_tensors", "b_tensors", "a_scales", "b_scales", "alphas", "problem_sizes", "expert_offsets",
        "sf_offsets",
    ),
    "cutlass_scaled_mm_supports_fp4": ("cuda_device_capability",),
}  # fmt: skip


class Operand(NamedTuple):
    """codes uint8 [M, K/2], scales uint8 E4M3 [M, K/16] row-major, rcp fp32 [M] (the remaining factor of every row)."""

    codes: Tensor
    scales: Tensor
    rcp: Tensor


def unavailable() -> str | None:
    """Why the native backend cannot run here, or None."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < MIN_TRITON:
        return f"Triton {triton.__version__} cannot compile block-16 E4M3 scales; {'.'.join(map(str, MIN_TRITON))} can"
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} has no FP4 units; 10.0 or newer is needed"
    return None


@triton.jit
def _load(ptr, rows, width, k0, COLUMNS: tl.constexpr, live):
    columns = k0 + tl.arange(0, COLUMNS)
    mask = live[:, None] & (columns < width)[None, :]
    return tl.load(ptr + rows[:, None].to(tl.int64) * width + columns[None, :], mask=mask, other=0)


@triton.jit
def _values(codes, scales, ROWS: tl.constexpr, BK: tl.constexpr):
    """fp32 (ROWS, BK) = q * s in plain operations."""
    c = codes.to(tl.int32)
    q = tl.reshape(tl.join(e2m1_decode(c & 15), e2m1_decode(c >> 4)), (ROWS, BK // 16, 16))
    s = e4m3_decode(scales.to(tl.int32), False)
    return tl.reshape(q * s[:, :, None], (ROWS, BK))


@triton.jit
def _block_scaled(a, sa, w, sw, acc, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HARDWARE: tl.constexpr):
    """acc (BM, BN) + a w^T; codes (BM, BK/2), (BN, BK/2), scales as bytes. The interpreter reads every scale of
    dot_scaled as a power of two, so there the product is written out."""
    if HARDWARE:
        sa = sa.to(tl.float8e4nv, bitcast=True)
        return tl.dot_scaled(a, sa, "e2m1", w.T, sw.to(tl.float8e4nv, bitcast=True), "e2m1", acc)
    else:
        return tl.dot(_values(a, sa, BM, BK), _values(w, sw, BN, BK).T, acc, input_precision="ieee")


@triton.jit
def _native(
    a_ptr, as_ptr, r_ptr, rs_ptr, w_ptr, ws_ptr, ar_ptr, wr_ptr, y_ptr, T, N, K, KS,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, RAC: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    om = tl.program_id(1) * BM + tl.arange(0, BM)
    on = tl.program_id(0) * BN + tl.arange(0, BN)
    live, inside = om < T, on < N
    acc = tl.zeros((BM, BN), tl.float32)
    for kt in tl.range(0, tl.cdiv(K, BK), num_stages=STAGES):
        a = _load(a_ptr, om, K // 2, kt * (BK // 2), BK // 2, live)
        sa = _load(as_ptr, om, K // 16, kt * (BK // 16), BK // 16, live)
        w = _load(w_ptr, on, K // 2, kt * (BK // 2), BK // 2, inside)
        sw = _load(ws_ptr, on, K // 16, kt * (BK // 16), BK // 16, inside)
        acc = _block_scaled(a, sa, w, sw, acc, BM, BN, BK, HARDWARE)
        if RAC:
            if kt * BK < KS:
                r = _load(r_ptr, om, KS // 2, kt * (BK // 2), BK // 2, live)
                sr = _load(rs_ptr, om, KS // 16, kt * (BK // 16), BK // 16, live)
                acc = _block_scaled(r, sr, w, sw, acc, BM, BN, BK, HARDWARE)
    y = acc * tl.load(ar_ptr + om, mask=live, other=0.0)[:, None]
    y = y * tl.load(wr_ptr + on, mask=inside, other=0.0)[None, :]
    out = y_ptr + om[:, None].to(tl.int64) * N + on[None, :]
    tl.store(out, round_to(y, y_ptr.dtype.element_ty, HARDWARE), mask=live[:, None] & inside[None, :])


def _check(name: str, p: Operand, K: int) -> None:
    if p.codes.shape[1] * 2 != K or p.scales.shape != (p.codes.shape[0], K // BLOCK) or K % (2 * BLOCK):
        raise ValueError(
            f"{name}: codes {tuple(p.codes.shape)} and scales {tuple(p.scales.shape)} do not hold K={K} (a multiple "
            f"of {2 * BLOCK})"
        )
    if p.rcp.numel() != p.codes.shape[0] or not (p.codes.is_contiguous() and p.scales.is_contiguous()):
        raise ValueError(f"{name}: one rcp per row and contiguous codes and scales are needed")


def linear(a: Operand, w: Operand, out_dtype: torch.dtype, residual: Operand | None = None) -> Tensor:
    """y [T, N] from packed operands; residual: codes and scales of the first KS columns' second pass (masked first).

    RuntimeError with the reason where the backend is unavailable (the interpreter runs it on CPU).
    """
    reason = None if INTERPRETED else unavailable()
    if reason:
        raise RuntimeError(f"native NVFP4 GEMM: {reason}; use the triton or reference backend")
    T, N, K = a.codes.shape[0], w.codes.shape[0], 2 * a.codes.shape[1]
    _check("activation", a, K)
    _check("weight", w, K)
    KS = 2 * residual.codes.shape[1] if residual is not None else 0
    if residual is not None:
        _check("residual", residual, KS)
    y = torch.empty(T, N, dtype=out_dtype, device=a.codes.device)
    r = residual or a
    BM, BN, BK = (16, 16, 32) if INTERPRETED else (128, 128, 256)
    _native[(triton.cdiv(N, BN), triton.cdiv(T, BM))](
        a.codes, a.scales, r.codes, r.scales, w.codes, w.scales, a.rcp, w.rcp, y, T, N, K, KS,
        BM=BM, BN=BN, BK=BK, STAGES=3, RAC=residual is not None, HARDWARE=not INTERPRETED, num_warps=4, **LAUNCH,
    )  # fmt: skip
    return y


def compile_ahead(capability: int = 100, rac: bool = False) -> dict[str, Any]:
    """Compile the kernel for sm_<capability>a on any machine: {"ptx": str, "cubin": bytes, "shared": bytes of it}.

    RuntimeError from Triton when its compiler cannot. Not from the interpreter's process.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = dict.fromkeys(("a_ptr", "as_ptr", "r_ptr", "rs_ptr", "w_ptr", "ws_ptr"), "*u8")
    pointers |= {"ar_ptr": "*fp32", "wr_ptr": "*fp32", "y_ptr": "*bf16"}
    constants = {"BM": 128, "BN": 128, "BK": 256, "STAGES": 3, "RAC": rac, "HARDWARE": True}
    names = _native.arg_names
    signature = {n: pointers.get(n, "constexpr" if n in constants else "i32") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in pointers or n in ("N", "K", "KS")}
    source = ASTSource(_native, signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, **LAUNCH})
    return {"ptx": kernel.asm["ptx"], "cubin": kernel.asm["cubin"], "shared": kernel.metadata.shared}


def contract_problems(ops: Any) -> list[str]:
    """How vLLM's `_custom_ops` (module `ops`) differs from CUTLASS_CONTRACT; empty when it fits."""
    problems = []
    for name, expected in CUTLASS_CONTRACT.items():
        function = getattr(ops, name, None)
        if function is None:
            problems.append(f"{name} is missing")
        elif (found := tuple(inspect.signature(function).parameters)) != expected:
            problems.append(f"{name}{found} instead of {expected}")
    return problems


def cutlass_linear(ops: Any, a: Operand, w: Operand, alpha: Tensor, out_dtype: torch.dtype) -> Tensor:
    """y [T, N] through vLLM's CUTLASS op: alpha fp32 [1] on the device = activation rcp * weight rcp, one for all.

    `ops` is vLLM's module _custom_ops (this package does not import vLLM). RuntimeError when its contract differs.
    """
    problems = contract_problems(ops)
    if problems:
        raise RuntimeError(f"vLLM's FP4 ops have changed: {'; '.join(problems)}; adapt quads.kernels.native")
    if alpha.numel() != 1 or alpha.dtype != torch.float32:
        raise ValueError(f"alpha must be one fp32 value on the device, got {alpha.dtype} {tuple(alpha.shape)}")
    scales = [swizzle(p.scales).view(torch.float8_e4m3fn) for p in (a, w)]
    return ops.cutlass_scaled_fp4_mm(a.codes, w.codes, *scales, alpha, out_dtype)
