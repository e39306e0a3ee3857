# SPDX-License-Identifier: Apache-2.0
"""Environment variables that an NVIDIA GPU engine needs, the same for training, evaluation and tests.

    TRITON_F32_DEFAULT=ieee         Triton multiplies float32 in TF32 by default; its error of 1e-4 is amplified by FP4
                                    rounding (float32 W4A4 engine on an H200: mean gap .046 instead of 2.5e-7)
    VLLM_USE_FLASHINFER_SAMPLER=0   FlashInfer compiles its sampler at the first request: that needs nvcc and minutes
    TORCHDYNAMO_DISABLE=1           parts of vLLM's sampler would be compiled at the first request, beside eager models

Contract: read by Triton, vLLM and torch at import, so they must be set before. Differs from engine arguments in that
vLLM has none for them. No torch.
"""

from __future__ import annotations

GPU = {
    "TRITON_F32_DEFAULT": "ieee",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TORCHDYNAMO_DISABLE": "1",
}
