# SPDX-License-Identifier: Apache-2.0
"""quads.kernels.native: interpreter against the definition, ahead-of-time compilation, vLLM's op signatures."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from gemm_cases import DEVICE, gaussian, poison, relative_error, wide_range
from tolerances import TOLERANCES

from quads.kernels import native, rac_gemm
from quads.numerics import nvfp4
from quads.numerics.nvfp4 import global_scale, pack, quantize, to_qs
from quads.numerics.qdq import quantize_weight, weight_amax
from quads.numerics.rac import RacSpec
from quads.numerics.swizzle import unswizzle

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
@pytest.mark.parametrize("rac", [False, True])
def test_compiles_ahead_for_sm_100a(rac: bool) -> None:
    """The block-scaled FP4 instruction is in the PTX, and ptxas accepts it; nothing is executed."""
    code = (
        f"from quads.kernels import native; k = native.compile_ahead(100, rac={rac}); p = k['ptx']; "
        "print('.target sm_100a' in p, p.count('tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16'), "
        "len(k['cubin']) > 1000)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    target, instructions, cubin = done.stdout.split()
    assert target == "True" and cubin == "True" and int(instructions) >= (8 if rac else 4)


def vllm_ops() -> SimpleNamespace:
    """Signatures of the installed vLLM's _custom_ops, read from its source (importing it takes long)."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / "_custom_ops.py").read_text())
    found = SimpleNamespace()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in native.CUTLASS_CONTRACT:
            namespace: dict = {}
            parameters = ", ".join(arg.arg for arg in node.args.args)
            exec(f"def {node.name}({parameters}): ...", namespace)
            setattr(found, node.name, namespace[node.name])
    return found


def test_vllm_ops_have_the_expected_signatures() -> None:
    assert native.contract_problems(vllm_ops()) == []


def test_a_changed_signature_is_an_error() -> None:
    ops = vllm_ops()
    ops.cutlass_scaled_fp4_mm = lambda out, a, b: None
    p = native.Operand(torch.zeros(4, 32, dtype=torch.uint8), torch.zeros(4, 4, dtype=torch.uint8), torch.ones(4))
    with pytest.raises(RuntimeError, match="cutlass_scaled_fp4_mm"):
        native.cutlass_linear(ops, p, p, torch.ones(1), torch.bfloat16)


def test_cutlass_call() -> None:
    """What the op receives: packed codes and 128x4 scales, checked by a stand-in that multiplies them in torch."""
    x, w = gaussian(5, 64), gaussian(20, 64, seed=7)
    a, qa = operand(x, global_scale(x.abs().max()).view(1, 1))
    p, qw = operand(w, global_scale(w.abs().max()).view(1, 1), "verl_export")

    def stand_in(a, b, block_scale_a, block_scale_b, alpha, out_dtype):
        def values(codes, scales):
            plain = unswizzle(scales.view(torch.uint8), codes.shape[0], codes.shape[1] // 8)
            return to_qs(nvfp4.NVFP4(nvfp4.unpack(codes), plain, None))

        return (values(a, block_scale_a) @ values(b, block_scale_b).mT * alpha).to(out_dtype)

    ops = vllm_ops()
    ops.cutlass_scaled_fp4_mm = stand_in
    y = native.cutlass_linear(ops, a, p, a.rcp[:1] * p.rcp[:1], torch.float32)
    assert torch.allclose(y, qa @ qw.mT * (a.rcp[0] * p.rcp[0]), rtol=1e-6)


@pytest.mark.blackwell
def test_cutlass_on_hardware() -> None:
    """NOT RUN so far: needs compute capability 10 and vLLM's CUDA build."""
    from vllm import _custom_ops as ops

    x, w = gaussian(64, 256), gaussian(128, 256, seed=7)
    a, qa = operand(x, global_scale(x.abs().max()).view(1, 1))
    p, qw = operand(w, global_scale(w.abs().max()).view(1, 1), "verl_export")
    y = native.cutlass_linear(ops, a, p, a.rcp[:1] * p.rcp[:1], torch.bfloat16)
    expected = ((qa.double() @ qw.double().mT).float() * (a.rcp[0] * p.rcp[0])).bfloat16()
    assert float((y != expected).float().mean()) <= 1e-5
