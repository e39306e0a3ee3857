"""Trainer weights against engine weights, element by element: the definition of delta_weight = 0.

    different = number of elements w with trainer(w) != engine(w),   max_abs = max |trainer(w) - engine(w)|

Both sides are dequantized float32 tensors by parameter name (quads.layers.surgery.quantized_weights and the engine's
own dump). Differs from comparing log-probs or norms: one wrong scale of one expert shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor


def compare_weights(trainer: Iterable[tuple[str, Tensor]], engine: Mapping[str, Tensor]) -> dict[str, Any]:
    """{"elements", "different", "max_abs", "tensors"}. Raises ValueError when names or shapes do not match."""
    elements = different = 0
    max_abs, seen = 0.0, set()
    for name, ours in trainer:
        if name not in engine:
            raise ValueError(f"the engine holds no weight {name!r}; it holds {sorted(engine)}")
        theirs = engine[name].to(ours.device)
        if ours.shape != theirs.shape:
            raise ValueError(f"{name}: trainer shape {tuple(ours.shape)}, engine shape {tuple(theirs.shape)}")
        seen.add(name)
        elements += ours.numel()
        different += int((ours != theirs).sum())
        max_abs = max(max_abs, float((ours - theirs).abs().max()))
    if extra := sorted(set(engine) - seen):
        raise ValueError(f"the trainer quantizes no weight {extra}, which the engine does")
    return {"elements": elements, "different": different, "max_abs": max_abs, "tensors": len(seen)}
