# SPDX-License-Identifier: Apache-2.0
"""A whole weight update made from a checkpoint folder: what a trainer would send, for programs without a trainer.

    whole_update(folder, model, masks, device) -> (checkpoint name, bfloat16 tensor)..., (mask name, uint8 [K])...

Masks come from a file (bool tensors by engine key) or are random ones of the right size, seeded: the same for every
engine of one mode. Contract: names and order are those that quads.integrations.vllm.reload takes; an engine without
static masks gets none. Imports torch when called: not before an engine's environment is set.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quads.integrations.vllm.generate import EngineError


def whole_update(folder: Path, model: Any, masks: Path | None, device: str) -> Iterator[tuple[str, Any]]:
    """Weights, then masks, on `device`; model: the engine's module. EngineError for a mask that the file lacks."""
    import torch

    from quads.integrations.vllm.reload import file_weights

    for name, tensor in file_weights(folder):
        sent = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        yield name, sent.to(device)
    yield from update_masks(model, masks, device)


def update_masks(model: Any, file: Path | None, device: str) -> Iterator[tuple[str, Any]]:
    """(name, uint8 [K]) of every static mask of the engine's module; none in a mode without. EngineError as above."""
    import torch

    from quads.integrations.vllm.reload import file_weights
    from quads.integrations.vllm.state import quads_layers
    from quads.layers.names import RAC_MASK_PREFIX
    from quads.numerics.rac import select

    states = [state for _, state in quads_layers(model) if state.masks]
    given = dict(file_weights(file)) if file and states else {}
    draw = torch.Generator().manual_seed(0)
    for state in states:
        for key, mask in state.masks.items():
            if file and key not in given:
                raise EngineError(f"{file} holds no mask {key}; it has {', '.join(sorted(given))}")
            chosen = given.get(key)
            if chosen is None:
                scores = torch.rand(mask.shape[0], generator=draw, dtype=torch.float64)
                spec = state.config.mode.rac
                assert spec is not None  # it has masks
                chosen = select(scores, spec)
            yield RAC_MASK_PREFIX + key, chosen.to(torch.uint8).to(device)
