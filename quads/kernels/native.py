# SPDX-License-Identifier: Apache-2.0
"""Backend native: NVFP4 GEMMs on the FP4 units of compute capability 10 and newer, by Triton's `tl.dot_scaled`.

    y [T, N] = (sum_k (q_tk s_t(k/16)) (q_nk s_n(k/16))) * ar_t * wr_n (+ bias_n)      both operands packed FP4
    RAC      + the same product of the residual's codes on the first KS columns (form D: W tile loaded once)
    grouped  y_r = the same with the matrix of row r's expert; rows sorted by expert, offsets int32 [E + 1]

    codes uint8 [T, K/2], [(E,) N, K/2]  two E2M1 codes a byte, low nibble first
    scales uint8 E4M3 [T, K/16], [(E,) N, K/16] row-major; ar fp32 [T], wr fp32 [(E,) N]

Why this product serves per-token global scales: it multiplies them in its fp32 epilogue, one rounding, as the
definition does. `quads.kernels.cutlass` (backend cutlass) has one alpha a call and a bf16 output, so there the token's
factor comes after a rounding. Grouped: one launch, a tile schedule built on the device, no host value.
`compile_ahead` compiles the kernel for sm_100a without such a GPU; the PTX then holds tcgen05.mma with
kind::mxf4nvf4.block_scale.block16. The interpreter runs the kernel on a CPU with the product written
out (loads, masks, residual and epilogue are the same). NOT RUN: it has not been
executed on compute capability 10 hardware; tests that need it are marked `blackwell`.
Needs a Triton that lowers E2M1 with E4M3 block-16 scales (3.9 does; 3.6 does not compile it).
Differs from the emulation (quads.kernels.gemm) in the hardware's accumulation order only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads.kernels.encode import INTERPRETED, LAUNCH, e2m1_decode, e4m3_decode
from quads.kernels.gemm import Groups, group_rows, round_to
from quads.numerics.formats import BLOCK

MIN_CAPABILITY = (10, 0)
MIN_TRITON = (3, 7)


class Operand(NamedTuple):
    """codes uint8 [..., M, K/2], scales uint8 E4M3 [..., M, K/16] row-major, rcp fp32 [..., M] (the remaining factor of
    every row)."""

    codes: Tensor
    scales: Tensor
    rcp: Tensor


class Tile(NamedTuple):
    """Tile sizes over tokens, outputs and K, pipeline stages, warps. The first is also that of the tile schedule."""

    m: int = 128
    n: int = 128
    k: int = 256
    stages: int = 3
    warps: int = 4


DEFAULT = Tile()  # chosen without a measurement: nobody has run it
SMALL = Tile(16, 16, 32, 1, 4)  # for the interpreter


def incapable() -> str | None:
    """Why the device has no FP4 units, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} has no FP4 units; 10.0 or newer is needed"
    return None


def unavailable() -> str | None:
    """Why the native backend cannot run here, or None."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if reason := incapable():
        return reason
    if version < MIN_TRITON:
        return f"Triton {triton.__version__} cannot compile block-16 E4M3 scales; {'.'.join(map(str, MIN_TRITON))} can"
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
    a_ptr, as_ptr, r_ptr, rs_ptr, w_ptr, ws_ptr, ar_ptr, wr_ptr, b_ptr, y_ptr, expert_ptr, row_ptr, off_ptr,
    T, N, K, KS,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, GROUPED: tl.constexpr,
    RAC: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    pm = tl.program_id(1)
    on = tl.program_id(0) * BN + tl.arange(0, BN)
    tiles = tl.cdiv(K, BK)
    if GROUPED:
        e = tl.load(expert_ptr + pm)
        tiles = tl.where(e < 0, 0, tiles)  # a spare tile of the schedule: no work, nothing stored
        e = tl.maximum(e, 0)
        om = tl.load(row_ptr + pm) + tl.arange(0, BM)
        end = tl.where(tiles == 0, 0, tl.load(off_ptr + e + 1))
        ow = e.to(tl.int64) * N + on
    else:
        om = pm * BM + tl.arange(0, BM)
        end = T
        ow = on.to(tl.int64)
    live, inside = om < end, on < N
    acc = tl.zeros((BM, BN), tl.float32)
    for kt in tl.range(0, tiles, num_stages=STAGES):
        a = _load(a_ptr, om, K // 2, kt * (BK // 2), BK // 2, live)
        sa = _load(as_ptr, om, K // 16, kt * (BK // 16), BK // 16, live)
        w = _load(w_ptr, ow, K // 2, kt * (BK // 2), BK // 2, inside)
        sw = _load(ws_ptr, ow, K // 16, kt * (BK // 16), BK // 16, inside)
        acc = _block_scaled(a, sa, w, sw, acc, BM, BN, BK, HARDWARE)
        if RAC:
            if kt * BK < KS:
                r = _load(r_ptr, om, KS // 2, kt * (BK // 2), BK // 2, live)
                sr = _load(rs_ptr, om, KS // 16, kt * (BK // 16), BK // 16, live)
                acc = _block_scaled(r, sr, w, sw, acc, BM, BN, BK, HARDWARE)
    y = acc * tl.load(ar_ptr + om, mask=live, other=0.0)[:, None]
    y = y * tl.load(wr_ptr + ow, mask=inside, other=0.0)[None, :]
    if BIAS:
        y += tl.load(b_ptr + on, mask=inside, other=0.0)[None, :]
    out = y_ptr + om[:, None].to(tl.int64) * N + on[None, :]
    tl.store(out, round_to(y, y_ptr.dtype.element_ty, HARDWARE), mask=live[:, None] & inside[None, :])


def check_operand(name: str, p: Operand, K: int, dim: int = 2) -> None:
    """ValueError when codes, scales and rcp do not hold `dim`-dimensional rows of K columns, contiguous."""
    rows = p.codes.shape[:-1]
    if p.codes.dim() != dim or p.codes.shape[-1] * 2 != K or p.scales.shape != (*rows, K // BLOCK) or K % BLOCK:
        raise ValueError(
            f"{name}: codes {tuple(p.codes.shape)} and scales {tuple(p.scales.shape)} do not hold K={K} (a multiple "
            f"of {BLOCK}) in {dim} dimensions"
        )
    if p.codes.dtype != torch.uint8 or p.scales.dtype != torch.uint8 or p.rcp.dtype != torch.float32:
        raise ValueError(f"{name}: codes and scales must be uint8, rcp fp32; got {[t.dtype for t in p]}")
    if p.rcp.numel() != rows.numel() or not all(t.is_contiguous() for t in p):
        raise ValueError(f"{name}: one rcp per row ({rows.numel()}) and contiguous tensors are needed")


def _launch(
    a: Operand, w: Operand, dtype: torch.dtype, residual: Operand | None, bias: Tensor | None, groups: Groups | None,
    tile: Tile,
) -> Tensor:  # fmt: skip
    reason = None if INTERPRETED else unavailable()
    if reason:
        raise RuntimeError(f"native NVFP4 GEMM: {reason}; use the triton or reference backend")
    T, N, K = a.codes.shape[0], w.codes.shape[-2], 2 * a.codes.shape[1]
    check_operand("activation", a, K)
    check_operand("weight", w, K, 2 if groups is None else 3)
    KS = 2 * residual.codes.shape[1] if residual is not None else 0
    if residual is not None:
        check_operand("residual", residual, KS)
    y = torch.empty(T, N, dtype=dtype, device=a.codes.device)
    if not T:
        return y
    r = residual or a
    expert, row, offsets = (None, None, None) if groups is None else groups[:3]
    tiles_m = triton.cdiv(T, tile.m) if expert is None else expert.numel()
    _native[(triton.cdiv(N, tile.n), tiles_m)](
        a.codes, a.scales, r.codes, r.scales, w.codes, w.scales, a.rcp, w.rcp, bias, y, expert, row, offsets,
        T, N, K, KS, BM=tile.m, BN=tile.n, BK=tile.k, STAGES=tile.stages, GROUPED=groups is not None,
        RAC=residual is not None, BIAS=bias is not None, HARDWARE=not INTERPRETED, num_warps=tile.warps, **LAUNCH,
    )  # fmt: skip
    return y


def linear(
    a: Operand, w: Operand, out_dtype: torch.dtype, residual: Operand | None = None, bias: Tensor | None = None
) -> Tensor:
    """y [T, N] bf16 or fp32 from packed operands; bias [N]; residual: codes and scales of the first KS columns' second
    pass (all K columns, zero off the mask, or the masked ones first).

    RuntimeError with the reason where the backend is unavailable (the interpreter runs it on CPU), ValueError for
    operands that do not fit.
    """
    bias = None if bias is None else bias.float().contiguous()
    return _launch(a, w, out_dtype, residual, bias, None, SMALL if INTERPRETED else DEFAULT)


def grouped(a: Operand, w: Operand, offsets: Tensor, out_dtype: torch.dtype, residual: Operand | None = None) -> Tensor:
    """y [R, N]: rows sorted by expert, w.codes [E, N, K/2], offsets int32 [E + 1] on the device. Errors as `linear`.

    Rows from offsets[E] on belong to no expert here: they cost nothing and what y holds there is undefined.
    """
    tile = SMALL if INTERPRETED else DEFAULT
    return _launch(a, w, out_dtype, residual, None, group_rows(offsets, a.codes.shape[0], tile.m), tile)


def compile_ahead(capability: int = 100, rac: bool = False, grouped: bool = False) -> dict[str, Any]:
    """Compile the kernel for sm_<capability>a on any machine: {"ptx": str, "cubin": bytes, "shared": bytes of it}.

    RuntimeError from Triton when its compiler cannot. Not from the interpreter's process.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = dict.fromkeys(("a_ptr", "as_ptr", "r_ptr", "rs_ptr", "w_ptr", "ws_ptr"), "*u8")
    pointers |= {"ar_ptr": "*fp32", "wr_ptr": "*fp32", "y_ptr": "*bf16"}
    schedule = dict.fromkeys(("expert_ptr", "row_ptr", "off_ptr"), "*i32")
    constants: dict[str, Any] = {"BM": DEFAULT.m, "BN": DEFAULT.n, "BK": DEFAULT.k, "STAGES": DEFAULT.stages}
    constants |= {"GROUPED": grouped, "RAC": rac, "BIAS": not grouped, "HARDWARE": True}
    if grouped:
        pointers |= schedule
        constants["b_ptr"] = None
    else:
        pointers["b_ptr"] = "*fp32"
        constants |= dict.fromkeys(schedule)
    names = _native.arg_names
    signature = {n: pointers.get(n, "constexpr" if n in constants else "i32") for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in pointers or n in ("N", "K", "KS")}
    source = ASTSource(_native, signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
    options = {"num_warps": DEFAULT.warps, **LAUNCH}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return {"ptx": kernel.asm["ptx"], "cubin": kernel.asm["cubin"], "shared": kernel.metadata.shared}
