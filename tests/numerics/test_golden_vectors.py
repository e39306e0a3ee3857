"""The golden vectors bit for bit, and that the checker can fail: corrupted, unknown, truncated and missing input."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from quads.numerics import verify

VECTORS = Path(__file__).parent.parent / "vectors"
PROFILES = {
    "vllm_cuda",
    "flashinfer",
    "te",
    "vllm_emul",
    "vllm_emul_triton",
    "verl_export",
    "verl_qdq",
    "modelopt",
    "torchao",
}


@pytest.mark.parametrize("path", sorted(VECTORS.glob("*.npz")), ids=lambda p: p.stem)
def test_golden(path: Path):
    lines = list(verify.verify_file(path))
    assert {name: checks.failure for name, checks in lines if checks.failure} == {}
    assert all(checks.compared for _, checks in lines)
    if path.stem.startswith("nvfp4_"):
        assert {name for name, _ in lines} >= PROFILES


def test_folder_is_complete():
    stems = [path.stem for path in VECTORS.glob("*.npz")]
    assert len([s for s in stems if s.startswith("nvfp4_")]) == 22
    assert {"experts", "rac", "rac_ties", "fp8_and_casts"} < set(stems)


def altered(folder: Path, stem: str, **changes: np.ndarray | None) -> Path:
    """Copy of a vector file with some arrays replaced, added or (None) removed."""
    with np.load(VECTORS / f"{stem}.npz") as npz:
        arrays = {name: npz[name] for name in npz.files} | changes
    np.savez(folder / f"{stem}.npz", **{name: array for name, array in arrays.items() if array is not None})
    return folder


def flipped(stem: str, name: str, index: tuple[int, ...]) -> np.ndarray:
    with np.load(VECTORS / f"{stem}.npz") as npz:
        array = npz[name].copy()
    array[index] ^= 1
    return array


@pytest.mark.parametrize(
    ("stem", "name", "index", "line"),
    [
        ("nvfp4_ties_bf16_K16", "scale", (0, 0), "vllm_cuda: FAIL scale[0, 0]: got 0x7e, expected 0x7f (1 of 1"),
        ("nvfp4_K48_bf16", "packed", (2, 5), "vllm_cuda: FAIL codes[2, 10]: got 0x"),
        ("nvfp4_K96_M257_bf16_swizzle", "scale_swizzled_8x4", (7, 3), "swizzle 8x4: FAIL swizzled[7, 3]: got 0x"),
        ("nvfp4_gauss_f32_K48", "amb_code", (0,), "approximate reciprocals: FAIL amb_code[0, 7]: got "),
        ("experts", "scale__te", (4, 1, 2), "te: FAIL scale[4, 1, 2]: got 0x"),
        ("rac", "mask__block16_sumsq_k0500_own", (0,), "block16_sumsq_k0500_own: FAIL mask[7]: got "),
        ("rac_ties", "mask__channel_k0250", (0,), "channel_k0250: FAIL mask[7]: got "),
        ("fp8_and_casts", "w_q__verl_torch", (130, 7), "per_block verl_torch: FAIL q[130, 7]: got 0x"),
        ("fp8_and_casts", "cast4_code", (3,), "cast e2m1: FAIL code[3]: got 0x"),
    ],
)
def test_one_wrong_bit_fails_and_is_named(tmp_path: Path, capsys, stem: str, name: str, index, line: str):
    altered(tmp_path, stem, **{name: flipped(stem, name, index)})
    assert verify.main([str(tmp_path)]) == 1
    assert f"{stem}.npz  {line}" in capsys.readouterr().out


def test_unknown_profile_and_unknown_array_fail(tmp_path: Path, capsys):
    altered(tmp_path, "nvfp4_ties_bf16_K16", packed__nextgen=np.zeros((1, 8), np.uint8), extra=np.zeros(1))
    altered(tmp_path, "fp8_and_casts", g128_q__ue8m0=np.zeros((12, 512), np.uint8))
    assert verify.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "nvfp4_ties_bf16_K16.npz  nextgen: FAIL not implemented" in out
    assert "nvfp4_ties_bf16_K16.npz  file: FAIL arrays not implemented: extra" in out
    assert "fp8_and_casts.npz  ue8m0: FAIL not implemented" in out


def test_missing_array_unknown_kind_and_truncated_file_fail(tmp_path: Path, capsys):
    altered(tmp_path, "nvfp4_zeros_bf16_K32", scale=None)
    shutil.copy(VECTORS / "rac_ties.npz", tmp_path / "surprise.npz")
    (tmp_path / "rac.npz").write_bytes((VECTORS / "rac.npz").read_bytes()[:5000])
    assert verify.main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "nvfp4_zeros_bf16_K32.npz  file: FAIL cannot be checked: the file lacks array 'scale'" in out
    assert "surprise.npz  file: FAIL unknown kind of file; known: nvfp4_*" in out
    assert "rac.npz  file: FAIL not a readable npz file" in out


def test_nothing_to_check_is_an_error(tmp_path: Path, capsys):
    assert verify.main([str(tmp_path)]) == 2
    assert verify.main([str(tmp_path / "nowhere")]) == 2
    err = capsys.readouterr().err
    assert "holds no *.npz file" in err
    assert "is not a directory" in err


@pytest.mark.gpu
def test_golden_on_gpu(capsys):
    assert torch.cuda.is_available(), "marked gpu: run where CUDA is available"
    assert verify.main([str(VECTORS), "--device", "cuda"]) == 0, capsys.readouterr().out
