# SPDX-License-Identifier: Apache-2.0
"""NVFP4: two-level scaled FP4, bit for bit as each engine computes it.

    x [..., K]  ->  q = E2M1 [..., K],  s = E4M3 [..., G] one per 16 elements along K,  gs = fp32 [..., 1]
    x ~ q * s / gs,   gs = 2688 / amax(x) = 448 * 6 / amax(x),   s = E4M3(gs * amax(block) / 6)

Shapes: K elements along the GEMM's reduction dim, G = K / 16 blocks. All arithmetic is fp32 with one rounding per
written operation. The engines agree on the formula and differ in the order of operations, in what a block scale that
underflows to zero means and in how zero is guarded; `PROFILES` names these orders:

    vllm_cuda         vLLM's CUDA quantizer with its approximate reciprocals made exact; canonical for activations
    verl_export       compressed-tensors / verl weight export (block amax in fp32); canonical for weights
    flashinfer, te, vllm_emul, vllm_emul_triton, verl_qdq, modelopt, torchao    the peers

Source: reading of those kernels; tests/vectors holds an independent oracle's bytes for every profile.

Differs from the obvious: the *same gs bytes* must reach every consumer. 1/RN(amax/2688) is not RN(2688/amax) for a
quarter of all amax values, and one ulp of gs moves scale bytes and codes; so the API passes gs, never amax.
Signed zero: every profile keeps the sign of zero in codes (-0.0 and negative underflow give code 8) except modelopt,
where a -0.0 input gives code 0. Real engines normalise it in places; decoded values are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from quads.numerics.formats import (
    BLOCK,
    E2M1_MAX,
    NVFP4_RANGE,
    decode_e2m1,
    decode_e4m3,
    divide,
    encode_e2m1,
    encode_e4m3,
    round_e2m1,
    round_e4m3,
)

_RCP_6 = float(torch.tensor(1.0) / 6)  # 1/6 rounded to fp32 (a Python double would round later and differently)
_FLT_MAX = float(torch.finfo(torch.float32).max)
_GS_MAX = 2.0**126  # above it 1/gs is subnormal, which kernels flush to zero


class NVFP4(NamedTuple):
    """codes uint8 [..., K] (0..15, one per element), scales uint8 [..., K/16] (E4M3 bytes), gs fp32 (divisor form)."""

    codes: Tensor
    scales: Tensor
    gs: Tensor


@dataclass(frozen=True)
class Profile:
    """One engine's order of operations; b = block amax, s = decoded E4M3 scale, both broadcast against gs.

    block_scale: (b, gs) -> fp32 scale before the saturating E4M3 cast.
    element: (x, s, gs, b) -> fp32 that is rounded to E2M1; s, gs, b are [..., G, 1], x is [..., G, 16].
    decode: (s, gs) -> fp32 factor of q.
    zero_scale: replaces an E4M3 scale that came out as zero (None: zero is kept).
    keeps_negative_zero: whether a -0.0 input gives code 8.
    """

    block_scale: Callable[[Tensor, Tensor], Tensor]
    element: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    decode: Callable[[Tensor, Tensor], Tensor]
    zero_scale: float | None = None
    keeps_negative_zero: bool = True


def _reciprocal_scale(b: Tensor, gs: Tensor) -> Tensor:
    return gs * (b * _RCP_6)


def _divided_scale(b: Tensor, gs: Tensor) -> Tensor:
    return gs * divide(b, E2M1_MAX)


def _te_scale(b: Tensor, gs: Tensor) -> Tensor:
    return b * (gs * _RCP_6)


def _multiplier_scale(b: Tensor, gs: Tensor) -> Tensor:
    return b / (gs.reciprocal() * E2M1_MAX)


def _modelopt_scale(b: Tensor, gs: Tensor) -> Tensor:
    sf = _multiplier_scale(b, gs)
    return torch.where(sf == 0, 1.0, sf).clamp_(min=2.0**-9)


def _torchao_scale(b: Tensor, gs: Tensor) -> Tensor:
    return (divide(b, E2M1_MAX) / gs.reciprocal()).clamp_(min=2.0**-6)  # 2^-6 is the smallest *normal* E4M3


def _vllm_cuda_element(x: Tensor, s: Tensor, gs: Tensor, b: Tensor) -> Tensor:
    m = (s * gs.reciprocal()).reciprocal_()
    return x * m.masked_fill_(s == 0, 0.0)


def _flashinfer_element(x: Tensor, s: Tensor, gs: Tensor, b: Tensor) -> Tensor:
    # The guard looks at the block amax, not at the scale: a scale that underflowed gives x * inf, and 0 * inf = NaN,
    # which the converter turns into +6.
    m = (s * gs.reciprocal()).reciprocal_()
    return torch.nan_to_num(x * m.masked_fill_(b == 0, 0.0), nan=E2M1_MAX, posinf=_FLT_MAX, neginf=-_FLT_MAX)


def _te_element(x: Tensor, s: Tensor, gs: Tensor, b: Tensor) -> Tensor:
    return x * (s * gs.reciprocal()).reciprocal_().clamp_(max=_FLT_MAX)


def _vllm_emul_element(x: Tensor, s: Tensor, gs: Tensor, b: Tensor) -> Tensor:
    m = s * gs.reciprocal()
    return x * torch.where(m == 0, 1e8, m).reciprocal_()  # its zero guard: divide by 1e8 instead of zero


def _vllm_emul_triton_element(x: Tensor, s: Tensor, gs: Tensor, b: Tensor) -> Tensor:
    return x * (gs / s).masked_fill_(s == 0, 0.0)


def _verl_export_element(x: Tensor, s: Tensor, gs: Tensor, b: Tensor) -> Tensor:
    return x / (s / gs)


def _verl_qdq_decode(s: Tensor, gs: Tensor) -> Tensor:
    d = s * gs.reciprocal()
    return torch.where(d >= 1e-5, d, 1.0)  # absolute threshold: zeroes tiny blocks that every engine keeps


def _verl_qdq_element(x: Tensor, s: Tensor, gs: Tensor, b: Tensor) -> Tensor:
    return x / _verl_qdq_decode(s, gs)


def _modelopt_element(x: Tensor, s: Tensor, gs: Tensor, b: Tensor) -> Tensor:
    return x / (s * gs.reciprocal())


def _torchao_element(x: Tensor, s: Tensor, gs: Tensor, b: Tensor) -> Tensor:
    return x * (gs.reciprocal().reciprocal_() / s)


def _decode_by_reciprocal(s: Tensor, gs: Tensor) -> Tensor:
    return s * gs.reciprocal()


def _decode_by_division(s: Tensor, gs: Tensor) -> Tensor:
    return s / gs


PROFILES: dict[str, Profile] = {
    "vllm_cuda": Profile(_reciprocal_scale, _vllm_cuda_element, _decode_by_reciprocal),
    "flashinfer": Profile(_reciprocal_scale, _flashinfer_element, _decode_by_reciprocal),
    "te": Profile(_te_scale, _te_element, _decode_by_reciprocal),
    "vllm_emul": Profile(_reciprocal_scale, _vllm_emul_element, _decode_by_division),
    "vllm_emul_triton": Profile(_reciprocal_scale, _vllm_emul_triton_element, _decode_by_division),
    "verl_export": Profile(_divided_scale, _verl_export_element, _decode_by_division, zero_scale=0.125),
    "verl_qdq": Profile(_multiplier_scale, _verl_qdq_element, _verl_qdq_decode),
    "modelopt": Profile(_modelopt_scale, _modelopt_element, _decode_by_reciprocal, keeps_negative_zero=False),
    "torchao": Profile(_torchao_scale, _torchao_element, _decode_by_reciprocal),
}


def find_profile(name: str) -> Profile:
    """Profile by name. Raises ValueError naming the known ones."""
    if name not in PROFILES:
        raise ValueError(f"unknown NVFP4 profile {name!r}; known: {', '.join(PROFILES)}")
    return PROFILES[name]


def check_k(shape: torch.Size | tuple[int, ...]) -> None:
    """Raises ValueError when the last dim is not a positive multiple of 16."""
    if len(shape) == 0 or shape[-1] == 0 or shape[-1] % BLOCK:
        raise ValueError(
            f"NVFP4 needs a last dim K that is a positive multiple of {BLOCK}, got shape {tuple(shape)}; "
            f"pad K with zeros or leave this tensor in bf16 (add its module to the skipped ones)"
        )


def global_scale(amax: Tensor) -> Tensor:
    """fp32 divisor-form global scale RN(2688 / amax), same shape; amax 0 gives 1.0, at most 2^126 (amax < 3.2e-35).

    amax: fp32 >= 0, the largest magnitude of whatever shares the scale (tensor, expert, token, fused group).
    Raises ValueError when it is not finite.
    """
    if not bool((amax < torch.inf).all()):  # False for NaN too
        raise ValueError("NVFP4 global scale: amax is not finite (the tensor holds NaN or infinity); fix its source")
    return divide(NVFP4_RANGE, amax.to(torch.float32)).clamp_(max=_GS_MAX).masked_fill_(amax == 0, 1.0)


def reciprocal_ambiguity(x: Tensor, gs: Tensor) -> tuple[Tensor, Tensor]:
    """Where a kernel with approximate reciprocals may differ from vllm_cuda: bool scales [..., G], codes [..., K].

    True where a byte changes when any of the three reciprocals (of 6, gs and s/gs) moves by at most one ulp; there a
    scale may differ by one byte and a code by one step, elsewhere neither may. x [..., K] finite, gs as in `quantize`.
    """

    def moved(r: Tensor, ulp: int) -> Tensor:
        return r if ulp == 0 else torch.nextafter(r, torch.full_like(r, ulp * torch.inf))

    exact = quantize(x, gs)
    blocks = x.to(torch.float32).unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1, keepdim=True)
    gs = exact.gs.unsqueeze(-1)
    scales_differ = torch.zeros_like(exact.scales, dtype=torch.bool)
    codes_differ = torch.zeros_like(exact.codes, dtype=torch.bool)
    for ulp_6, ulp_gs, ulp_s in product((-1, 0, 1), repeat=3):
        s = round_e4m3(gs * (amax * moved(torch.tensor(_RCP_6), ulp_6).to(x.device)))
        m = moved((s * moved(gs.reciprocal(), ulp_gs)).reciprocal(), ulp_s).masked_fill(s == 0, 0.0)
        scales_differ |= encode_e4m3(s.squeeze(-1)) != exact.scales
        codes_differ |= encode_e2m1(round_e2m1(blocks * m)).flatten(-2) != exact.codes
    return scales_differ, codes_differ


def quantize_blocks(x: Tensor, amax: Tensor, gs: Tensor, profile: Profile) -> tuple[Tensor, Tensor]:
    """The core: x fp32 [..., G, 16], its block amax [..., G], gs broadcastable to [..., G].

    Returns q fp32 [..., G, 16] (E2M1 values) and s fp32 [..., G] (E4M3 values).
    """
    s = round_e4m3(profile.block_scale(amax, gs))
    if profile.zero_scale is not None:
        s.masked_fill_(s == 0, profile.zero_scale)
    scaled = profile.element(x, s.unsqueeze(-1), gs.unsqueeze(-1), amax.unsqueeze(-1))
    if not profile.keeps_negative_zero:
        scaled = torch.where(x == 0, 0.0, scaled)
    return round_e2m1(scaled), s


def quantize(x: Tensor, gs: Tensor, profile: str = "vllm_cuda") -> NVFP4:
    """Quantize x [..., K] (any float dtype, computed in fp32) with the given global scale.

    gs: fp32, scalar or broadcastable to [..., 1] (one per tensor, expert or row).
    Raises ValueError for K % 16 != 0, a non-finite x, gs that is not positive and finite, or an unknown profile.
    """
    order = find_profile(profile)
    check_k(x.shape)
    gs = gs.to(torch.float32)
    if not bool(((gs > 0) & (gs < torch.inf)).all()):
        raise ValueError("NVFP4 global scale must be positive and finite; compute it with global_scale(amax)")
    blocks = x.to(torch.float32).unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    if not bool((amax < torch.inf).all()):
        raise ValueError(f"NVFP4 input of shape {tuple(x.shape)} holds NaN or infinity; quantize finite values only")
    q, s = quantize_blocks(blocks, amax, gs, order)
    return NVFP4(encode_e2m1(q).flatten(-2), encode_e4m3(s), gs)


def dequantize(nv: NVFP4, profile: str = "vllm_cuda") -> Tensor:
    """fp32 [..., K] = q * RN(s / gs), the inner factor in the profile's own order (last-ulp differences)."""
    factor = find_profile(profile).decode(decode_e4m3(nv.scales), nv.gs)
    return (decode_e2m1(nv.codes).unflatten(-1, (-1, BLOCK)) * factor.unsqueeze(-1)).flatten(-2)


def to_qs(nv: NVFP4) -> Tensor:
    """fp32 [..., K] = q * s without gs: at most 6 significant bits and |qs| <= 2688, exact in bf16."""
    return (decode_e2m1(nv.codes).unflatten(-1, (-1, BLOCK)) * decode_e4m3(nv.scales).unsqueeze(-1)).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """uint8 codes [..., K] -> uint8 [..., K/2]; element 2i in the low nibble, 2i+1 in the high one. K must be even."""
    if codes.shape[-1] % 2:
        raise ValueError(f"packing FP4 needs an even last dim, got shape {tuple(codes.shape)}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """uint8 [..., K/2] -> uint8 codes [..., K]; inverse of `pack`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
