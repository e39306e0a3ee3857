# SPDX-License-Identifier: Apache-2.0
"""Per-layer state of the plugin: names, static RAC masks, counters.

The state hangs on the layer as a plain attribute, not as parameter or buffer: vLLM's layerwise reload rebuilds
parameters and buffers from the checkpoint format, while a mask must keep its value and its address. Masks are bool [K]
tensors on the weight's device, written by copy_ only; under tensor parallelism K and the mask are this rank's slice of
the layer's. A mask that has not arrived is all false, which is no
compensation: what vLLM's start-up runs (and captures) before the first weight update.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from quads.integrations.vllm.compat import is_start_up
from quads.integrations.vllm.shards import Shard, maximum
from quads.numerics.qdq import ActivationQ, activation_amax, quantize_activation
from quads.rollout.mode import EngineConfig

ATTRIBUTE = "quads_state"


@dataclass
class LayerState:
    """One quantized layer. inputs: this rank's K of every quantized input by engine key; split: keys of those whose K
    is spread over the ranks; loads: times its weights were quantized.
    """

    name: str
    kind: str  # "linear" or "experts"
    config: EngineConfig
    inputs: dict[str, int]
    widths: list[int]  # rows of the logical parts of the (first) weight
    shard: Shard = field(default_factory=Shard)
    split: frozenset[str] = frozenset()
    loads: int = 0
    masks: dict[str, torch.Tensor] = field(default_factory=dict)
    mask_loads: dict[str, int] = field(default_factory=dict)  # a key without entry has no mask yet

    def prepare_masks(self, device: torch.device) -> None:
        """Allocate the masks once, all false; their address never changes afterwards."""
        if self.config.mode.needs_masks and not self.masks:
            self.masks = {key: torch.zeros(k, dtype=torch.bool, device=device) for key, k in self.inputs.items()}

    def set_mask(self, key: str, mask: torch.Tensor) -> None:
        """Overwrite the mask of `key` in place by the whole layer's mask, of which a rank takes its slice. Raises
        ValueError when shape or dtype do not fit.
        """
        own = self.masks[key]
        whole = (len(own) * (self.shard.size if key in self.split else 1),)
        if mask.shape != whole or mask.dtype not in (torch.bool, torch.uint8):
            raise ValueError(f"RAC mask {key}: expected bool {whole}, got {mask.dtype} {tuple(mask.shape)}")
        own.copy_((self.shard.slice(mask) if key in self.split else mask).to(torch.bool))
        self.mask_loads[key] = self.mask_loads.get(key, 0) + 1

    def quantize_input(self, key: str, x: torch.Tensor) -> ActivationQ:
        """x [rows, K] -> ActivationQ. Raises ValueError naming the layer; RuntimeError when its static mask is
        missing.
        """
        mode = self.config.mode
        rac, mask = mode.rac, None
        if mode.needs_masks:
            if key in self.mask_loads:
                mask = self.masks[key]
            elif is_start_up():
                rac = None
            else:
                self.require_masks()
        with naming_input(key):
            return quantize_activation(x, mode.activation, rac, mask, self.common_amax(key, x))

    def common_amax(self, key: str, x: torch.Tensor) -> torch.Tensor | None:
        """fp32 [rows, 1]: amax of whole tokens when ranks hold parts of them (one collective), else None."""
        if key not in self.split or self.config.mode.activation == "bf16":
            return None
        return maximum(activation_amax(x))

    def require_masks(self) -> None:
        """RuntimeError naming the first static mask that has not arrived."""
        for key in self.inputs if self.config.mode.needs_masks else ():
            if key not in self.mask_loads:
                raise RuntimeError(
                    f"{key}: asked to serve with a static RAC mask but none has arrived "
                    f"(rac_masks={self.config.rac_masks!r}); send the masks with a weight update before the first "
                    f"request"
                )

    def mask_report(self) -> dict[str, dict[str, Any]]:
        """State, size and hash of every mask (of this rank's slice), for the receipt."""
        report = {}
        for key, mask in self.masks.items():
            values = mask.to("cpu", torch.uint8)
            report[key] = {
                "loads": self.mask_loads.get(key, 0),
                "selected": int(values.sum()),
                "channels": values.numel(),
                "sha256": hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16],
            }
        return report


@contextlib.contextmanager
def naming_input(key: str) -> Iterator[None]:
    """Put the layer's name in front of a ValueError of the numerics."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"input of {key}: {error}") from error


def quads_layers(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, LayerState]]:
    """Every layer of the model that this plugin quantizes, with its state."""
    for module in model.modules():
        state = vars(module).get(ATTRIBUTE)
        if state is not None:
            yield module, state
