# SPDX-License-Identifier: Apache-2.0
"""quads.kernels.fp8_activation, bit for bit against quads.numerics.fp8 and the golden vectors; outputs poisoned."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import DEVICE, VECTORS, assert_bytes, hard, load, poison

from quads.kernels import fp8_activation as fp8
from quads.numerics import fp8 as definition

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def _poison():
    with poison():
        yield


def check(x: torch.Tensor) -> None:
    got, expected = fp8.per_token(x), definition.per_token(x)
    assert got.q.dtype == torch.bfloat16
    assert_bytes(got.q, expected.q.to(torch.bfloat16), "q")
    assert_bytes(got.scale, expected.scale, "scale")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(14, 48), (7, 80), (3, 2064), (1, 16)])
def test_hard_values(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = hard(*shape, dtype=dtype)
    check(x.nan_to_num(0, 6e4, -6e4))


@pytest.mark.parametrize("columns", [1, 5, 17, 100])
def test_any_width(columns: int) -> None:
    check(torch.randn(9, columns, generator=torch.Generator().manual_seed(columns)).to(DEVICE, torch.bfloat16))


def test_golden_vectors() -> None:
    v = load(VECTORS / "fp8_and_casts.npz")
    got = fp8.per_token(v["x_bf16"])
    q = v["tok_q"].view(torch.float8_e4m3fn).to(torch.bfloat16)
    assert_bytes(got.q, q, "q")
    assert_bytes(got.scale, v["tok_scale"].unsqueeze(-1), "scale")


def test_every_e4m3_boundary() -> None:
    """Rows with amax 448 have scale 1: every value and every midpoint of two neighbours, and the floats beside it."""
    grid = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (grid[1:] + grid[:-1]) / 2
    near = torch.cat([grid, middle, torch.nextafter(middle, middle * 2 + 1), torch.nextafter(middle, -middle - 1)])
    x = torch.stack([torch.cat([near, -near]), torch.cat([near, -near]) * 2.0**-9])
    x[1, 0] = 448.0
    check(x.to(DEVICE))


def test_the_floor_is_the_definitions() -> None:
    assert fp8.TOKEN_FLOOR.value == definition._TOKEN_FLOOR
    check(torch.tensor([[0.0, -0.0, 1e-30, -1e-12], [0.0, 0.0, 0.0, 0.0]], device=DEVICE))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_that_is_not_finite_is_nan_and_alone(bad: float, dtype: torch.dtype) -> None:
    x = hard(4, 64).to(dtype)
    clean = fp8.per_token(x)
    x[2, 7] = bad
    got = fp8.per_token(x)
    assert got.scale.isnan().flatten().tolist() == [False, False, True, False]
    kept = [0, 1, 3]
    assert_bytes(got.q[kept], clean.q[kept], "the other rows")
    assert bool((got.q.float() * got.scale)[2].isnan().all())


def test_empty_and_strided_inputs() -> None:
    empty = fp8.per_token(hard(3, 64)[:0])
    assert empty.q.shape == (0, 64) and empty.scale.shape == (0, 1)
    wide = hard(6, 160)
    for x in (wide[:, 1:65], wide[::2, 16:80], hard(6, 64).T.contiguous().T):
        check(x)


def test_integers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype torch\.int32 has no kernel"):
        fp8.per_token(torch.ones(2, 2, dtype=torch.int32, device=DEVICE))


@pytest.mark.parametrize("columns", [768, 2048, 4096])
def test_compiles_ahead_for_hopper(columns: int) -> None:
    """ptxas accepts it for sm_90, and the conversion is one instruction; nothing is executed."""
    code = (
        "import triton; from triton.backends.compiler import GPUTarget; from triton.compiler import ASTSource;"
        "from quads.kernels import fp8_activation as fp8; from quads.kernels.encode import LAUNCH;"
        f"width = fp8.power_of_two({columns}); per = max(1, fp8.TILE // width);"
        "names = fp8._per_token_kernel.arg_names;"
        "types = {'x_ptr': '*bf16', 'q_ptr': '*bf16', 'scale_ptr': '*fp32', 'rows': 'i32', 'columns': 'i32'};"
        "constants = {'ROWS': per, 'WIDTH': width, 'BF16': True};"
        "source = ASTSource(fp8._per_token_kernel, {n: types.get(n, 'constexpr') for n in names},"
        " {(names.index(n),): v for n, v in constants.items()});"
        "k = triton.compile(source, target=GPUTarget('cuda', 90, 32), options={'num_warps': 4, **LAUNCH});"
        "print(len(k.asm['cubin']) > 1000, 'cvt.rn.satfinite.e4m3x2' in k.asm['ptx'])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["True", "True"]
