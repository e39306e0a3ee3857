# SPDX-License-Identifier: Apache-2.0
"""Peak memory of every kernel beyond its inputs and outputs: at most 1 % of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gemm_cases import DEVICE

from quads.kernels import activation, gemm, rac_gemm, rac_quantize, weight
from quads.kernels.packed import packed, prepack
from quads.numerics import nvfp4
from quads.numerics.qdq import quantize_weight, weight_amax
from quads.numerics.rac import RacSpec, select

pytestmark = pytest.mark.gpu
LIMIT = 0.01


def nbytes(value: object) -> int:
    """Bytes of all tensors in (nested) tuples."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(nbytes, value)) if isinstance(value, tuple | list) else 0


def quantizers() -> dict[str, tuple[object, Callable[[], object]]]:
    """name -> (inputs, call)."""
    w = torch.randn(64, 768, 2048, device=DEVICE).to(torch.bfloat16)
    one, amax = torch.randn(8192, 8192, device=DEVICE).to(torch.bfloat16), weight.weight_amax(w)
    x = torch.randn(8192, 4096, device=DEVICE).to(torch.bfloat16)
    gs = torch.full((1,), 500.0, device=DEVICE)
    mask = select(torch.rand(4096, dtype=torch.float64), RacSpec(0.5)).to(DEVICE)
    static, token = RacSpec(0.5), RacSpec(0.5, mask="token")
    return {
        "weight amax": (w, lambda: weight.weight_amax(w)),
        "weight fake, amax given": ((w, amax), lambda: weight.fake_quantize_weight(w, "nvfp4", amax)),
        "weight fake, one launch": (w, lambda: weight.fake_quantize_weight(w, "nvfp4")),
        "weight fake, one matrix": (one, lambda: weight.fake_quantize_weight(one, "nvfp4")),
        "weight q*s": (w, lambda: weight.quantize_weight(w, "nvfp4")),
        "weight pack": (w, lambda: weight.pack_weight(w)),
        "weight pack 128x4": (w, lambda: weight.pack_weight(w, layout="128x4")),
        "activation fake": (x, lambda: activation.fake_quantize_activation(x, "nvfp4")),
        "activation q*s": (x, lambda: activation.quantize_activation(x, "nvfp4")),
        "activation pack": (x, lambda: activation.pack_activation(x)),
        "activation pack, given scale": (x, lambda: activation.pack_activation(x, gs)),
        "activation pack 128x4": (x, lambda: activation.pack_activation(x, layout="128x4")),
        "RAC static": (x, lambda: rac_quantize.pack_rac(x, static, mask)),
        "RAC static in place": (x, lambda: rac_quantize.pack_rac(x, static, mask, gs, "in_place")),
        "RAC token": (x, lambda: rac_quantize.pack_rac(x, token)),
    }


def products() -> dict[str, tuple[object, Callable[[], object]]]:
    """name -> (inputs, call); the terms of an activation are inputs, the quantizers above make them."""
    bf16, spec = torch.bfloat16, RacSpec(0.5)
    mask = select(torch.rand(2048, dtype=torch.float64), spec).to(DEVICE)
    order, blocks = rac_gemm.masked_first(mask), rac_gemm.selected_blocks(mask)
    x = torch.randn(4096, 2048, device=DEVICE)
    t, r = rac_gemm.terms(x), rac_gemm.terms(x, spec, mask)
    s = rac_gemm.order_terms(r, order, blocks.numel())
    w = torch.randn(4096, 2048, device=DEVICE).to(bf16)
    e = torch.randn(16, 1024, 2048, device=DEVICE).to(bf16)
    wq, eq = gemm.cache(quantize_weight(w, "nvfp4")), gemm.cache(quantize_weight(e, "nvfp4"))
    nv = nvfp4.quantize(e.float(), nvfp4.global_scale(weight_amax(e)), "verl_export")
    p = prepack(nv.codes, nv.scales, quantize_weight(e, "nvfp4").rcp)
    q = prepack(nv.codes, nv.scales, quantize_weight(e, "nvfp4").rcp, order)
    plane = t.first[None].contiguous()
    planes = torch.stack([rac_gemm.reorder(v, order) for v in (r.first, r.second)])
    offsets = torch.arange(17, dtype=torch.int32, device=DEVICE) * 256
    cat, once = rac_gemm.concatenate(r, blocks), torch.cat([s.first, s.second], -1)
    wa, wo, eo = rac_gemm.augment(wq, blocks), rac_gemm.order_weight(wq, order), rac_gemm.order_weight(eq, order)
    acc = torch.randn(4096, 4096, device=DEVICE)
    return {
        "linear": ((t, wq), lambda: gemm.linear(t.first, t.rcp, wq, bf16)),
        "linear, one scale": ((t, wq), lambda: gemm.linear_uniform(t.first, 0.5, wq)),
        "epilogue alone": ((acc, wq.rcp), lambda: gemm.scale_rows(acc, t.rcp, wq, bf16, None)),
        "grouped": ((t, eq), lambda: gemm.grouped(t.first, t.rcp, eq, offsets, bf16)),
        "form A": ((cat, wa), lambda: gemm.linear(cat, r.rcp, wa, bf16)),
        "form A1": ((once, wo), lambda: gemm.launch(once, None, r.rcp, wo, bf16, None, gemm.DENSE)),
        "form D": ((s, wo), lambda: rac_gemm.form_d(s, wo, bf16)),
        "form D grouped": ((s, eo), lambda: rac_gemm.form_d_grouped(s, eo, offsets, bf16)),
        "packed": ((plane, p), lambda: packed(plane, t.rcp, p, bf16, offsets)),
        "form D packed": ((planes, q), lambda: packed(planes, r.rcp, q, bf16, offsets, blocks.numel())),
    }


@pytest.mark.parametrize("group", [quantizers, products])
def test_peak_memory(group: Callable[[], dict]) -> None:
    shares = {}
    for name, (inputs, call) in group().items():
        call()  # compiles; cuBLAS takes its workspace, once per process
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = call()
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before - nbytes(out)
        shares[name] = extra / (nbytes(inputs) + nbytes(out))
        del out
    print({name: f"{share:.1e}" for name, share in shares.items()})
    assert max(shares.values()) <= LIMIT, shares
