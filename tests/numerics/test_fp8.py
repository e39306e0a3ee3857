"""FP8 granularities: each equals its formula applied slice by slice in NumPy, edge slices included."""

import numpy as np
import pytest
import torch

from quads.numerics import fp8
from quads.numerics.formats import decode_e4m3, encode_e4m3

LOUD = torch.cat((torch.full((1, 320), 50.0), torch.full((1, 320), 1e-3), torch.ones(3, 320)))


def sample(rows: int, columns: int) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))
    return x * torch.logspace(-2, 2, columns)


def bytes_of(q: torch.Tensor) -> np.ndarray:
    return q.view(torch.uint8).numpy()


def cast(x: np.ndarray) -> np.ndarray:
    return encode_e4m3(torch.from_numpy(x)).numpy()


def test_per_tensor_and_static():
    x = sample(5, 320)
    s = np.abs(x.numpy()).max() / np.float32(448)
    made = fp8.per_tensor(x)
    assert made.scale.numpy() == s
    assert np.array_equal(bytes_of(made.q), cast(x.numpy() * (np.float32(1) / s)))
    static = fp8.per_tensor(x, torch.tensor(0.01))
    assert static.scale == torch.tensor(0.01)
    assert decode_e4m3(static.q.view(torch.uint8)).abs().max() == 448  # beyond the static range saturates


def test_per_token_is_each_row_alone():
    x = sample(5, 320) * LOUD
    made = fp8.per_token(x)
    for row in range(5):
        s = np.abs(x[row].numpy()).max() / np.float32(448)
        assert made.scale[row].numpy() == s
        assert np.array_equal(bytes_of(made.q[row]), cast(x[row].numpy() / s))


@pytest.mark.parametrize("variant", fp8.VARIANTS["per_group"])
def test_per_group_is_each_group_alone(variant: str):
    x = sample(3, 320)
    made = fp8.per_group(x, variant)
    assert made.scale.shape == (3, 3)
    for g in range(3):
        part = x[:, 128 * g : 128 * (g + 1)].numpy()
        amax = np.abs(part).max(-1)
        s = amax / np.float32(448) if variant == "div" else amax * (np.float32(1) / np.float32(448))
        assert np.array_equal(made.scale[:, g].numpy(), s)
        assert np.array_equal(bytes_of(made.q[:, 128 * g : 128 * (g + 1)]), cast(part / s[:, None]))


@pytest.mark.parametrize("variant", fp8.VARIANTS["per_block"])
def test_per_block_is_each_block_alone(variant: str):
    w = sample(200, 320)
    made = fp8.per_block(w, variant)
    assert made.scale.shape == (2, 3)
    for n in range(2):
        for k in range(3):
            area = np.s_[128 * n : 128 * (n + 1), 128 * k : 128 * (k + 1)]
            part = w.numpy()[area]
            amax = np.abs(part).max()
            s = amax / np.float32(448) if variant == "verl_triton" else 1 / (np.float32(448) / amax)
            m = 1 / s if variant == "verl_triton" else np.float32(448) / amax
            assert made.scale[n, k].numpy() == s
            assert np.array_equal(bytes_of(made.q)[area], cast(part * m))


@pytest.mark.parametrize("make", [fp8.per_tensor, fp8.per_token, fp8.per_group, fp8.per_block])
def test_dequantize_is_close_and_zero_is_zero(make):
    x = sample(150, 320)
    x[:, 128:256] = 0
    x[3] = 0
    back = fp8.dequantize(make(x))
    assert back.shape == x.shape
    assert back[3].abs().max() == 0
    assert (back - x).norm() < 0.03 * x.norm()
    assert torch.equal(fp8.dequantize(make(torch.zeros(2, 16))), torch.zeros(2, 16))


@pytest.mark.parametrize("make", [fp8.per_tensor, fp8.per_token, fp8.per_group, fp8.per_block])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite(make, bad: float):
    x = torch.ones(2, 16)
    x[1, 3] = bad
    with pytest.raises(ValueError, match=r"shape \(2, 16\) holds NaN or infinity"):
        make(x)


def test_unknown_variant():
    with pytest.raises(ValueError, match="unknown FP8 per_group variant 'x'; known: div, vllm_triton"):
        fp8.per_group(torch.ones(1, 128), "x")
