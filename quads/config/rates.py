"""Rates behind GPU-hour estimates (`snakemake -n NAME`, quads.estimate). They schedule nothing and change no result."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from quads.config.arms import Frozen


class Rates(Frozen):
    """Tokens per second and GPU. `source` says where they come from and stands under every table made with them."""

    source: str = Field(description="measured on what, or assumed and why")
    decode_tokens_per_s: float = Field(gt=0, description="generation in BF16, one GPU, the engine's batch full")
    train_tokens_per_s: float = Field(gt=0, description="forward, backward and optimizer, one GPU")
    response_tokens: float = Field(gt=0, description="mean length of a response")
    decode_factor: dict[Literal["bf16", "fp8", "w4a16", "w4a4", "w4a4+rac"], PositiveFloat] = Field(
        {}, description="rate of a rollout mode relative to BF16 (emulated NVFP4 is slower); unset: 1"
    )
    start_minutes: float = Field(10.0, ge=0, description="of one job: imports, weights, engine start")
    qat_overhead: float = Field(1.0, ge=1, description="training time with fake-quantized weights / without")
