# SPDX-License-Identifier: Apache-2.0
"""Number formats of NVFP4 and FP8: value tables, rounding and casts, in plain torch.

    E2M1 (FP4)  sign, 2 exponent bits, 1 mantissa bit: 0 .5 1 1.5 2 3 4 6 and negatives; code = sign<<3 | index
    E4M3 (FP8)  bias 7, smallest subnormal 2^-9, largest finite value 448, no infinity; bytes 0x7F and 0xFF are NaN

Every rounding is to nearest, ties to even *mantissa* (E2M1: .25 -> 0, .75 -> 1, 2.5 -> 2, 5 -> 4), as Blackwell's
converters do. Source: OCP OFP8 and MX specifications; docs of the `float4_e2m1fn` and `float8_e4m3fn` types.

Differs from the obvious: E4M3 casts clamp to +-448 first. A bare `x.to(torch.float8_e4m3fn)` saturates in some
versions and devices and yields NaN above 464 in others; with the clamp all agree.

Conventions fixed here for the whole package: a `scale` multiplies a stored value to decode it, a global scale `gs` is
in *divisor form* (gs = 2688 / amax, value = q * s / gs), and `rcp` is 1 / gs rounded once to fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

E2M1_MAX = 6.0
E4M3_MAX = 448.0
BLOCK = 16
NVFP4_RANGE = E2M1_MAX * E4M3_MAX  # 2688: the largest q * s

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = E2M1_MAGNITUDES + tuple(-v for v in E2M1_MAGNITUDES)  # indexed by code 0..15; code 8 is -0.0

# Index of a magnitude, addressed by twice the magnitude (0, 1, 2, 3, 4, 6, 8, 12); the other places are never read.
_CODE_OF_DOUBLED = (0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7)
_EXPONENT_BITS = 0x7F800000


def divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """fp32 a / b rounded once; exactly one of them is a Python number, the other an fp32 tensor of any shape.

    Plain torch rounds twice: `number / tensor` is reciprocal times number everywhere (28 % of results off by an ulp),
    and CUDA turns `tensor / number` into a product with the number's reciprocal. A 0-dim device tensor avoids both.
    """
    device = a.device if isinstance(a, Tensor) else b.device if isinstance(b, Tensor) else None
    return torch.div(*(v if isinstance(v, Tensor) else torch.full((), v, device=device) for v in (a, b)))


def round_e2m1(y: Tensor) -> Tensor:
    """Round fp32 `y` (any shape) to the nearest E2M1 value, saturating at +-6; keeps the sign of zero and NaN.

    (a + c) - c rounds a to a multiple of ulp(c), ties to even, because fp32 addition does. With e the exponent of a
    clamped to [0, 2], c = 2^(22 + e) has ulp 2^e / 2: the spacing of E2M1 in that binade (.5 below 1, too).
    """
    a = y.abs()
    c = a.clamp(1.0, 4.0).view(torch.int32).bitwise_and_(_EXPONENT_BITS).view(torch.float32).mul_(2.0**22)
    return a.add_(c).sub_(c).clamp_(max=E2M1_MAX).copysign_(y)


def encode_e2m1(q: Tensor) -> Tensor:
    """Code 0..15 (uint8, same shape) of fp32 values that are exactly E2M1; -0.0 is code 8, NaN +6 as in hardware."""
    table = torch.tensor(_CODE_OF_DOUBLED, dtype=torch.uint8, device=q.device)
    q = torch.where(q.isnan(), E2M1_MAX, q)
    return table[(q.abs() * 2).long()] | (q.signbit().to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """fp32 values (same shape) of uint8 codes 0..15."""
    return torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)[codes.long()]


def to_e4m3(x: Tensor) -> Tensor:
    """Cast fp32 to `torch.float8_e4m3fn`, nearest even, saturating at +-448 (infinity too); NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def round_e4m3(x: Tensor) -> Tensor:
    """fp32 -> nearest E4M3 value as fp32, saturating at +-448."""
    return to_e4m3(x).to(torch.float32)


def encode_e4m3(x: Tensor, saturate: bool = True) -> Tensor:
    """E4M3 byte (uint8, same shape) of the value nearest to fp32 `x`.

    saturate=False: what would round beyond 448 (|x| > 464: the tie goes to 448's even mantissa) is NaN, sign kept.
    """
    codes = to_e4m3(x).view(torch.uint8)
    return codes if saturate else torch.where(x.abs() > 464.0, codes | 0x7F, codes)


def decode_e4m3(codes: Tensor) -> Tensor:
    """fp32 values of E4M3 bytes (uint8, same shape)."""
    return codes.view(torch.float8_e4m3fn).to(torch.float32)
