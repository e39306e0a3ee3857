# SPDX-License-Identifier: Apache-2.0
"""quads.kernels.native: interpreter against the definition, ahead-of-time compilation."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
import triton
from gemm_cases import DEVICE, gaussian, poison, relative_error, wide_range
from tolerances import TOLERANCES

from quads.kernels import native, rac_gemm
from quads.kernels.native_quantize import torch_terms
from quads.numerics.nvfp4 import global_scale, pack, quantize, to_qs
from quads.numerics.packed import pack_weight
from quads.numerics.qdq import WeightQ, quantize_weight, weight_amax
from quads.numerics.rac import RacSpec

LIMIT = TOLERANCES["gemm_fp32_accumulation"].limit
INTERPRETED_OR_BLACKWELL = native.INTERPRETED or native.unavailable() is None
runs = pytest.mark.skipif(not INTERPRETED_OR_BLACKWELL, reason="needs compute capability 10 or Triton's interpreter")
ROOT = Path(__file__).resolve().parents[2]


def operand(x: torch.Tensor, gs: torch.Tensor, profile: str = "vllm_cuda") -> tuple[native.Operand, torch.Tensor]:
    """Operand operand of x [M, K] and its q*s."""
    nv = quantize(x, gs, profile)
    rcp = gs.reciprocal().expand(x.shape[0], 1).squeeze(-1).contiguous()
    return native.Operand(pack(nv.codes), nv.scales.contiguous(), rcp), to_qs(nv)


@runs
@pytest.mark.parametrize("make", [gaussian, wide_range])
@pytest.mark.parametrize("shape", [(5, 20, 64), (17, 16, 160)])
def test_linear(shape, make) -> None:
    T, N, K = shape
    x, w = make(T, K), make(N, K, seed=7)
    a, qs = operand(x, global_scale(x.abs().amax(-1, keepdim=True)))
    p, _ = operand(w.bfloat16().float(), global_scale(weight_amax(w)), "verl_export")
    with poison():
        y = native.linear(a, p, torch.float32)
    wq = quantize_weight(w, "nvfp4")
    assert relative_error(y, qs, None, a.rcp[:, None], wq.qs, wq.rcp.expand(N, 1)) <= LIMIT


@runs
def test_residual_on_the_first_columns() -> None:
    x, w = gaussian(5, 96), gaussian(20, 96, seed=7)
    mask = torch.arange(96, device=DEVICE) < 64
    t = rac_gemm.terms(x, RacSpec(0.5), mask)
    gs = global_scale(x.abs().amax(-1, keepdim=True))
    a, _ = operand(x, gs)
    r, second = operand(rac_gemm.activation_residual(x)[:, :64].contiguous(), gs)
    assert torch.equal(second.bfloat16(), t.second[:, :64])
    p, _ = operand(w.bfloat16().float(), global_scale(weight_amax(w)), "verl_export")
    wq = quantize_weight(w, "nvfp4")
    y = native.linear(a, p, torch.float32, r)
    assert relative_error(y, t.first, t.second, t.rcp, wq.qs, wq.rcp.expand(20, 1)) <= LIMIT


@pytest.mark.skipif(torch.cuda.is_available() and native.unavailable() is None, reason="the backend is available here")
def test_the_reason_is_stated() -> None:
    reason = native.unavailable()
    assert reason and any(part in reason for part in ("no CUDA device", "compute capability", "Triton"))


@pytest.mark.skipif(
    triton.__version__.startswith("3.6."), reason="Triton 3.6 fails in a pass on block-16 E4M3 scales (docs/kernels.md)"
)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("rac", [False, True])
def test_compiles_ahead_for_sm_100a(rac: bool, grouped: bool) -> None:
    """The block-scaled FP4 instruction is in the PTX, and ptxas accepts it; nothing is executed."""
    code = (
        f"from quads.kernels import native; k = native.compile_ahead(100, {rac}, {grouped}); p = k['ptx']; "
        "print('.target sm_100a' in p, p.count('tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16'), "
        "len(k['cubin']) > 1000)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    target, instructions, cubin = done.stdout.split()
    assert target == "True" and cubin == "True" and int(instructions) >= (8 if rac else 4)


def packed_weight(w: torch.Tensor) -> tuple[native.Operand, WeightQ]:
    """Operand and WeightQ of w [(E,) N, K], one global scale per expert."""
    p = pack_weight(w)
    rcp = p.gs.reciprocal().expand(*w.shape[:-1], 1).squeeze(-1).contiguous()
    return native.Operand(p.codes.contiguous(), p.scales.contiguous(), rcp), quantize_weight(w, "nvfp4")


@runs
@pytest.mark.parametrize("K", [16, 48, 80])
def test_widths_that_are_multiples_of_16_only(K: int) -> None:
    x, w = gaussian(5, K), gaussian(20, K, seed=7)
    t = torch_terms(x, RacSpec(0.5), torch.arange(K, device=DEVICE) % 3 < 2)
    p, wq = packed_weight(w)
    bias = gaussian(20, seed=2)
    with poison():
        y = native.linear(t.first, p, torch.float32, t.second, bias)
    plain = rac_gemm.terms(x, RacSpec(0.5), torch.arange(K, device=DEVICE) % 3 < 2)
    without = y - bias
    limit = LIMIT + float(bias.abs().max()) * 2**-23
    assert relative_error(without, plain.first, plain.second, plain.rcp, wq.qs, wq.rcp.expand(20, 1)) <= limit


@runs
@pytest.mark.parametrize("rac", [None, RacSpec(0.5)])
@pytest.mark.parametrize("counts", [[4, 0, 7, 1], [0, 0, 0, 33], [1, 2, 3, 0]])
def test_grouped(counts, rac) -> None:
    """Experts without rows; the last three rows belong to nobody."""
    E, N, K = 4, 20, 48
    rows = sum(counts)
    x, w = gaussian(rows + 3, K), gaussian(E, N, K, seed=7)
    mask = torch.arange(K, device=DEVICE) < 16 if rac else None
    t, plain = torch_terms(x, rac, mask), rac_gemm.terms(x, rac, mask)
    p, wq = packed_weight(w)
    ends = [0, *accumulate(counts)]
    with poison():
        y = native.grouped(t.first, p, torch.tensor(ends, dtype=torch.int32, device=DEVICE), torch.float32, t.second)
    assert y.shape == (rows + 3, N)
    for e, (lo, hi) in enumerate(pairwise(ends)):
        if hi > lo:
            own = [None if part is None else part[lo:hi] for part in plain]
            error = relative_error(y[lo:hi], *own, wq.qs[e], wq.rcp[e].expand(N, 1))
            assert error <= LIMIT, (e, error)


@runs
def test_nothing_to_do() -> None:
    p, _ = packed_weight(gaussian(2, 20, 48))
    t = torch_terms(gaussian(0, 48))
    offsets = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    assert native.grouped(t.first, p, offsets, torch.float32).shape == (0, 20)
    assert native.linear(t.first, native.Operand(*(q[0] for q in p)), torch.float32).shape == (0, 20)


@runs
def test_operands_that_do_not_fit_are_named() -> None:
    p, _ = packed_weight(gaussian(20, 48))
    t = torch_terms(gaussian(3, 64))
    with pytest.raises(ValueError, match=r"weight: codes \(20, 24\) .* do not hold K=64"):
        native.linear(t.first, p, torch.float32)
    with pytest.raises(ValueError, match="in 3 dimensions"):
        native.grouped(torch_terms(gaussian(3, 48)).first, p, torch.tensor([0, 3], dtype=torch.int32), torch.float32)
    wrong = native.Operand(p.codes, p.scales, p.rcp.double())
    with pytest.raises(ValueError, match="rcp fp32"):
        native.linear(torch_terms(gaussian(3, 48)).first, wrong, torch.float32)


@pytest.mark.parametrize(
    ("capability", "version", "parts"),
    [
        ((9, 0), "3.6.0", ["compute capability 9.0 has no FP4 units", "10.0 or newer"]),
        ((10, 0), "3.6.0", ["Triton 3.6.0 cannot compile"]),
        ((10, 0), "3.7.1", []),
    ],
)
def test_reasons_in_order(monkeypatch: pytest.MonkeyPatch, capability, version, parts) -> None:
    """The device's first: on Hopper no newer Triton would help."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(native.triton, "__version__", version)
    said = native.unavailable()
    assert (said is None) == (not parts) and all(part in said for part in parts)


@pytest.mark.blackwell
@pytest.mark.parametrize("rac", [None, RacSpec(0.5)])
def test_on_hardware(rac) -> None:
    """NOT RUN so far: needs compute capability 10 and Triton 3.7."""
    x, w = gaussian(200, 1040).bfloat16(), gaussian(400, 1040, seed=7)
    mask = torch.arange(1040, device=DEVICE) < 512 if rac else None
    t, plain = torch_terms(x, rac, mask), rac_gemm.terms(x, rac, mask)
    p, wq = packed_weight(w)
    y = native.linear(t.first, p, torch.float32, t.second)
    assert relative_error(y, plain.first, plain.second, plain.rcp, wq.qs, wq.rcp.expand(400, 1)) <= 1e-5
    ends = torch.tensor([0, 90, 90, 200], dtype=torch.int32, device=DEVICE)
    p, wq = packed_weight(gaussian(3, 400, 1040, seed=9))
    y = native.grouped(t.first, p, ends, torch.float32, t.second)
    for e, (lo, hi) in enumerate(((0, 90), (90, 90), (90, 200))):
        own = [None if part is None else part[lo:hi] for part in plain]
        if hi > lo:
            assert relative_error(y[lo:hi], *own, wq.qs[e], wq.rcp[e].expand(400, 1)) <= 1e-5
