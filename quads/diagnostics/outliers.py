"""Outlier channels on and off without retraining: the same function with another spread inside the 16-blocks.

    injected at strength s0 (warm-up), then scaled once more by s / s0 on the same channels -> strength s; s = 1 is off

In exact arithmetic the logits do not depend on s (quads.toy.outliers), so that whatever changes is quantization. In
float32 they agree to rounding, in bf16-rounded weights a little less; T0 is therefore taken at each strength.
Only for checkpoints of quads.warmup: a trained model's own outliers cannot be switched off this way.
Emulated: the gap is T2 - T0 and T2 - T1 in the trainer's float32 arithmetic, without any engine drift.
"""

from __future__ import annotations

from pathlib import Path

import torch

from quads.config import ConfigError, Outliers
from quads.files import read_result
from quads.toy.outliers import inject


def injected_strength(checkpoint: Path, outliers: Outliers) -> float:
    """Strength recorded in the checkpoint's manifest. Raises ConfigError when there is none or it is another one."""
    if not (checkpoint / "manifest.json").is_file():
        raise ConfigError(f"{checkpoint}: no manifest of quads.warmup, so its outlier channels are not ours to scale")
    recorded = read_result(checkpoint / "manifest.json", "warm-up manifest", ("outliers",))["outliers"]["strength"]
    if recorded != outliers.strength:
        raise ConfigError(f"{checkpoint} has outliers of strength {recorded}, the experiment says {outliers.strength}")
    return float(recorded)


def rescale(model: torch.nn.Module, outliers: Outliers, strength: float) -> torch.nn.Module:
    """Change the strength of the injected channels in place; model as loaded, before surgery."""
    # Not validated on purpose: a ratio below 1 undoes an injection, and is no setting of a warm-up.
    ratio = outliers.model_copy(update={"strength": strength / outliers.strength})
    inject(model, ratio)  # type: ignore[arg-type]
    return model
