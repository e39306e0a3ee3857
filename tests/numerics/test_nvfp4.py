"""NVFP4: a block worked by hand, global scales, errors, and properties that hold for every profile."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from quads.numerics import formats, nvfp4

# float16 elements: six decades around 1, subnormal halves included, no fp32 over- or underflow on the way.
FINITE = st.floats(-1000, 1000, width=16)
matrices = st.tuples(st.integers(1, 4), st.sampled_from([16, 48, 64])).flatmap(
    lambda shape: arrays(np.float32, shape, elements=FINITE).map(torch.from_numpy)
)
ENGINES = [p for p in nvfp4.PROFILES if p != "verl_qdq"]  # verl_qdq has an absolute threshold: no equivariance


def quantize(x: torch.Tensor, profile: str = "vllm_cuda") -> nvfp4.NVFP4:
    return nvfp4.quantize(x, nvfp4.global_scale(x.abs().amax()), profile)


def test_two_blocks_by_hand():
    # amax 6: gs = 2688 / 6 = 448. Block 0 has amax 6: s = 448 * 6 / 6 = 448, so elements are rounded as they are.
    # Block 1 has amax 1.5: s = 448 * 1.5 / 6 = 112, so elements are multiplied by 448 / 112 = 4 before rounding.
    block_0 = [6, -6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -0.25, 0.26, 0, -4, 4.9, 5.1, 1]
    codes_0 = [7, 15, 6, 6, 4, 4, 2, 2, 0, 8, 1, 0, 14, 6, 7, 2]
    block_1 = [1.5, -1.5, 0.3, 0.32, 0.0625, -0.07, 1.25, 1.26, 0, 0.5, 0.7, 0.875, 0.9, 1.0, 0.1, -0.2]
    codes_1 = [7, 15, 2, 3, 0, 9, 6, 7, 0, 4, 5, 6, 6, 6, 1, 10]
    nv = quantize(torch.tensor([block_0 + block_1]))
    assert nv.gs.item() == 448
    assert nv.scales.tolist() == [[0x7E, 0x6E]]  # 448 = 1.75 * 2^8, 112 = 1.75 * 2^6
    assert nv.codes.tolist() == [codes_0 + codes_1]
    assert nvfp4.dequantize(nv)[0, 16:19].tolist() == [1.5, -1.5, 0.25]
    assert nvfp4.to_qs(nv)[0, 16:19].tolist() == [672, -672, 112]
    assert nvfp4.pack(nv.codes)[0, :2].tolist() == [0xF7, 0x66]


def test_global_scale():
    amax = torch.rand(4096, generator=torch.Generator().manual_seed(0)) * 10
    expected = np.float32(2688) / amax.numpy()
    assert np.array_equal(nvfp4.global_scale(amax).numpy(), expected)
    assert nvfp4.global_scale(torch.tensor([0.0, 6.0, 1e-38])).tolist() == [1.0, 448.0, 2.0**126]
    for bad in (torch.inf, torch.nan):
        with pytest.raises(ValueError, match="not finite"):
            nvfp4.global_scale(torch.tensor([1.0, bad]))


def test_tiny_tensor_keeps_its_shape_when_the_global_scale_is_capped():
    # amax 2^-124 wants gs = 2688 * 2^124, above the cap of 2^126; block scales take up the slack.
    x = torch.tensor([[1.0, -0.5, 0.25, 0.0] * 4]) * 2.0**-124
    nv = quantize(x)
    assert nv.gs.item() == 2.0**126
    assert torch.allclose(nvfp4.dequantize(nv), x, rtol=0.13, atol=0)


@pytest.mark.parametrize("shape", [(2, 8), (2, 24), (3, 0), (17,)])
def test_k_not_a_multiple_of_16(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"multiple of 16, got shape \("):
        nvfp4.quantize(torch.ones(shape), torch.tensor(1.0))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_input(bad: float):
    x = torch.ones(2, 32)
    x[1, 20] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        nvfp4.quantize(x, torch.tensor(1.0))


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.nan, torch.inf])
def test_bad_global_scale(bad: float):
    with pytest.raises(ValueError, match="positive and finite"):
        nvfp4.quantize(torch.ones(1, 16), torch.tensor(bad))


def test_unknown_profile_names_the_known_ones():
    with pytest.raises(ValueError, match="unknown NVFP4 profile 'vllm'; known: vllm_cuda, "):
        nvfp4.quantize(torch.ones(1, 16), torch.tensor(1.0), "vllm")


def test_global_scale_per_row_equals_row_by_row():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1e-3], [1], [7], [100], [0]])
    gs = nvfp4.global_scale(x.abs().amax(-1, keepdim=True))
    together = nvfp4.quantize(x, gs)
    for row in range(5):
        alone = nvfp4.quantize(x[row], gs[row])
        assert torch.equal(alone.codes, together.codes[row])
        assert torch.equal(alone.scales, together.scales[row])
        assert torch.equal(nvfp4.dequantize(alone), nvfp4.dequantize(together)[row])


@pytest.mark.parametrize("profile", nvfp4.PROFILES)
def test_scale_that_underflows_decodes_to_next_to_nothing(profile: str):
    # Block 1 is 2^-20 of block 0: its scale underflows E4M3. Codes differ between engines (their bytes are in the
    # golden vectors), the decoded value may not exceed the smallest scale the profile can store times 6.
    x = torch.ones(1, 32)
    x[0, 16:] = 2.0**-20
    nv = quantize(x, profile)
    smallest = {"torchao": 2.0**-6, "modelopt": 2.0**-9}.get(profile, 0.0)
    assert nvfp4.dequantize(nv, profile)[0, 16:].max() <= smallest * 6 / nv.gs
    assert torch.equal(nvfp4.dequantize(nv, profile)[0, :16], nvfp4.dequantize(quantize(x))[0, :16])


@pytest.mark.parametrize("profile", nvfp4.PROFILES)
@settings(deadline=None, max_examples=25)
@given(x=matrices)
def test_never_beyond_range_and_sign_symmetric(profile: str, x: torch.Tensor):
    nv, mirrored = quantize(x, profile), quantize(-x, profile)
    qs = nvfp4.to_qs(nv)
    assert formats.decode_e2m1(nv.codes).abs().max() <= formats.E2M1_MAX
    assert qs.abs().max() <= formats.NVFP4_RANGE
    assert torch.equal(qs.bfloat16().float(), qs)
    assert torch.equal(nvfp4.to_qs(mirrored), -qs)
    assert torch.equal(mirrored.scales, nv.scales)


@pytest.mark.parametrize("profile", ENGINES)
@settings(deadline=None, max_examples=25)
@given(x=matrices, exponent=st.integers(-20, 20))
def test_scaling_by_a_power_of_two_changes_no_byte(profile: str, x: torch.Tensor, exponent: int):
    nv, scaled = quantize(x, profile), quantize(x * 2.0**exponent, profile)
    assert torch.equal(scaled.codes, nv.codes)
    assert torch.equal(scaled.scales, nv.scales)
    assert torch.equal(nvfp4.dequantize(scaled, profile), nvfp4.dequantize(nv, profile) * 2.0**exponent)


@settings(deadline=None, max_examples=100)
@given(x=matrices)
def test_idempotent_and_within_half_a_step(x: torch.Tensor):
    nv = quantize(x)
    dequantized = nvfp4.dequantize(nv)
    again = nvfp4.quantize(dequantized, nv.gs)
    # Below E4M3's normal range a scale is too coarse for a block's largest code to be 6 again.
    normal = (formats.decode_e4m3(nv.scales) >= 2.0**-6).repeat_interleave(16, -1)
    values = formats.decode_e2m1(nv.codes)
    assert torch.equal(formats.decode_e2m1(again.codes)[normal], values[normal])
    assert torch.equal(again.scales.repeat_interleave(16, -1)[normal], nv.scales.repeat_interleave(16, -1)[normal])
    # The widest E2M1 gap is 4..6: half of it is one unit of s / gs.
    step = (formats.decode_e4m3(nv.scales) / nv.gs).repeat_interleave(16, -1)
    assert ((x - dequantized).abs() <= step * 1.0001)[normal].all()


@pytest.mark.parametrize("profile", nvfp4.PROFILES)
def test_zero_block_stays_zero(profile: str):
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(2))
    x[:, 16:32] = 0
    x[2] = 0
    dequantized = nvfp4.dequantize(quantize(x, profile), profile)
    assert dequantized[:, 16:32].abs().max() == 0
    assert dequantized[2].abs().max() == 0
    assert dequantized.isfinite().all()


@settings(deadline=None)
@given(codes=st.integers(1, 20).flatmap(lambda n: arrays(np.uint8, (3, 2 * n), elements=st.integers(0, 15))))
def test_pack_round_trip(codes: np.ndarray):
    packed = nvfp4.pack(torch.from_numpy(codes))
    assert np.array_equal(packed.numpy(), codes[:, 0::2] + 16 * codes[:, 1::2])
    assert np.array_equal(nvfp4.unpack(packed).numpy(), codes)


def test_pack_needs_pairs():
    with pytest.raises(ValueError, match="even last dim"):
        nvfp4.pack(torch.zeros(2, 3, dtype=torch.uint8))
