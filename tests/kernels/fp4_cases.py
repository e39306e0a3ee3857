# SPDX-License-Identifier: Apache-2.0
"""Packed weights and a stand-in for vLLM's FP4 ops, which records what it is handed and multiplies it in torch."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quads.kernels import cutlass
from quads.numerics import nvfp4
from quads.numerics.swizzle import unswizzle

ALIGNED = 32


def vllm_source(*parts: str) -> Path:
    """A file of the installed vLLM; skips where there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    return Path(spec.submodule_search_locations[0]).joinpath(*parts)


def vllm_ops(path: Path | None = None) -> SimpleNamespace:
    """Signatures of vLLM's _custom_ops, read from its source (importing it takes long)."""
    tree = ast.parse((path or vllm_source("_custom_ops.py")).read_text())
    found = SimpleNamespace()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name in cutlass.CONTRACT:
            namespace: dict = {}
            parameters = ", ".join(arg.arg for arg in node.args.args)
            exec(f"def {node.name}({parameters}): ...", namespace)
            setattr(found, node.name, namespace[node.name])
    return found


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 q*s of codes [M, K/2] and scales as the ops read them: 128x4 tiles, float8_e4m3fn."""
    assert codes.dtype == torch.uint8 and scales.dtype == torch.float8_e4m3fn
    assert codes.is_contiguous() and scales.is_contiguous()
    plain = unswizzle(scales.view(torch.uint8), codes.shape[0], codes.shape[1] // 8)
    return nvfp4.to_qs(nvfp4.NVFP4(nvfp4.unpack(codes), plain, torch.ones(1)))


class Recorder:
    """vLLM's ops with the checks of its C++ code, in torch; `calls`: name, {argument: (shape, stride, dtype)}."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def note(self, name: str, tensors: dict[str, Any]) -> None:
        seen = {k: (tuple(t.shape), t.stride(), t.dtype) for k, t in tensors.items() if isinstance(t, torch.Tensor)}
        self.calls.append((name, seen))

    def cutlass_scaled_mm_supports_fp4(self, cuda_device_capability):
        return cuda_device_capability >= 100

    def cutlass_scaled_fp4_mm(self, a, b, block_scale_a, block_scale_b, alpha, out_dtype):
        self.note("cutlass_scaled_fp4_mm", dict(a=a, b=b, sa=block_scale_a, sb=block_scale_b, alpha=alpha))
        (m, half), (n, half_b) = a.shape, b.shape
        assert half == half_b and 2 * half % ALIGNED == 0 and n % ALIGNED == 0
        assert alpha.dtype == torch.float32 and alpha.shape == (1,)
        assert out_dtype in (torch.float16, torch.bfloat16)
        assert block_scale_a.shape == (-(-m // 128) * 128, -(-half // 32) * 4)
        assert block_scale_b.shape == (-(-n // 128) * 128, -(-half // 32) * 4)
        return (values(a, block_scale_a) @ values(b, block_scale_b).mT * alpha).to(out_dtype)

    def cutlass_fp4_moe_mm(
        self, out_tensors, a_tensors, b_tensors, a_scales, b_scales, alphas, problem_sizes, expert_offsets, sf_offsets
    ):
        """Reads memory as the kernel's pointers do: flat offsets, not shapes."""
        given = dict(out=out_tensors, a=a_tensors, b=b_tensors, sa=a_scales, sb=b_scales, alphas=alphas)
        self.note("cutlass_fp4_moe_mm", given | dict(sizes=problem_sizes, first=expert_offsets, sf=sf_offsets))
        experts, n, half = b_tensors.shape
        assert a_scales.dim() == 2 and b_scales.dim() == 3 and problem_sizes.shape == (experts, 3)
        assert {t.dtype for t in (problem_sizes, expert_offsets, sf_offsets)} == {torch.int32}
        assert alphas.dtype == torch.float32 and alphas.shape == (experts,) and expert_offsets.shape == (experts,)
        assert out_tensors.is_contiguous() and out_tensors.shape[1] == n and out_tensors.dtype == torch.bfloat16
        groups = half // 8
        sa, sb = a_scales.reshape(-1), b_scales.reshape(-1)
        for e in range(experts):
            m, own_n, k = problem_sizes[e].tolist()
            first, scale_first = int(expert_offsets[e]), int(sf_offsets[e])
            assert (own_n, k) == (n, 2 * half)
            for start in (scale_first * groups, e * n * groups):
                assert start % 128 == 0, "TMA needs 128-byte alignment"
            height, width = -(-m // 128) * 128, -(-n // 128) * 128
            assert (scale_first * groups + height * groups) <= sa.numel()
            own = sa[scale_first * groups :][: height * groups].view(height, groups)
            w = sb[e * n * groups :][: width * groups].view(width, groups)
            product = values(a_tensors[first : first + m], own) @ values(b_tensors[e], w).mT
            out_tensors[first : first + m] = (product * alphas[e]).to(torch.bfloat16)
