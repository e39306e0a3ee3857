"""The arithmetic of a profile, on intervals made up by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import quads.kernels
from quads.trainer.profile import OWN, Kernel, kind, profiled, summary, union


def test_union_counts_overlaps_once() -> None:
    assert union([]) == 0.0
    assert union([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == pytest.approx(4.0)
    assert union([(5, 6), (0, 10)]) == pytest.approx(10.0)


def test_summary_of_overlapping_kernels() -> None:
    kernels = [
        Kernel("nvjet_tst_128x256", 0.0, 2.0),
        Kernel("ncclDevKernel_AllGather_RING_LL", 1.0, 3.0),  # 1 s of it is hidden behind the product
        Kernel("ncclDevKernel_ReduceScatter_Sum_f32", 6.0, 7.0),
        Kernel("void at::native::vectorized_elementwise_kernel<4>", 7.0, 7.5),
    ]
    found = summary(kernels, wall=10.0, most=2)
    assert found["busy_s"] == pytest.approx(4.5)
    assert found["idle_s"] == pytest.approx(5.5)
    assert found["exposed_communication_s"] == pytest.approx(2.0)
    assert found["launches"] == 4
    assert next(iter(found["kinds"])) == "communication"
    assert found["kinds"]["communication"] == {"s": pytest.approx(3.0), "launches": 2}
    assert [k["kind"] for k in found["kernels"]] == ["products", "communication"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "communication"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90>", "attention"),
        ("fmha_cutlassB_bf16_aligned_64x64", "attention"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "products"),
        ("_quantize_kernel", "quantizers"),
        ("_per_token_kernel", "quantizers"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward", "softmax"),
        ("void at::native::reduce_kernel<512, 1>", "sums"),
        ("something_new", "other"),
    ],
)
def test_kinds_of_kernels(name: str, expected: str) -> None:
    assert kind(name) == expected


def test_own_kernels_are_still_called_so() -> None:
    """A renamed quantizer would be counted as "other" in silence."""
    source = "".join(path.read_text() for path in Path(quads.kernels.__file__).parent.glob("*.py"))
    assert [name for name in OWN if f"def {name}(" not in source] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="no CUDA device"), profiled():
        pass


@pytest.mark.gpu
def test_a_product_is_seen() -> None:
    x = torch.randn(2048, 2048, device="cuda")
    with profiled() as found:
        for _ in range(3):
            x = (x @ x).tanh()
    assert found["kinds"]["products"]["launches"] >= 3 and 0 < found["busy_s"] <= found["wall_s"]
