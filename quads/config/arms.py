"""An arm: which precision the trainer and the rollout engine use, and how the policy loss treats their difference.

    trainer:  y = A(x) W(w)^T        W, A in {bf16, nvfp4}; QUADS uses W = nvfp4, A = bf16 (asymmetric QAT)
    rollout:  y = Q(x) Wq^T + Q(m * (x - Q(x))) Wq^T       the second term is RAC, with channel mask m

Source: paper sections on asymmetric QAT and residual activation compensation (what the paper leaves open is a field
here). Differs from engine flags in that one file states both sides, so that a
mismatch between trainer and rollout is always intended.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

WeightFormat = Literal["bf16", "fp8", "nvfp4"]
ActivationFormat = Literal["bf16", "fp8", "nvfp4"]


class Frozen(BaseModel):
    """Base of every config model: closed (unknown key is an error) and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Rac(Frozen):
    """Residual activation compensation: a second NVFP4 pass over part of the residual x - Q(x)."""

    k: float = Field(0.5, gt=0.0, le=1.0, description="share of channels (or blocks) compensated, ceil(k n) of n")
    granularity: Literal["block16", "channel"] = Field(
        "block16", description="unit of the mask along K; block16 is the block scale's own unit"
    )
    mask: Literal["static", "batch", "token"] = Field(
        "static",
        description="static: calibrated at every weight sync; batch: from the rows of one forward pass, which makes "
        "a token's log-prob depend on its batch; token: from each token's own residual",
    )
    score: Literal["sumsq", "abs"] = Field("sumsq", description="residual statistic that ranks channels")


class TrainerPrecision(Frozen):
    """What the trainer multiplies with; master weights stay float32 and gradients are straight-through."""

    weight: Literal["bf16", "nvfp4"] = Field("bf16", description="bf16 rounds like the engine's stored weight")
    activation: Literal["bf16", "nvfp4"] = Field("bf16", description="nvfp4 makes the QAT symmetric")

    @model_validator(mode="after")
    def _no_a4_without_w4(self) -> Self:
        if self.activation == "nvfp4" and self.weight != "nvfp4":
            raise ValueError("trainer.activation=nvfp4 needs trainer.weight=nvfp4 (symmetric W4A4 QAT)")
        return self


class RolloutPrecision(Frozen):
    """What the rollout engine multiplies with."""

    weight: WeightFormat = "bf16"
    activation: ActivationFormat = "bf16"
    rac: Rac | None = Field(None, description="null: no compensation")

    @model_validator(mode="after")
    def _known_pair(self) -> Self:
        pair = (self.weight, self.activation)
        known = {("bf16", "bf16"), ("fp8", "fp8"), ("nvfp4", "bf16"), ("nvfp4", "nvfp4")}
        if pair not in known:
            listed = ", ".join(f"{w}/{a}" for w, a in sorted(known))
            raise ValueError(f"rollout weight/activation {pair[0]}/{pair[1]} is not a mode; known: {listed}")
        if self.rac is not None and self.activation != "nvfp4":
            raise ValueError("rollout.rac compensates the NVFP4 activation error: it needs rollout.activation=nvfp4")
        return self

    @property
    def mode(self) -> str:
        """Name used in receipts, tables and error messages: bf16, fp8, w4a16, w4a4 or w4a4+rac."""
        if self.weight == self.activation and self.weight != "nvfp4":
            return self.weight
        return ("w4a16" if self.activation == "bf16" else "w4a4") + ("+rac" if self.rac else "")


class Correction(Frozen):
    """Which log-probs are the behaviour policy in the PPO ratio, and whether importance weights are applied."""

    old_log_probs: Literal["rollout", "trainer"] = Field(
        "rollout",
        description="rollout: the engine's log-probs (the mismatch enters the ratio); trainer: recomputed before "
        "the update (the mismatch leaves the ratio)",
    )
    importance: Literal["none", "token", "sequence"] = Field(
        "none",
        description="truncated importance sampling with weight min(pi_trainer / pi_rollout, threshold)",
    )
    threshold: float = Field(2.0, gt=0.0)

    @model_validator(mode="after")
    def _importance_needs_trainer(self) -> Self:
        if self.importance != "none" and self.old_log_probs != "trainer":
            raise ValueError(
                "correction.importance needs correction.old_log_probs=trainer: the weight is the ratio of the "
                "recomputed to the rollout probability"
            )
        return self


class Arm(Frozen):
    """One row of the results table."""

    name: str = Field(pattern=r"^[a-z0-9_]+$", description="file stem under configs/arms and row key")
    title: str = Field(description="row label in tables and figures")
    paper_row: str | None = Field(None, description="the paper's name for this arm, if it has one")
    trainer: TrainerPrecision = TrainerPrecision()
    rollout: RolloutPrecision = RolloutPrecision()
    correction: Correction = Correction()
    weight_scale_group: Literal["fused", "shard"] = Field(
        "fused",
        description="fused: one NVFP4 global scale for q/k/v and one for gate/up (what one fused GEMM needs); "
        "shard: one per matrix",
    )
    keep_high_precision: tuple[str, ...] = Field(
        ("lm_head", "embed_tokens", "mlp.gate", "norm"),
        description="module-name parts that are never quantized on either side",
    )
