# SPDX-License-Identifier: Apache-2.0
"""Exact emulation of NVFP4 GEMMs on BF16 units: products of cached q*s, global scales in the fp32 epilogue.

    y [T, N] = (sum_k a_tk w_nk) * ar_t * wr_n (+ bias_n)            a, w = q*s in bf16 (<= 6 significant bits: exact)
    grouped  y_r = the same with the matrix of row r's expert; rows sorted by expert, offsets int32 [E + 1]
    wrapped  a [T, K + KS]: the last KS columns meet the first KS columns of W again (RAC, W stored once)
    form D   + sum_{k in masked tiles} r_tk w_nk                     same W tile in shared memory, second MMA

T tokens (R routed rows), N outputs, K inputs, E experts. Definition: quads.numerics.qdq.emulated_linear; accumulation
is fp32 in another order, then the same three roundings (row scale, weight scale, bias) and one cast.

    linear_uniform   cuBLAS with a scalar alpha: one global scale for all rows and all tokens, the fastest
    linear           per-token scales: `method="triton"`, one kernel with the epilogue; `method="cublas"`, fp32 output
                     and a scaling kernel
    grouped          per-token and per-expert scales, uneven loads, tile schedule built on the device

The cache of q*s costs 2 bytes a weight (a BF16 copy); it replaces the engine's own BF16 weight, it does not add to it.
CUDA graphs: `linear` and `grouped` read everything from fixed addresses and never synchronise. `linear_uniform` bakes
alpha into the launch: a graph captured before a weight update would replay the old scale, so it refuses capture.
Differs from multiplying dequantized operands: those are rounded to bf16 first, which is a different number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from quads.kernels.encode import INTERPRETED as INTERPRET
from quads.kernels.encode import LAUNCH
from quads.numerics.qdq import WeightQ

if INTERPRET:
    # Triton imports this at the first descriptor argument; it must see the same choice of interpreter as this module.
    import triton.experimental.gluon


class CachedWeight(NamedTuple):
    """qs bf16 [..., N, K] = q*s, exact and contiguous; rcp fp32 [..., N], the remaining factor of every row."""

    qs: Tensor
    rcp: Tensor


class Tile(NamedTuple):
    """Tile sizes over tokens, outputs and K; token tiles per L2 group; pipeline stages; warps.

    persistent: one program per multiprocessor walks over the tiles.
    """

    m: int = 128
    n: int = 256
    k: int = 64
    group: int = 8
    stages: int = 3
    warps: int = 8
    persistent: bool = False


# Best of the sweep in docs/kernels.md, on an H200.
DENSE = Tile(persistent=True)
GROUPED = Tile(group=2, stages=4)
GROUPED_RAC = Tile()  # a residual tile more in shared memory: 3 stages
SMALL = Tile(16, 16, 16, 2, 1, 4)  # for the interpreter


def cache(w: WeightQ) -> CachedWeight:
    """WeightQ(qs [..., N, K], rcp [..., 1 or N, 1]) -> CachedWeight. ValueError when qs is not exact in bf16."""
    qs = w.qs.to(torch.bfloat16)
    if not INTERPRET and w.qs.is_cuda:
        exact = True  # a check would synchronise; quantize_weight guarantees it
    else:
        exact = bool((qs.to(w.qs.dtype) == w.qs).all())
    if not exact:
        raise ValueError(f"weight of shape {tuple(w.qs.shape)} is not exact in bf16; pass q*s, not dequantized values")
    return CachedWeight(qs.contiguous(), w.rcp.float().expand(*qs.shape[:-1], 1).squeeze(-1).contiguous())


@triton.jit
def round_to(y, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """fp32 -> dtype (fp32 or bf16), nearest even; by integer arithmetic where the interpreter would truncate."""
    if HARDWARE or dtype == tl.float32:
        return y.to(dtype)
    else:
        bits = y.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return bits.to(tl.float32, bitcast=True).to(dtype)


@triton.jit
def product(a, b, acc, HARDWARE: tl.constexpr):
    """acc + a @ b with fp32 accumulation; bf16 units, or plain fp32 in the interpreter (products are exact in both)."""
    if HARDWARE:
        return tl.dot(a, b, acc)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def _gemm(
    a_desc, r_desc, w_desc, y_ptr, ar_ptr, wr_ptr, b_ptr, expert_ptr, row_ptr, off_ptr, M, N, K, KW, RT, NM,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GM: tl.constexpr, STAGES: tl.constexpr,
    GROUPED: tl.constexpr, RAC: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    # Persistent (fewer programs than tiles) or one tile a program; GM token tiles in a row share W tiles through L2.
    nn = tl.cdiv(N, BN)
    for pid in tl.range(tl.program_id(0), NM * nn, tl.num_programs(0)):
        first = (pid // (GM * nn)) * GM
        height = min(NM - first, GM)
        pm = first + (pid % (GM * nn)) % height
        pn = (pid % (GM * nn)) // height
        if GROUPED:
            e = tl.load(expert_ptr + pm)
            tiles = tl.where(e < 0, 0, tl.cdiv(K, BK))  # a spare tile of the schedule: no work, nothing stored
            e = tl.maximum(e, 0)
            m0 = tl.load(row_ptr + pm)
            end = tl.where(tiles == 0, 0, tl.load(off_ptr + e + 1))
            wr = wr_ptr + e.to(tl.int64) * N
            w0 = e * N + pn * BN
        else:
            tiles = tl.cdiv(K, BK)
            m0 = pm * BM
            end = M
            wr = wr_ptr
            w0 = pn * BN
        acc = tl.zeros((BM, BN), tl.float32)
        if RAC:
            for kt in tl.range(0, min(RT, tiles), num_stages=STAGES):
                w = w_desc.load([w0, kt * BK]).T
                acc = product(a_desc.load([m0, kt * BK]), w, acc, HARDWARE)
                acc = product(r_desc.load([m0, kt * BK]), w, acc, HARDWARE)
            for kt in tl.range(min(RT, tiles), tiles, num_stages=STAGES):
                acc = product(a_desc.load([m0, kt * BK]), w_desc.load([w0, kt * BK]).T, acc, HARDWARE)
        else:
            for kt in tl.range(0, tiles, num_stages=STAGES):
                k0 = kt * BK
                wk = k0 - tl.where(k0 >= KW, KW, 0)  # [a | r] meets [W | first columns of W], stored once
                acc = product(a_desc.load([m0, k0]), w_desc.load([w0, wk]).T, acc, HARDWARE)
        om = m0 + tl.arange(0, BM)
        on = pn * BN + tl.arange(0, BN)
        inside = on < N
        y = acc * tl.load(ar_ptr + om, mask=om < end, other=0.0)[:, None]
        y = y * tl.load(wr + on, mask=inside, other=0.0)[None, :]
        if BIAS:
            y += tl.load(b_ptr + on, mask=inside, other=0.0)[None, :]
        out = y_ptr + om[:, None].to(tl.int64) * N + on[None, :]
        tl.store(out, round_to(y, y_ptr.dtype.element_ty, HARDWARE), mask=(om < end)[:, None] & inside[None, :])


@triton.jit
def _scale_rows(acc_ptr, y_ptr, ar_ptr, wr_ptr, b_ptr, N, BN: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    on = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = on < N
    y = tl.load(acc_ptr + t * N + on, mask=inside, other=0.0) * tl.load(ar_ptr + t)
    y = y * tl.load(wr_ptr + on, mask=inside, other=0.0)
    if BIAS:
        y += tl.load(b_ptr + on, mask=inside, other=0.0)
    tl.store(y_ptr + t * N + on, round_to(y, y_ptr.dtype.element_ty, HARDWARE), mask=inside)


def scale_rows(acc: Tensor, rcp: Tensor, w: CachedWeight, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """The epilogue on its own: acc fp32 [T, N] -> y [T, N]; used after a cuBLAS product with fp32 output."""
    T, N = acc.shape
    y = torch.empty(T, N, dtype=out_dtype, device=acc.device)
    BN = min(2048, triton.next_power_of_2(N))
    if T:
        _scale_rows[(T, triton.cdiv(N, BN))](
            acc, y, rcp, w.rcp, bias, N, BN=BN, BIAS=bias is not None, HARDWARE=not INTERPRET, num_warps=8, **LAUNCH
        )
    return y


def check_operands(qs: Tensor, rcp: Tensor, w: CachedWeight, experts: bool) -> None:
    """ValueError when activations qs [T, K] bf16, rcp fp32 [T] or [T, 1] and the weight do not fit together."""
    want = 3 if experts else 2
    if w.qs.dim() != want or qs.dim() != 2 or qs.shape[1] != w.qs.shape[-1]:
        raise ValueError(
            f"activations {tuple(qs.shape)} do not fit weight {tuple(w.qs.shape)}; want [T, K], [.., N, K]"
        )
    if qs.dtype != torch.bfloat16 or w.qs.dtype != torch.bfloat16:
        raise ValueError(f"q*s must be bfloat16, got {qs.dtype} and {w.qs.dtype}; use cache() and terms()")
    if rcp.dtype != torch.float32 or rcp.numel() != qs.shape[0]:
        raise ValueError(f"rcp must be fp32 with one value per row ({qs.shape[0]}), got {rcp.dtype} {tuple(rcp.shape)}")
    for name, x in (("activations", qs), ("weight", w.qs), ("rcp", rcp)):
        if not x.is_contiguous() or x.data_ptr() % 16:
            raise ValueError(f"{name} must be contiguous and 16-byte aligned, got strides {x.stride()}; copy it")


def linear_uniform(qs: Tensor, alpha: float, w: CachedWeight, out: Tensor | None = None) -> Tensor:
    """y bf16 [T, N] = alpha * qs @ w.qs^T by cuBLAS; alpha = activation rcp * weight rcp, the same for all elements.

    RuntimeError during graph capture (module docstring).
    """
    if qs.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "linear_uniform bakes alpha into a CUDA graph, where no weight update reaches it; use linear"
        )
    return uniform_product(qs, alpha, w.qs, out)


def uniform_product(qs: Tensor, alpha: float, w_NK: Tensor, out: Tensor | None = None) -> Tensor:
    """The product of `linear_uniform` without its capture check: for callers that replay within one weight version."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False  # else split-K partial sums are rounded to bf16
    try:
        y = qs.new_empty(qs.shape[0], w_NK.shape[0]) if out is None else out
        return torch.addmm(y, qs, w_NK.mT, beta=0, alpha=alpha, out=y)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


def linear(
    qs: Tensor,
    rcp: Tensor,
    w: CachedWeight,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    method: str = "triton",
    tile: Tile | None = None,
) -> Tensor:
    """y [T, N] from qs bf16 [T, K], rcp fp32 [T] or [T, 1]; out_dtype bf16 or fp32; bias fp32 [N].

    method: "triton" or "cublas" (CUDA only). ValueError for operands that do not fit.
    """
    check_operands(qs, rcp, w, experts=False)
    bias = None if bias is None else bias.float().contiguous()
    if method == "cublas":
        return scale_rows(torch.mm(qs, w.qs.mT, out_dtype=torch.float32), rcp, w, out_dtype, bias)
    if method != "triton":
        raise ValueError(f"method {method!r} is unknown; known: triton, cublas")
    return launch(qs, None, rcp, w, out_dtype, bias, tile or (SMALL if INTERPRET else DENSE))


def launch(
    qs: Tensor,
    residual: Tensor | None,
    rcp: Tensor,
    w: CachedWeight,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    tile: Tile,
    groups: Groups | None = None,
) -> Tensor:
    """One launch of the kernel; residual bf16 [T, KR]: the second term of the first KR columns (form D).

    qs with more columns than w: columns from K on meet the weight's first columns again.
    """
    T, K = qs.shape
    N, KW = w.qs.shape[-2:]
    if K > KW and (KW % tile.k or K > 2 * KW):
        raise ValueError(f"{K} columns wrap around a weight of {KW}: needs K % {tile.k} == 0 and at most twice K")
    y = torch.empty(T, N, dtype=out_dtype, device=qs.device)
    if not T:
        return y
    a = TensorDescriptor.from_tensor(qs, [tile.m, tile.k])
    r = a if residual is None else TensorDescriptor.from_tensor(residual, [tile.m, tile.k])
    weight = TensorDescriptor.from_tensor(w.qs.view(-1, KW), [tile.n, tile.k])
    tiles_m = triton.cdiv(T, tile.m) if groups is None else groups.expert.numel()
    tiles_r = 0 if residual is None else triton.cdiv(residual.shape[1], tile.k)
    expert, row, offsets = (None, None, None) if groups is None else groups[:3]
    programs = tiles_m * triton.cdiv(N, tile.n)
    if tile.persistent and qs.is_cuda:
        programs = min(programs, torch.cuda.get_device_properties(qs.device).multi_processor_count)
    _gemm[(programs,)](
        a, r, weight, y, rcp, w.rcp, bias, expert, row, offsets, T, N, K, KW, tiles_r, tiles_m,
        BM=tile.m, BN=tile.n, BK=tile.k, GM=tile.group, STAGES=tile.stages,
        GROUPED=groups is not None, RAC=residual is not None, BIAS=bias is not None, HARDWARE=not INTERPRET,
        num_warps=tile.warps, num_stages=tile.stages, **LAUNCH,
    )  # fmt: skip
    return y


class Groups(NamedTuple):
    """Which expert and first row every token tile has (int32 [tiles], expert -1: no work), offsets int32 [E + 1]."""

    expert: Tensor
    row: Tensor
    offsets: Tensor
    block: int


def group_rows(offsets: Tensor, rows: int, block: int) -> Groups:
    """Tile schedule for `rows` rows sorted by expert; built on the device, no synchronisation, any loads (0 too).

    offsets int32 [E + 1], first 0, last `rows`. The number of tiles is the worst case rows/block + experts.
    """
    experts = offsets.numel() - 1
    tiles = triton.cdiv(rows, block) + min(experts, rows)
    ends = torch.cumsum((offsets[1:] - offsets[:-1] + block - 1) // block, 0, dtype=torch.int32)
    index = torch.arange(tiles, dtype=torch.int32, device=offsets.device)
    expert = torch.searchsorted(ends, index, right=True).to(torch.int32)
    safe = expert.clamp(max=experts - 1).long()
    before = torch.where(safe > 0, ends[(safe - 1).clamp(min=0)], 0)
    row = offsets[safe] + (index - before) * block
    return Groups(torch.where(expert < experts, expert, -1), row.to(torch.int32), offsets, block)


def grouped(
    qs: Tensor,
    rcp: Tensor,
    w: CachedWeight,
    offsets: Tensor,
    out_dtype: torch.dtype,
    tile: Tile | None = None,
    groups: Groups | None = None,
) -> Tensor:
    """y [R, N]: rows sorted by expert, w.qs [E, N, K], w.rcp [E, N], offsets int32 [E + 1].

    groups: a schedule of `group_rows` for the same offsets and tile.m (w13 and w2 of one layer share it).
    """
    check_operands(qs, rcp, w, experts=True)
    tile = tile or (SMALL if INTERPRET else GROUPED)
    groups = groups or group_rows(offsets, qs.shape[0], tile.m)
    if groups.block != tile.m:
        raise ValueError(f"the schedule has tiles of {groups.block} rows, the kernel {tile.m}; build it with tile.m")
    return launch(qs, None, rcp, w, out_dtype, None, tile, groups)
