"""Trainer weights against engine weights, element by element: the definition of delta_weight = 0.

    different = number of elements w with trainer(w) != engine(w),   max_abs = max |trainer(w) - engine(w)|

Both sides are dequantized float32 tensors by parameter name (quads.layers.surgery.quantized_weights and the engine's
own dump). Differs from comparing log-probs or norms: one wrong scale of one expert shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor


class Dump(Mapping[str, Tensor]):
    """An engine's dump: name -> float32 qs * rcp, of "<name>.qs" [..., N, K] and "<name>.rcp" [..., N, 1] in the file.

    Read when asked for: of a model of real size neither file nor comparison need fit into memory.
    """

    def __init__(self, path: str | Path) -> None:
        from safetensors import safe_open

        self.file = safe_open(path, "pt")
        self.names = {key.removesuffix(".qs") for key in self.file.keys() if key.endswith(".qs")}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        values: Tensor = self.file.get_tensor(f"{name}.qs").float() * self.file.get_tensor(f"{name}.rcp")
        return values

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.names))

    def __len__(self) -> int:
        return len(self.names)


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
