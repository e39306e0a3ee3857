# SPDX-License-Identifier: Apache-2.0
"""The roofline model: hand-computed cases, limits, and its agreement with the committed H200 measurement."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quads.bench import roofline
from quads.bench.roofline import (
    B200,
    H200,
    Chip,
    Gemm,
    compare,
    estimate,
    expectations,
    layer_seconds,
    touched_experts,
)

PLAIN = Chip("plain", {"nvfp4": 1e15, "bf16": 1e15}, 1e12, 1.0, 1.0, 0.0)


def test_compute_bound_by_hand() -> None:
    """2 * 4096 * 4096 * 4096 flops at 1 PFLOP/s."""
    e = estimate(PLAIN, Gemm(4096, 4096, 4096))
    assert e.bound == "compute" and e.seconds == pytest.approx(137.438953472e-6)


def test_memory_bound_by_hand() -> None:
    """16 rows: weights 1024*2048*9/16, activations 16*2048*9/16, output 2*16*1024 bytes at 1 TB/s."""
    e = estimate(PLAIN, Gemm(16, 1024, 2048))
    assert e.bound == "memory" and e.seconds == pytest.approx((1179648 + 18432 + 32768) * 1e-12)


@pytest.mark.parametrize("k", [0.125, 0.5, 1.0])
def test_forms(k: float) -> None:
    compute, memory = Gemm(8192, 8192, 8192), Gemm(1, 8192, 8192)
    for form in ("A", "B", "D"):
        ratio = estimate(PLAIN, compute, k, form).matrix / estimate(PLAIN, compute).matrix
        assert ratio == pytest.approx(1 + k)
    base = estimate(PLAIN, memory).seconds
    assert estimate(PLAIN, memory, k, "A").seconds / base == pytest.approx(1 + k, rel=1e-3)
    assert estimate(PLAIN, memory, k, "D").seconds / base == pytest.approx(1, rel=1e-3)
    assert estimate(PLAIN, memory, k, "B").seconds >= estimate(PLAIN, memory, k, "A").seconds


def test_launches_count() -> None:
    slow = replace(PLAIN, launch=5e-6)
    assert estimate(slow, Gemm(1, 16, 32), 0.5, "B").launch == 1e-5
    assert estimate(slow, Gemm(1, 16, 32), 0.5, "D").launch == 5e-6


def test_touched_experts() -> None:
    assert touched_experts(1) == pytest.approx(8)
    assert 127.9 < touched_experts(128) <= 128


def test_fp4_is_never_slower_than_fp8_in_the_model_and_rac_never_free() -> None:
    for tokens in (16, 1024, 16384):
        w4a4 = layer_seconds(B200, tokens, "nvfp4")
        assert layer_seconds(B200, tokens, "nvfp4", 0.5, "D") > w4a4
        assert layer_seconds(B200, tokens, "nvfp4", 0.5, "A") >= layer_seconds(B200, tokens, "nvfp4", 0.5, "D")
    assert layer_seconds(B200, 16384, "fp8") > layer_seconds(B200, 16384, "nvfp4")


def test_errors() -> None:
    with pytest.raises(ValueError, match="no nvfp4 matrix units"):
        estimate(H200, Gemm(1, 16, 32))
    with pytest.raises(ValueError, match="form"):
        estimate(B200, Gemm(1, 16, 32), 0.5, "C")
    with pytest.raises(ValueError, match="rac"):
        estimate(B200, Gemm(1, 16, 32), 1.5)


def test_compare_takes_the_fastest_exact_row() -> None:
    rows = [
        {"group": "decode", "name": "packed (1)", "us": None},
        {"group": "decode", "name": "packed (2)", "us": 90.0},
        {"group": "decode", "name": "packed (3)", "us": 85.0},
        {"group": "elsewhere", "name": "packed", "us": 1.0},
    ]
    (found,) = compare(rows)
    assert found["name"] == "packed (3)" and found["bound"] == "memory"
    # 128 * 1536 * 2048 * 9/16 + 2048 * 2048 * 2 + 2048 * 1536 * 2 bytes at 4.8 TB/s * 0.885, and 1 us
    assert found["model_us"] == pytest.approx((226492416 + 8388608 + 6291456) / (4.8e12 * 0.885) * 1e6 + 1)


def test_table_says_that_it_is_a_model() -> None:
    assert "Model" in expectations(B200, (16,), (0.5,)) and "nothing in this table was measured" in expectations(
        B200, (16,), (0.5,)
    )


def test_library_products_agree_with_the_model() -> None:
    """Large cuBLAS products of the committed H200 run lie within 15 % of the model; our kernels are never far below."""
    rows = json.loads((Path(__file__).parents[2] / "docs" / "measured" / "h200_gemm.json").read_text())["rows"]
    found = {(f["group"], f["name"]): f["ratio"] for f in compare(rows)}
    for key in (("dense", "bf16 cuBLAS"), ("decode", "bmm"), ("experts even", "bmm")):
        assert 0.85 <= found[key] <= 1.15, (key, found[key])
    assert all(ratio > 0.85 for ratio in found.values()), "faster than the model's limits: its rates are wrong"


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"rows": 5}', '{"rows": [{"group": "dense"}]}'])
def test_a_file_that_is_no_kernel_benchmark_is_one_line(tmp_path, capsys, text) -> None:
    path = tmp_path / "kernels.json"
    if text is not None:
        path.write_text(text)
    assert roofline.main(["--measured", str(path)]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"error: kernel benchmark {path}: ")
    assert said.err.endswith("Give the FILE that python -m quads.bench.kernels wrote\n") and said.err.count("\n") == 1
