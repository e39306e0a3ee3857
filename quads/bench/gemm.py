# SPDX-License-Identifier: Apache-2.0
"""GEMM rows of the benchmark: exact emulation, packed weights, RAC forms; bars 6 to 9.

    dense    [4096, 2048] x [6144, 2048]^T     compute-bound (prefill)
    decode   128 experts of [1536, 2048], 16 tokens each     bound by weight bytes
    experts  the same with 256 tokens each, even and uneven loads
    thin     [16, 2048] x [6144, 2048]^T       one linear at decode

Every row's operands are quantized random data, and its output is compared with the float64 sum of the same q*s, put
through the definition's fp32 roundings: a row prints the share of outputs that differ after rounding to bf16 (fp32
accumulation in another order; one bf16 step at most). Quantizing activations is timed elsewhere, not here.
`rows(sweep=True)` adds the tile sizes that were tried; a sweep's best is optimistic by about the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from quads.bench.protocol import Bar, Case, InexactError, Measured, best, measure, ratio, sets_beyond_l2
from quads.kernels import gemm, rac_gemm
from quads.kernels.gemm import CachedWeight, Tile
from quads.kernels.packed import PackedTile, PackedWeight, packed, prepack
from quads.kernels.rac_gemm import Terms
from quads.numerics import nvfp4
from quads.numerics.qdq import quantize_weight, weight_amax
from quads.numerics.rac import RacSpec

# Share of bf16 outputs that may differ from the float64 sum: measured 0 and at most 8e-8 (4 of 50 million).
LIMIT_PLAIN, LIMIT_RAC = 2e-6, 2e-6
SPEC = RacSpec(0.5)
H, I2, ROWS, EXPERTS = 2048, 6144, 4096, 128
PACKED_SWEEP = [
    (16, 128, 3, 4),
    (16, 128, 3, 4, 128),
    (16, 128, 2, 4),
    (16, 128, 4, 4),
    (16, 64, 4, 4),
    (16, 256, 3, 8),
]
DENSE_SWEEP = [gemm.DENSE, Tile(), Tile(group=16), Tile(128, 128, 64, 8, 4, 4)]
GROUPED_SWEEP = [gemm.GROUPED, Tile(), Tile(group=2, persistent=True), Tile(128, 128, 64, 8, 4, 4)]
MAX_RAC_STAGES = 3  # 128 x 256 tiles and a residual tile fill shared memory
CEILINGS = {
    "dense": "bf16 cuBLAS",
    "decode": "bmm",
    "experts even": "bmm",
    "experts uneven": "_grouped_mm",
    "thin": "bf16 cuBLAS",
}


class Weights:
    """A quantized random weight [(E,) N, K] in all layouts that the cases need."""

    def __init__(self, *shape: int, order: Tensor | None = None):
        w = torch.randn(*shape, device="cuda").mul_(0.02).to(torch.bfloat16)
        self.quantized = quantize_weight(w, "nvfp4")
        self.cached = gemm.cache(self.quantized)
        nv = nvfp4.quantize(w.float(), nvfp4.global_scale(weight_amax(w)), "verl_export")
        self.packed = prepack(nv.codes, nv.scales, self.quantized.rcp)
        self.packed_ordered = prepack(nv.codes, nv.scales, self.quantized.rcp, order)


def reference(t: Terms, w: CachedWeight, offsets: Tensor | None) -> Tensor:
    """bf16 [T, N]: float64 sums, then the definition's roundings."""
    a = t.first.double() if t.second is None else t.first.double() + t.second.double()
    if offsets is None:
        return ((a @ w.qs.double().mT).float() * t.rcp * w.rcp).to(torch.bfloat16)
    bounds = offsets.tolist()
    parts = []
    for e, (lo, hi) in enumerate(pairwise(bounds)):
        parts.append(((a[lo:hi] @ w.qs[e].double().mT).float() * t.rcp[lo:hi] * w.rcp[e]).to(torch.bfloat16))
    return torch.cat(parts)


def agree(run: Callable[[], Tensor], expected: Tensor, limit: float) -> Callable[[], str]:
    """Check of a case: share of different bf16 outputs at most `limit`, none by more than one step."""

    def check() -> str:
        got = run().reshape(expected.shape)
        different = got != expected
        share = float(different.float().mean())
        step = (got.float() - expected.float()).abs() / expected.float().abs().clamp(min=1e-30)
        worst = float(step[different].max()) if share else 0.0
        if not share <= limit or not worst <= 2**-7 * 1.01:  # NaN fails both
            raise InexactError(f"{share:.2e} of {got.numel()} outputs differ (limit {limit:g}), worst {worst:.2e}")
        return f"{different.sum()} of {got.numel()} differ by one step"

    return check


def _mask(k: int, share: float = 0.5) -> Tensor:
    blocks = torch.zeros(k // 16, dtype=torch.bool)
    blocks[torch.randperm(k // 16)[: int(share * k // 16)]] = True
    return blocks.repeat_interleave(16).cuda()


class Dense:
    """Operands of the dense group: `sets` buffer sets of activations, one weight in every layout."""

    def __init__(self, sets: int):
        self.mask = _mask(H)
        self.order, self.blocks = rac_gemm.masked_first(self.mask), rac_gemm.selected_blocks(self.mask)
        self.w = Weights(I2, H).cached
        self.x = [torch.randn(ROWS, H, device="cuda") for _ in range(sets)]
        self.plain = [rac_gemm.terms(v) for v in self.x]
        self.rac = [rac_gemm.terms(v, SPEC, self.mask) for v in self.x]
        self.augmented, self.ordered = rac_gemm.augment(self.w, self.blocks), rac_gemm.order_weight(self.w, self.order)
        self.sorted_terms = [rac_gemm.order_terms(t, self.order, self.blocks.numel()) for t in self.rac]

    def references(self, alpha: float) -> dict[str, Tensor]:
        """Expected outputs: per-token scales and one scale `alpha`, without and with RAC."""
        plain, rac, ones = self.plain[0], self.rac[0], torch.ones_like(self.plain[0].rcp)
        one = CachedWeight(self.w.qs, torch.full_like(self.w.rcp, alpha))
        return {
            "token": reference(plain, self.w, None),
            "token rac": reference(rac, self.w, None),
            "one": reference(plain._replace(rcp=ones), one, None),
            "one rac": reference(rac._replace(rcp=ones), one, None),
        }


Row = tuple[str, Callable[[int], Tensor], str | None]


def _dense_library(d: Dense, alpha: float) -> list[Row]:
    """(name, run, reference) of the rows that cuBLAS computes."""
    bf16, cat = [v.to(torch.bfloat16) for v in d.x], [rac_gemm.concatenate(t, d.blocks) for t in d.rac]
    w, w_S = d.w, rac_gemm.take_blocks(d.w.qs, d.blocks)
    y = torch.empty(ROWS, I2, device="cuda", dtype=torch.bfloat16)
    out = torch.bfloat16
    return [
        ("bf16 cuBLAS", lambda i: torch.matmul(bf16[i], w.qs.mT, out=y), None),
        ("emulated, one scale, cuBLAS", lambda i: gemm.uniform_product(d.plain[i].first, alpha, w.qs, y), "one"),
        (
            "emulated, per token, cuBLAS fp32 + scaling",
            lambda i: gemm.linear(d.plain[i].first, d.plain[i].rcp, w, out, method="cublas"),
            "token",
        ),
        (
            "RAC 50 % form A, one scale, cuBLAS",
            lambda i: gemm.uniform_product(cat[i], alpha, d.augmented.qs, y),
            "one rac",
        ),
        ("RAC 50 % form B, cuBLAS fp32", lambda i: rac_gemm.form_b(d.rac[i], w, w_S, d.blocks, out), "token rac"),
    ]


def _dense_triton(d: Dense, tile: Tile) -> list[Row]:
    """The same of one tile of the Triton kernel, per-token scales."""
    once = [torch.cat([t.first, t.second], -1) for t in d.sorted_terms]
    tag, out = f"Triton {tuple(tile)}", torch.bfloat16
    found: list[Row] = [
        (
            f"emulated, per token, {tag}",
            lambda i: gemm.linear(d.plain[i].first, d.plain[i].rcp, d.w, out, tile=tile),
            "token",
        ),
        (
            f"RAC 50 % form A1, per token, {tag}",
            lambda i: gemm.launch(once[i], None, d.rac[i].rcp, d.ordered, out, None, tile),
            "token rac",
        ),
    ]
    if tile.stages <= MAX_RAC_STAGES:
        run = lambda i: rac_gemm.form_d(d.sorted_terms[i], d.ordered, out, tile=tile)  # noqa: E731
        found.append((f"RAC 50 % form D, per token, {tag}", run, "token rac"))
    return found


def dense(sweep: bool) -> Iterator[list[Measured]]:
    """Group `dense`."""
    sets = sets_beyond_l2(2 * (ROWS * H + I2 * H + ROWS * I2), 3)
    d = Dense(sets)
    alpha = float((d.plain[0].rcp[0] * d.w.rcp[0]).item())
    expected = d.references(alpha)
    found = _dense_library(d, alpha)
    for tile in DENSE_SWEEP if sweep else [gemm.DENSE]:
        found += _dense_triton(d, tile)
    cases = []
    for name, run, key in found:
        limit = LIMIT_RAC if key and key.endswith("rac") else LIMIT_PLAIN
        check = agree(lambda run=run: run(0), expected[key], limit) if key else None
        cases.append(Case(name, run, flops=2 * ROWS * H * I2, check=check))
    yield measure("dense", cases, sets)


def _packed_clone(w: PackedWeight) -> PackedWeight:
    return w._replace(words=w.words.clone(), scales=w.scales.clone())


def decode(sweep: bool) -> Iterator[list[Measured]]:
    """Group `decode`: 128 experts, 16 tokens each."""
    N, tokens, sets = 1536, 16, 2
    mask = _mask(H)
    order, blocks = rac_gemm.masked_first(mask), rac_gemm.selected_blocks(mask)
    w = Weights(EXPERTS, N, H, order=order)
    R = EXPERTS * tokens
    offsets = torch.arange(EXPERTS + 1, dtype=torch.int32, device="cuda") * tokens
    x = torch.randn(R, H, device="cuda")
    plain, rac = rac_gemm.terms(x), rac_gemm.terms(x, SPEC, mask)
    packs = [w.packed, _packed_clone(w.packed)]
    ordered = [w.packed_ordered, _packed_clone(w.packed_ordered)]
    qs = [w.cached, CachedWeight(w.cached.qs.clone(), w.cached.rcp)]
    bf16 = x.to(torch.bfloat16)
    cat3 = rac_gemm.concatenate(rac, blocks).view(EXPERTS, tokens, -1)
    aug = [rac_gemm.augment(v, blocks).qs for v in qs]
    y = torch.empty(EXPERTS, tokens, N, device="cuda", dtype=torch.bfloat16)
    plane = plain.first[None].contiguous()
    planes = torch.stack([rac_gemm.reorder(rac.first, order), rac_gemm.reorder(rac.second, order)])
    ref, ref_rac = reference(plain, w.cached, offsets), reference(rac, w.cached, offsets)
    size = EXPERTS * N * H * 9 // 16
    ends = offsets[1:].contiguous()
    cases = [
        Case("bmm", lambda i: torch.bmm(bf16.view(EXPERTS, tokens, H), qs[i].qs.mT, out=y), bytes=2 * EXPERTS * N * H),
        Case("_grouped_mm", lambda i: torch._grouped_mm(bf16, qs[i].qs.mT, ends), bytes=2 * EXPERTS * N * H),
        Case("RAC 50 % form A bmm, without scales", lambda i: torch.bmm(cat3, aug[i].mT, out=y)),
    ]
    for tile in (PackedTile(*t) for t in (PACKED_SWEEP if sweep else [PackedTile()])):
        tag = str(tuple(tile))

        def plain_run(i: int, tile: PackedTile = tile) -> Tensor:
            return packed(plane, plain.rcp, packs[i], torch.bfloat16, offsets, tile=tile)

        def rac_run(i: int, tile: PackedTile = tile, masked: int | None = blocks.numel()) -> Tensor:
            return packed(planes, rac.rcp, ordered[i], torch.bfloat16, offsets, masked, tile)

        def full(i: int, run: Callable[..., Tensor] = rac_run) -> Tensor:
            return run(i, masked=None)

        for name, run, wanted, limit in (
            ("packed", plain_run, ref, LIMIT_PLAIN),
            ("RAC 50 % form D packed", rac_run, ref_rac, LIMIT_RAC),
            ("RAC 100 % cost, form D packed", full, ref_rac, LIMIT_RAC),
        ):
            check = agree(lambda run=run: run(0), wanted, limit)
            cases.append(Case(f"{name} {tag}", run, bytes=size, check=check))
    yield measure("decode", cases, sets)
    yield from experts(sweep, w, mask)


def experts(sweep: bool, w: Weights, mask: Tensor) -> Iterator[list[Measured]]:
    """Groups `experts even` and `experts uneven`: 256 tokens an expert on average."""
    N, R, sets = 1536, EXPERTS * 256, 2
    order, blocks = rac_gemm.masked_first(mask), rac_gemm.selected_blocks(mask)
    ordered = rac_gemm.order_weight(w.cached, order)
    x = torch.randn(R, H, device="cuda")
    plain = rac_gemm.terms(x)
    rac = rac_gemm.order_terms(rac_gemm.terms(x, SPEC, mask), order, blocks.numel())
    share = torch.distributions.Dirichlet(torch.full((EXPERTS,), 3.0)).sample()
    uneven = torch.cat([torch.zeros(1), (share.cumsum(0) * R).round()]).to(torch.int32)
    uneven[-1] = R
    even = torch.arange(EXPERTS + 1, dtype=torch.int32) * 256
    bf16 = x.to(torch.bfloat16)
    natural = rac_gemm.terms(x, SPEC, mask)
    for name, offsets in (("experts even", even.cuda()), ("experts uneven", uneven.cuda())):
        ref, ref_rac = reference(plain, w.cached, offsets), reference(natural, w.cached, offsets)
        ends = offsets[1:].contiguous()
        flops = 2 * R * N * H
        cases = [Case("_grouped_mm", lambda i, ends=ends: torch._grouped_mm(bf16, w.cached.qs.mT, ends), flops=flops)]
        if name == "experts even":
            cases.append(Case("bmm", lambda i: torch.bmm(bf16.view(EXPERTS, 256, H), w.cached.qs.mT), flops=flops))
        for tile in GROUPED_SWEEP if sweep else [gemm.GROUPED, gemm.GROUPED_RAC]:

            def run(i: int, tile: Tile = tile, offsets: Tensor = offsets) -> Tensor:
                return gemm.grouped(plain.first, plain.rcp, w.cached, offsets, torch.bfloat16, tile)

            def run_rac(i: int, tile: Tile = tile, offsets: Tensor = offsets) -> Tensor:
                return rac_gemm.form_d_grouped(rac, ordered, offsets, torch.bfloat16, tile)

            check = agree(lambda run=run: run(0), ref, LIMIT_PLAIN)
            cases.append(Case(f"emulated grouped {tuple(tile)}", run, flops=flops, check=check))
            if tile.stages <= MAX_RAC_STAGES:
                check = agree(lambda run=run_rac: run(0), ref_rac, LIMIT_RAC)
                cases.append(Case(f"RAC 50 % form D grouped {tuple(tile)}", run_rac, flops=flops, check=check))
        yield measure(name, cases, sets)


def thin(sweep: bool) -> Iterator[list[Measured]]:
    """Group `thin`: one linear, 16 tokens."""
    w = Weights(I2, H)
    sets = sets_beyond_l2(I2 * H * 9 // 16)
    packs = [_packed_clone(w.packed) for _ in range(sets)]
    qs = [w.cached.qs.clone() for _ in range(sets)]
    x = torch.randn(16, H, device="cuda")
    t = rac_gemm.terms(x)
    bf16, plane = x.to(torch.bfloat16), t.first[None].contiguous()
    ref = reference(t, w.cached, None)
    cases = [Case("bf16 cuBLAS", lambda i: torch.matmul(bf16, qs[i].mT), bytes=2 * I2 * H)]
    for tile in (PackedTile(*v) for v in ([(16, 64, 4, 4), (16, 128, 4, 4)] if sweep else [(16, 64, 4, 4)])):

        def run(i: int, tile: PackedTile = tile) -> Tensor:
            return packed(plane, t.rcp, packs[i], torch.bfloat16, tile=tile)

        check = agree(lambda run=run: run(0), ref, LIMIT_PLAIN)
        cases.append(Case(f"packed {tuple(tile)}", run, bytes=I2 * H * 9 // 16, check=check))
    yield measure("thin", cases, sets)


def rows(sweep: bool = False) -> list[Measured]:
    """All groups; needs one GPU of compute capability 9 or newer and about 30 GB."""
    torch.manual_seed(torch.seed() % 2**31)
    found: list[Measured] = []
    for part in (dense, decode, thin):
        for group in part(sweep):
            found += group
        torch.cuda.empty_cache()
    return found


def bars(found: list[Measured]) -> list[Bar]:
    """Bars 6 to 9; 6b and 8b are the same ratios with the per-token scales of the definition (own requirement)."""
    dense_rows = [row for row in found if row.group == "dense"]
    decode_rows = [row for row in found if row.group == "decode"]

    def us(group: list[Measured], prefix: str) -> float | None:
        row = best(group, prefix)
        return row.us if row else None

    bf16, one, token = (us(dense_rows, name) for name in ("bf16", "emulated, one scale", "emulated, per token"))
    bmm, pack = us(decode_rows, "bmm"), us(decode_rows, "packed")
    form_a, form_a1 = us(dense_rows, "RAC 50 % form A, one scale"), us(dense_rows, "RAC 50 % form A1")
    best_decode = min([v for v in (pack, bmm) if v], default=None)
    form_d = us(decode_rows, "RAC 50 % form D")
    return [
        Bar("6", "emulated linear (one scale) / bf16 cuBLAS", ratio(one, bf16), 1.05, 1.01, "lower"),
        Bar(
            "6b",
            "no bar, regression limit: emulated linear, per-token scales / bf16 cuBLAS",
            ratio(token, bf16),
            1.15,
            1.01,
            "lower",
        ),
        Bar("7", "packed grouped kernel / bmm, 128 x 16", ratio(pack, bmm), 0.76, 0.50, "lower"),
        Bar("8", "RAC k=50 % over best k=0, compute-bound (form A)", ratio(form_a, one), 1.45, 1.35, "lower"),
        Bar(
            "8b",
            "no bar, regression limit: 8 with per-token scales (form A1)",
            ratio(form_a1, token),
            1.45,
            1.35,
            "lower",
        ),
        Bar("9", "RAC k=50 % over best k=0, 128 x 16 (form D)", ratio(form_d, best_decode), 1.35, 1.15, "lower"),
    ]
