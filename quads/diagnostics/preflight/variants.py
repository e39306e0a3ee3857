"""The streams of a pre-flight: one per trainer precision and one per rollout precision, with a name for each.

    trainer   bf16 | w4a16 (weight QAT) | w4a4 (symmetric QAT)                    float32 arithmetic, the trainer's own
    rollout   bf16 | fp8 | w4a16 | w4a4 | w4a4+rac-k0.5-block16-static | ...        bf16 arithmetic between quantizers

A gap needs one of each: d = log pi_trainer - log pi_rollout on the same tokens. The search adds a rollout stream per
k x {block16, channel} x {static, token}; at k = 1 all of them are one. Masks `batch` are left out: they depend on the
batch that an engine forms. Differs from quads.diagnostics.capture's modes, whose names and skips come from arms.
"""

from __future__ import annotations

from dataclasses import dataclass

from quads.config import Preflight
from quads.layers.setup import Precision
from quads.numerics.rac import RacSpec

FORMATS = {"bf16": ("bf16", "bf16"), "fp8": ("fp8", "fp8"), "w4a16": ("nvfp4", "bf16"), "w4a4": ("nvfp4", "nvfp4")}
# Weights of the reference that a stream's drift is measured from.
SAME_WEIGHTS = "w4a16"


@dataclass(frozen=True)
class Stream:
    """One forward of the model; engine: arithmetic and storage of a bf16 engine instead of the trainer's float32."""

    name: str
    precision: Precision
    engine: bool

    @property
    def key(self) -> str:
        """Unique among all streams."""
        return f"{'rollout' if self.engine else 'trainer'}:{self.name}"


def rac_name(spec: RacSpec) -> str:
    """w4a4+rac-k0.5-block16-static."""
    return f"w4a4+rac-k{spec.k:g}-{spec.granularity}-{spec.mask}"


def default_rac(settings: Preflight) -> RacSpec:
    """The RAC whose verdict is given."""
    return RacSpec(**settings.rac.model_dump())


def search_specs(settings: Preflight) -> list[RacSpec]:
    """The grid of the search, smallest k first; empty when it is off."""
    if settings.gap == 0 or "w4a4+rac" not in settings.rollouts:
        return []
    specs = []
    for k in settings.k:
        kinds = (
            [(g, m) for g in ("block16", "channel") for m in ("static", "token")] if k < 1 else [("block16", "static")]
        )
        specs += [RacSpec(k, g, m, settings.rac.score) for g, m in kinds]
    return specs


def make_streams(settings: Preflight) -> list[Stream]:
    """All streams; the trainers bf16 and w4a16 always run, they are the references of drift and calibration."""

    def precision(name: str, rac: RacSpec | None = None) -> Precision:
        weight, activation = FORMATS[name]
        return Precision(weight, activation, rac=rac, skip=settings.keep_high_precision)

    streams = [Stream(name, precision(name), False) for name in dict.fromkeys(("bf16", "w4a16", *settings.trainers))]
    plain = [name for name in ("bf16", *settings.rollouts) if name in FORMATS]
    streams += [Stream(name, precision(name), True) for name in dict.fromkeys(plain)]
    if "w4a4+rac" in settings.rollouts:
        specs = dict.fromkeys([default_rac(settings), *search_specs(settings)])
        streams += [Stream(rac_name(spec), precision("w4a4", spec), True) for spec in specs]
    return streams
