"""E2M1 and E4M3 against brute force: nearest of all representable values, ties to the even code.

Truth: value tables built here from sign, exponent and mantissa fields, compared in float64 for all 2^16 bf16 inputs.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quads.numerics import formats


def all_finite_bf16() -> torch.Tensor:
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    return values[values.isfinite()]


def e4m3_magnitudes() -> np.ndarray:
    """Values of bytes 0x00..0x7E from their fields; the subnormals are mantissa * 2^-9."""
    byte = np.arange(0x7F)
    exponent, mantissa = byte >> 3, (byte & 7).astype(np.float64)
    return np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent.astype(np.float64) - 7))


def nearest_even(x: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    """Index of the nearest magnitude of |x|; halfway goes to the even index, beyond the last one saturates."""
    a = np.abs(x.astype(np.float64))
    middle = (magnitudes[:-1] + magnitudes[1:]) / 2
    index = np.searchsorted(middle, a, side="left")  # a <= middle stays below
    tie = (index < middle.size) & (a == middle[np.minimum(index, middle.size - 1)])
    return np.where(tie & (index % 2 == 1), index + 1, index)


def test_e2m1_rounds_every_bf16_to_the_nearest_value():
    x = all_finite_bf16()
    index = nearest_even(x.numpy(), np.array(formats.E2M1_MAGNITUDES))
    expected = index | (np.signbit(x.numpy()) << 3)
    rounded = formats.round_e2m1(x)
    assert np.array_equal(formats.encode_e2m1(rounded).numpy(), expected)
    assert np.array_equal(rounded.numpy(), formats.decode_e2m1(torch.from_numpy(expected)).numpy())


@pytest.mark.parametrize(
    ("middle", "expected"), [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5.0, 4)]
)
def test_e2m1_ties_and_their_neighbours(middle: float, expected: float):
    x = torch.tensor([middle, -middle])
    assert formats.round_e2m1(x).tolist() == [expected, -expected]
    below, above = (torch.nextafter(x[:1], torch.tensor([far])) for far in (0.0, 9.0))
    magnitudes = np.array(formats.E2M1_MAGNITUDES)
    assert formats.round_e2m1(below).item() == magnitudes[magnitudes < middle].max()
    assert formats.round_e2m1(above).item() == magnitudes[magnitudes > middle].min()


def test_e2m1_special_values():
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 6.0, 7.0, 1e38, torch.nan])
    assert formats.encode_e2m1(formats.round_e2m1(x)).tolist() == [0, 8, 7, 15, 7, 7, 7, 7]
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(formats.encode_e2m1(formats.decode_e2m1(codes)), codes)


def test_e4m3_casts_every_bf16_to_the_nearest_byte():
    x = all_finite_bf16()
    expected = nearest_even(x.numpy(), e4m3_magnitudes()) | (np.signbit(x.numpy()) << 7)
    assert np.array_equal(formats.encode_e4m3(x).numpy(), expected)


def test_e4m3_decodes_every_byte_and_round_trips():
    finite = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    decoded = formats.decode_e4m3(finite)
    assert np.array_equal(decoded[:0x7F].numpy().astype(np.float64), e4m3_magnitudes())
    assert torch.equal(formats.encode_e4m3(decoded), finite)


def test_e4m3_middles_go_to_the_even_byte():
    magnitudes = e4m3_magnitudes()
    middle = torch.from_numpy(((magnitudes[:-1] + magnitudes[1:]) / 2).astype(np.float32))
    low = np.arange(magnitudes.size - 1)
    assert np.array_equal(formats.encode_e4m3(middle).numpy(), low + low % 2)
    for far, shift in ((0.0, 0), (1e9, 1)):
        beside = torch.nextafter(middle, torch.full_like(middle, far))
        assert np.array_equal(formats.encode_e4m3(beside).numpy(), low + shift)


def test_e4m3_saturates_or_gives_nan():
    x = torch.tensor([448.0, 464.0, 464.01, 1e30, torch.inf, -torch.inf, torch.nan])
    assert formats.encode_e4m3(x).tolist() == [0x7E] * 5 + [0xFE, 0x7F]
    assert formats.encode_e4m3(x, saturate=False).tolist() == [0x7E, 0x7E, 0x7F, 0x7F, 0x7F, 0xFF, 0x7F]


@given(st.floats(2.0**-60, 2.0**60, width=32), st.sampled_from([2688.0, 448.0, 6.0]))
def test_divide_rounds_once(value: float, number: float):
    tensor = torch.tensor([value])
    assert formats.divide(number, tensor).numpy() == np.float32(number) / tensor.numpy()
    assert formats.divide(tensor, number).numpy() == tensor.numpy() / np.float32(number)
