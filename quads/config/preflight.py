"""What `quads.preflight` asks of a checkpoint: which precisions, how many tokens, which search.

Contract: no field changes a training result; the values used are written into preflight.json. Differs from
`Diagnostics` in that no experiment and no arm is involved: the checkpoint is somebody else's.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from quads.config.arms import Arm, Frozen, Rac

RolloutName = Literal["fp8", "w4a16", "w4a4", "w4a4+rac"]
TrainerName = Literal["bf16", "w4a16", "w4a4"]


class Preflight(Frozen):
    """Sizes, precisions and the search of one pre-flight."""

    rollouts: tuple[RolloutName, ...] = Field(
        ("fp8", "w4a16", "w4a4", "w4a4+rac"), min_length=1, description="rollout precisions to judge; bf16 always runs"
    )
    trainers: tuple[TrainerName, ...] = Field(
        ("bf16", "w4a16", "w4a4"),
        min_length=1,
        description="trainer precisions to judge them against: no QAT, weight QAT, symmetric QAT",
    )
    rac: Rac = Rac()
    gap: float = Field(
        0.02,
        ge=0,
        allow_inf_nan=False,
        description="target mean gap (nats) of the search over k and masks; 0 turns the search off",
    )
    k: tuple[float, ...] = Field((0.125, 0.25, 0.5, 0.75, 1.0), min_length=1, description="k of the search")
    sequences: int = Field(128, gt=1, description="sequences used at most, calibration included")
    tokens: int = Field(512, gt=1, description="longer sequences are cut to this many tokens")
    calibration_share: float = Field(
        0.25, gt=0, lt=1, description="share of the sequences that calibrates static RAC masks and is not scored"
    )
    tokens_per_forward: int = Field(
        8192, gt=0, description="tokens, padding included, that pass a layer together; fewer take less memory"
    )
    generate: int = Field(
        0, ge=0, description="sample responses of up to this many tokens from the checkpoint; needs it in memory whole"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seed of sampled responses, drawn tokens and the bootstrap")
    chip: Literal["B200", "H200"] = Field("B200", description="GPU whose rates the speed model takes")
    clip_low: float = Field(0.2, gt=0, lt=1, description="clip range of the policy ratio, for the clipped share")
    clip_high: float = Field(0.2, gt=0)
    microbatch_sequences: int = Field(16, gt=0, description="size of a micro-batch in `mean over micro-batches of max`")
    keep_high_precision: tuple[str, ...] = Field(
        Arm.model_fields["keep_high_precision"].default, description="module-name parts that are never quantized"
    )
    minimum_tokens: int = Field(200, gt=0, description="fewer scored tokens give the verdict `unknown`")
    resamples: int = Field(1000, gt=0, description="bootstrap over sequences, for the interval of the mean gap")

    @model_validator(mode="after")
    def _no_batch_mask(self) -> Self:
        if self.rac.mask == "batch":
            raise ValueError("rac.mask=batch depends on the batch that an engine forms; use static or token")
        if list(self.k) != sorted(set(self.k)) or not all(0 < k <= 1 for k in self.k):
            raise ValueError(f"k={list(self.k)} must rise strictly within (0, 1]")
        return self
