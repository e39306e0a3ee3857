# SPDX-License-Identifier: Apache-2.0
"""Numerics of QUADS: NVFP4, FP8 and residual compensation in readable torch; imports nothing but torch.

`qdq` is the path that trainer and rollout share; `nvfp4`, `fp8`, `rac`, `swizzle` and `formats` are its parts and
`python -m quads.numerics.verify DIR` checks them against a folder of golden vectors.
"""

from quads.numerics.qdq import (
    ActivationQ,
    WeightQ,
    activation_residual,
    check_finite,
    emulated_linear,
    fake_quantize_activation,
    fake_quantize_weight,
    quantize_activation,
    quantize_weight,
    weight_amax,
)
from quads.numerics.rac import RacSpec, channel_scores, residual_mask, select

__all__ = [
    "ActivationQ",
    "RacSpec",
    "WeightQ",
    "activation_residual",
    "channel_scores",
    "check_finite",
    "emulated_linear",
    "fake_quantize_activation",
    "fake_quantize_weight",
    "quantize_activation",
    "quantize_weight",
    "residual_mask",
    "select",
    "weight_amax",
]
