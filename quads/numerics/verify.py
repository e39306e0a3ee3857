# SPDX-License-Identifier: Apache-2.0
"""Check a folder of golden vectors: `python -m quads.numerics.verify DIR`.

Prints one line per file and profile (or part): pass with what was compared, or the first differing element with index,
got and expected. Exit status 0 only when every line passes; 1 on any failure, 2 when there is nothing to check.

File kinds, told apart by name (tests/vectors/README.md describes the arrays):

    nvfp4_*.npz         one tensor, every profile; swizzled scales; bytes that approximate reciprocals may change
    experts.npz         per-expert global scales, the shared path of `qdq`, a fused w1/w3 pair
    rac.npz             two passes, masks, both choices of the residual's global scale, the GEMM
    rac_ties.npz        masks with equal scores
    fp8_and_casts.npz   FP8 at every granularity, cast tables

Contract: bytes and scales are compared bit for bit, dequantized values exactly (-0.0 equals 0.0), GEMM outputs within
2e-6 of sum |a||w|. Differs from a lenient checker: an array or profile that is not understood is a failure, so that a
new folder never passes by being skipped.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from zipfile import BadZipFile

import torch
from torch import Tensor

from quads.numerics import formats, fp8, nvfp4, qdq, rac, swizzle
from quads.numerics.vectors import Checks, VectorError, Vectors

GEMM_TOLERANCE = 2e-6  # of sum |a||w|, fp32 accumulation over K <= 512 (the vectors' own bound; measured 4.5e-7)
_WEIGHT, _ACTIVATION = "verl_export", "vllm_cuda"
Line = tuple[str, Checks]


def _check_quantized(c: Checks, nv: nvfp4.NVFP4, packed: Tensor, scales: Tensor, prefix: str = "") -> None:
    c.equal(f"{prefix}codes", nv.codes, nvfp4.unpack(packed))
    c.equal(f"{prefix}packed", nvfp4.pack(nv.codes), packed)
    c.equal(f"{prefix}scale", nv.scales, scales)


def verify_nvfp4(v: Vectors) -> Iterator[Line]:
    """nvfp4_*: every implemented profile, any other profile the file names, swizzles, approximate reciprocals."""
    x = v.first("x_bf16", "x_f32")
    gs = v["gs"]
    others = [p for p in v.suffixes("packed__", "scale__", "deq__") if p not in nvfp4.PROFILES]
    for profile in nvfp4.PROFILES:
        c = Checks()
        nv = nvfp4.quantize(x, gs, profile)
        # An array absent for a profile is by definition the canonical one.
        _check_quantized(c, nv, v.first(f"packed__{profile}", "packed"), v.first(f"scale__{profile}", "scale"))
        c.equal("deq", nvfp4.dequantize(nv, profile), v.first(f"deq__{profile}", "deq_f32"))
        if profile == _ACTIVATION:
            c.equal("amax", x.abs().amax().float(), v["amax"])
        yield profile, c
    yield from _not_implemented(v, others, "packed__", "scale__", "deq__")
    for layout in v.suffixes("scale_swizzled_"):
        yield f"swizzle {layout}", _swizzled(v["scale"], v[f"scale_swizzled_{layout}"], layout)
    c = Checks()
    scales_differ, codes_differ = nvfp4.reciprocal_ambiguity(x, gs)
    c.equal("amb_scale", scales_differ, v.bits("amb_scale", scales_differ.shape))
    c.equal("amb_code", codes_differ, v.bits("amb_code", codes_differ.shape))
    yield "approximate reciprocals", c


def _not_implemented(v: Vectors, profiles: list[str], *prefixes: str) -> Iterator[Line]:
    for profile in profiles:
        for prefix in prefixes:
            if prefix + profile in v:
                v[prefix + profile]  # counts as read: this line reports it
        c = Checks()
        c.fail("not implemented")
        yield profile, c


def _swizzled(scales: Tensor, expected: Tensor, layout: str) -> Checks:
    c = Checks()
    if layout not in ("128x4", "8x4"):
        c.fail("not implemented")
        return c
    c.equal("swizzled", swizzle.swizzle(scales, layout), expected)
    if c.failure is None:
        c.equal("unswizzled", swizzle.unswizzle(expected, *scales.shape[-2:], layout), scales)
    return c


def verify_experts(v: Vectors) -> Iterator[Line]:
    """experts: one global scale per expert, every profile the file names, the fused pair and the qdq path."""
    w = v["w_bf16"]
    amax = qdq.weight_amax(w)
    c = Checks()
    c.equal("gs", nvfp4.global_scale(amax).flatten(), v["gs"])
    c.equal("gs_vllm_online", nvfp4.global_scale(amax.clamp(min=1e-8)).flatten(), v["gs_vllm_online"])
    c.equal("gsi_modelopt", formats.divide(amax, formats.NVFP4_RANGE).flatten(), v["gsi_modelopt"])
    yield "global scales", c

    gs = v["gs"].view(-1, 1, 1)
    prefixes = ("packed__", "scale__", "deq_f32__", "scale_swizzled_128x4__", "scale_swizzled_8x4__")
    profiles = v.suffixes(*prefixes)
    for profile in [p for p in profiles if p in nvfp4.PROFILES]:
        c = Checks()
        nv = nvfp4.quantize(w, gs, profile)
        _check_quantized(c, nv, v[f"packed__{profile}"], v[f"scale__{profile}"])
        if f"deq_f32__{profile}" in v:
            c.equal("deq", nvfp4.dequantize(nv, profile), v[f"deq_f32__{profile}"])
        yield profile, c
        for layout in ("128x4", "8x4"):
            if f"scale_swizzled_{layout}__{profile}" in v:
                expected = v[f"scale_swizzled_{layout}__{profile}"]
                yield f"{profile} swizzle {layout}", _swizzled(v[f"scale__{profile}"], expected, layout)
    yield from _not_implemented(v, [p for p in profiles if p not in nvfp4.PROFILES], *prefixes)

    c = Checks()
    stored = nvfp4.NVFP4(nvfp4.unpack(v[f"packed__{_WEIGHT}"]), v[f"scale__{_WEIGHT}"], gs)
    shared = qdq.quantize_weight(w, "nvfp4")
    c.equal("qs", shared.qs, nvfp4.to_qs(stored))
    c.equal("rcp", shared.rcp, gs.reciprocal())
    yield "qdq.quantize_weight", c
    yield f"w13 {_WEIGHT}", _fused_pair(v, w[0], w[1])


def _fused_pair(v: Vectors, w1: Tensor, w3: Tensor) -> Checks:
    """w1 and w3 (gate and up) share the smaller divisor, which is the divisor of the larger amax."""
    c = Checks()
    gs = torch.minimum(v["gs"][0], v["gs"][1])
    c.equal("gs", gs, v["w13_shared_gs"])
    w13 = torch.cat((w1, w3))
    _check_quantized(c, nvfp4.quantize(w13, gs, _WEIGHT), v["w13_packed"], v["w13_scale"])
    amax = torch.maximum(qdq.weight_amax(w1), qdq.weight_amax(w3))
    stored = nvfp4.NVFP4(nvfp4.unpack(v["w13_packed"]), v["w13_scale"], gs)
    separate = [qdq.quantize_weight(w, "nvfp4", amax).qs for w in (w1, w3)]
    c.equal("qdq qs", torch.cat(separate), nvfp4.to_qs(stored))
    return c


def verify_rac(v: Vectors) -> Iterator[Line]:
    """rac: both operands, the residual, then every tag <granularity>_<score>_k<permille>_<shared|own>."""
    x, w, gs_a, gs_w = v["x_bf16"], v["w_bf16"], v["gs_a"], v["gs_w"]
    q1, wq = nvfp4.quantize(x, gs_a, _ACTIVATION), nvfp4.quantize(w, gs_w, _WEIGHT)
    residual = x.float() - nvfp4.dequantize(q1)
    c = Checks()
    _check_quantized(c, q1, v["q1_packed"], v["q1_scale"], "q1 ")
    c.equal("residual", residual, v["residual_f32"])
    c.close("y_exact", x.float() @ w.float().mT, v["y_exact_bf16_x_w"], GEMM_TOLERANCE * (x.abs() @ w.abs().mT))
    yield _ACTIVATION, c
    c = Checks()
    _check_quantized(c, wq, v["w_packed"], v["w_scale"], "w ")
    c.equal("alpha_recip_prod", (gs_a * gs_w).reciprocal(), v["alpha_recip_prod"])
    c.equal("alpha_prod_recip", gs_a.reciprocal() * gs_w.reciprocal(), v["alpha_prod_recip"])
    yield _WEIGHT, c

    weight = qdq.WeightQ(nvfp4.to_qs(wq), gs_w.reciprocal().view(1, 1))
    for tag in v.suffixes("mask__", "q2_packed__", "q2_scale__", "gs2__", "y__"):
        yield tag, _rac_tag(v, tag, q1, residual, weight)


def _rac_tag(v: Vectors, tag: str, q1: nvfp4.NVFP4, residual: Tensor, weight: qdq.WeightQ) -> Checks:
    c = Checks()
    parsed = re.fullmatch(r"(channel|block16)_(sumsq|abs)_k(\d+)_(shared|own)", tag)
    if parsed is None:
        c.fail("not implemented")
        return c
    granularity, score, permille, scale_of = parsed.groups()
    spec = rac.RacSpec(int(permille) / 1000, granularity, "batch", score)
    mask = rac.residual_mask(residual, spec)
    c.equal("mask", mask, v.bits(f"mask__{tag}", mask.shape))
    if f"q2_packed__{tag}" not in v:
        return c
    masked = torch.where(mask, residual, 0.0)
    gs2 = q1.gs if scale_of == "shared" else nvfp4.global_scale(masked.abs().amax())
    q2 = nvfp4.quantize(masked, gs2, _ACTIVATION)
    c.equal("gs2", gs2, v[f"gs2__{tag}"])
    _check_quantized(c, q2, v[f"q2_packed__{tag}"], v[f"q2_scale__{tag}"], "q2 ")
    passes = [qdq.ActivationQ(nvfp4.to_qs(q), q.gs.reciprocal().view(1, 1)) for q in (q1, q2)]
    if scale_of == "shared":  # the engine's form: one operand, one epilogue
        passes = [qdq.ActivationQ(passes[0].qs + passes[1].qs, passes[0].rcp)]
    y = sum(qdq.emulated_linear(a, weight, torch.float32) for a in passes)
    c.close("y", y, v[f"y__{tag}"], GEMM_TOLERANCE * v["y_abs"])
    return c


def verify_rac_ties(v: Vectors) -> Iterator[Line]:
    """rac_ties: masks <channel|block>_k<permille> of a residual with many equal scores."""
    x = v["x_bf16"]
    residual = x.float() - nvfp4.dequantize(nvfp4.quantize(x, v["gs_a"], _ACTIVATION))
    for tag in v.suffixes("mask__"):
        c = Checks()
        parsed = re.fullmatch(r"(channel|block|block16)_k(\d+)", tag)
        expected = v.bits(f"mask__{tag}", residual.shape[-1:])
        if parsed is None:
            c.fail("not implemented")
        else:
            granularity = "channel" if parsed[1] == "channel" else "block16"
            spec = rac.RacSpec(int(parsed[2]) / 1000, granularity, "batch")
            c.equal("mask", rac.residual_mask(residual, spec), expected)
        yield tag, c


def _check_fp8(got: fp8.FP8, q: Tensor, scale: Tensor) -> Checks:
    c = Checks()
    c.equal("scale", got.scale, scale)
    c.equal("q", got.q.view(torch.uint8), q)
    return c


def verify_fp8_and_casts(v: Vectors) -> Iterator[Line]:
    """fp8_and_casts: per tensor (dynamic, static), token, group and block variants, E4M3 and E2M1 cast tables."""
    x, w = v["x_bf16"], v["w_bf16"]
    static = v["pt_static_scale"]
    yield "per tensor", _check_fp8(fp8.per_tensor(x), v["pt_q"], v["pt_scale"])
    yield "per tensor static", _check_fp8(fp8.per_tensor(x, static), v["pt_static_q"], static)
    yield "per token", _check_fp8(fp8.per_token(x), v["tok_q"], v["tok_scale"].unsqueeze(-1))

    grids: tuple[tuple[str, str, Callable[[Tensor, str], fp8.FP8], Tensor], ...] = (
        ("g128_q__", "g128_scale__", fp8.per_group, x),
        ("w_q__", "w_scale_inv__", fp8.per_block, w),
    )
    for q_prefix, scale_prefix, make, tensor in grids:
        for variant in v.suffixes(q_prefix, scale_prefix):
            if variant in fp8.VARIANTS[make.__name__]:
                expected = v[q_prefix + variant], v[scale_prefix + variant]
                yield f"{make.__name__} {variant}", _check_fp8(make(tensor, variant), *expected)
            else:
                yield from _not_implemented(v, [variant], q_prefix, scale_prefix)
    yield from _casts(v)


def _casts(v: Vectors) -> Iterator[Line]:
    c = Checks()
    c.equal("byte", formats.encode_e4m3(v["cast_in"]), v["cast_e4m3_satfinite"])
    yield "cast e4m3 saturating", c
    c = Checks()
    c.equal("byte", formats.encode_e4m3(v["cast_in"], saturate=False), v["cast_e4m3_nosat"])
    yield "cast e4m3 to NaN beyond range", c
    c = Checks()
    c.equal("code", formats.encode_e2m1(formats.round_e2m1(v["cast4_in"])), v["cast4_code"])
    yield "cast e2m1", c


KINDS: tuple[tuple[str, Callable[[Vectors], Iterator[Line]]], ...] = (
    (r"nvfp4_.+", verify_nvfp4),
    (r"experts", verify_experts),
    (r"rac", verify_rac),
    (r"rac_ties", verify_rac_ties),
    (r"fp8_and_casts", verify_fp8_and_casts),
)


def _failed(message: str) -> Checks:
    c = Checks()
    c.fail(message)
    return c


def verify_file(path: Path, device: str = "cpu") -> Iterator[Line]:
    """(profile or part, its checks) for one npz file; unreadable files and unknown arrays become failing lines."""
    check = next((function for pattern, function in KINDS if re.fullmatch(pattern, path.stem)), None)
    if check is None:
        yield "file", _failed("unknown kind of file; known: nvfp4_*, experts, rac, rac_ties, fp8_and_casts")
        return
    try:
        vectors = Vectors(path, device)
    except (OSError, ValueError, BadZipFile) as error:
        yield "file", _failed(f"not a readable npz file: {error}")
        return
    try:
        yield from check(vectors)
    except (
        VectorError,
        ValueError,
        RuntimeError,
        IndexError,
        TypeError,
    ) as error:  # a malformed file must not hide the others
        yield "file", _failed(f"cannot be checked: {error}")
        return
    if unread := vectors.unread():
        yield "file", _failed(f"arrays not implemented: {', '.join(unread)}")


def main(argv: list[str] | None = None) -> int:
    """Command line: prints the lines, returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m quads.numerics.verify", description="Check a folder of golden NVFP4, FP8 and RAC vectors."
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder of golden vectors (*.npz)")
    parser.add_argument("--device", default="cpu", help="torch device that computes (default: cpu)")
    arguments = parser.parse_args(argv)
    directory: Path = arguments.directory
    files = sorted(directory.glob("*.npz")) if directory.is_dir() else []
    if not files:
        problem = "holds no *.npz file" if directory.is_dir() else "is not a directory"
        sys.stderr.write(f"error: {directory} {problem}; give a folder of golden vectors, such as tests/vectors\n")
        return 2
    lines = failures = 0
    for path in files:
        for profile, checks in verify_file(path, arguments.device):
            lines += 1
            failures += checks.failure is not None
            verdict = f"pass ({', '.join(checks.compared)})" if checks.failure is None else f"FAIL {checks.failure}"
            sys.stdout.write(f"{path.name}  {profile}: {verdict}\n")
    sys.stdout.write(f"{len(files)} files, {lines} checks, {failures} failed\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
