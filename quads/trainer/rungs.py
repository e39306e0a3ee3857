# SPDX-License-Identifier: Apache-2.0
"""The trainer's model at another precision for the length of a block, while it trains.

    P  trainer           the precision it trains at
    Q  rollout_weights   the rollout's weights, P's activations (and P's second pass, if it has one)
    R  rollout_all       the rollout's weights and activations, with RAC where the rollout has it

Only what the swapped layers read at every forward is exchanged (precision, static masks and, away from the layer's own
precision, the reference backend without a weight cache, which changes no bit); parameters, gradients, optimizer state
and class stay. So the three rungs are the same program on the same master weights, and where two precisions are equal
the rungs are equal bit for bit. Works on a model that FSDP2 has sharded.
Differs from quads.diagnostics.ladder, which loads a checkpoint once per rung: here the weights are those of this step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from quads.layers.setup import Precision
from quads.layers.surgery import quads_layers, set_static_masks

RUNGS = ("trainer", "rollout_weights", "rollout_all")


def rung_precisions(trainer: Precision, rollout: Precision) -> dict[str, Precision]:
    """Precision of each of RUNGS. Raises ValueError when the two sides skip different layers."""
    if set(trainer.skip) != set(rollout.skip):
        raise ValueError(
            f"trainer and rollout keep different layers in high precision: {sorted(trainer.skip)} and "
            f"{sorted(rollout.skip)}; surgery of this model cannot stand for both"
        )
    weights = replace(trainer, weight=rollout.weight, scale_group=rollout.scale_group)
    return dict(zip(RUNGS, (trainer, weights, replace(rollout, skip=trainer.skip)), strict=True))


@contextmanager
def at_precision(
    model: torch.nn.Module, precision: Precision, masks: Mapping[str, torch.Tensor] | None = None
) -> Iterator[None]:
    """Let every swapped layer compute at `precision`; masks: static RAC masks, bool [K] by engine key.

    Raises ValueError when static RAC lacks a mask. Restores on every way out; nothing may train inside.
    """
    setups = [module.quads for _, module in quads_layers(model)]
    before = [(s, s.precision, s.masks, s.execution, s.cache) for s in setups]
    try:
        if precision.rac is not None and precision.rac.mask == "static":
            set_static_masks(model, dict(masks or {}))
        for setup in setups:
            if setup.precision != precision:
                # No kernel adds both RAC passes, and kept weights of another format would double their memory.
                setup.execution, setup.cache = replace(setup.execution, backend="reference", cache="off"), None
            setup.precision = precision
        yield
    finally:
        for setup, own, own_masks, execution, cache in before:
            setup.precision, setup.masks, setup.execution, setup.cache = own, own_masks, execution, cache
