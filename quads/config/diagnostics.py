"""What `quads.diagnose` measures: how much it samples, which sweeps it runs, and when training counts as collapsed.

Contract: no field changes a training result, but for `collapse` under grpo.stop_on_collapse. A field that decides the
content of a capture, a study or a training folder is in its path's hash. Differs from flags of the stage in that a
table can be traced to one YAML file.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from quads.config.arms import Frozen


class Collapse(Frozen):
    """The collapse detector (quads.diagnostics.collapse states the rule these numbers enter)."""

    window: int = Field(7, gt=0, description="steps of the trailing median that stands for reward and gap")
    baseline: int = Field(10, gt=0, description="first steps whose median gap is the run's own baseline")
    drop: float = Field(0.75, gt=0, lt=1, description="alarm when reward < drop x the highest reward so far")
    noise: float = Field(1.5, ge=0, description="... and the fall exceeds this many standard deviations of the noise")
    growth: float = Field(2.0, gt=1, description="gap alarm when gap > growth x baseline")
    patience: int = Field(7, gt=0, description="steps in a row before a condition counts")
    recover: float = Field(0.9, gt=0, le=1, description="recovered when reward >= recover x highest for `patience`")

    @property
    def shortest(self) -> int:
        """Fewest training steps of which anything can be said: below that no condition can hold for `patience`."""
        return self.patience + 1

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.recover <= self.drop:
            raise ValueError(f"collapse.recover={self.recover} must exceed collapse.drop={self.drop}")
        return self


class Diagnostics(Frozen):
    """Sizes and sweeps of the step-0 studies; each seed draws its own prompts and samples."""

    prompts: int = Field(64, gt=0, description="evaluation prompts per seed")
    samples_per_prompt: int = Field(4, gt=1, description="more than one: advantages need a group")
    seeds: tuple[int, ...] = Field((0, 1, 2), min_length=1)
    single_sequences: int = Field(
        48, gt=0, description="sequences per seed scored again one at a time: batch dependence and routing"
    )
    layer_tokens: int = Field(
        512, ge=0, description="tokens per seed whose block inputs and outputs the arms' engines give; 0: none"
    )
    trained_prompts: int = Field(32, gt=0, description="prompts for the checkpoint of a training run, one seed")
    float32_engine: bool = Field(True, description="score arms' modes in a float32 engine too: splits delta_num")
    k: tuple[float, ...] = Field((0.0, 0.125, 0.25, 0.5, 0.75, 1.0), min_length=2, description="k sweep of RAC")
    mask_k: float = Field(0.5, gt=0, le=1, description="k of the mask study and of the per-layer table")
    outlier_strengths: tuple[float, ...] = Field((1.0, 4.0, 8.0, 12.0), description="1 is off")
    noise: tuple[float, ...] = Field(
        (2.0**-12, 2.0**-9, 2.0**-6, 2.0**-3),
        description="perturbation test: noise on a layer's input, relative to each row's root mean square",
    )
    microbatch_sequences: int = Field(16, gt=0, description="size of a micro-batch in `mean over micro-batches of max`")
    tokens_per_forward: int = Field(8192, gt=0)
    collapse: Collapse = Collapse()
    training_every: int = Field(
        20, ge=0, description="during training: steps between decompositions, the first and last step too; 0: never"
    )

    @model_validator(mode="after")
    def _sweeps(self) -> Self:
        if list(self.k) != sorted(set(self.k)) or not all(0 <= k <= 1 for k in self.k):
            raise ValueError(f"diagnostics.k={list(self.k)} must rise strictly within [0, 1]")
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"diagnostics.seeds lists a value twice: {list(self.seeds)}")
        if any(s < 1 for s in self.outlier_strengths):
            raise ValueError(
                f"diagnostics.outlier_strengths={list(self.outlier_strengths)}: 1 is off, lower is unknown"
            )
        return self
