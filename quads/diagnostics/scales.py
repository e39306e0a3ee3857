"""Granularity of the activation's global scale: one per token, one per forward and tensor, or one calibrated constant.

    gs = 2688 / amax     amax over the token's row | over all rows of the forward | over calibration tokens (fixed)

Only the trainer's emulation can do this (numerics has per-token scales, the engine's only choice), so that the study
compares T2 variants on the same tokens. A constant scale clips what exceeds the calibrated range; the share of rows
that do is reported. The RAC pass shares the scale of the first pass, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quads.diagnostics.layers import observed
from quads.layers.surgery import quads_layers
from quads.numerics.nvfp4 import dequantize, global_scale, quantize

GRANULARITIES = ("token", "forward", "constant")


def fake_quantize(x: Tensor, gs: Tensor, mask: Tensor | None = None) -> Tensor:
    """NVFP4 of x [T, K] with global scale gs (scalar or [T, 1]); mask bool [K]: RAC's second pass over the residual."""
    wide = x.float()
    first = dequantize(quantize(wide, gs))
    if mask is None:
        return first.to(x.dtype)
    residual = torch.where(mask, wide - first, 0.0)
    return (first + dequantize(quantize(residual, gs))).to(x.dtype)


def amax_of(x: Tensor, granularity: str) -> Tensor:
    """fp32 [T, 1] (token) or scalar (forward)."""
    size = x.float().abs()
    return size.amax(-1, keepdim=True) if granularity == "token" else size.amax()


@torch.no_grad()
def calibrated_amax(model: torch.nn.Module, ids_BT: Tensor) -> dict[str, Tensor]:
    """Largest |x| over calibration tokens by engine key; model after surgery."""
    amax: dict[str, Tensor] = {}

    def observe(key: str, x: Tensor) -> None:
        amax[key] = torch.maximum(amax.get(key, x.new_zeros((), dtype=torch.float32)), amax_of(x, "forward"))

    with observed(model, observe):
        model(input_ids=ids_BT.to(next(model.parameters()).device), use_cache=False)
    return amax


class Clipping:
    """Counts rows whose amax exceeds the constant scale's range."""

    rows = 0
    clipped = 0

    @property
    def share(self) -> float:
        """Clipped rows over all rows; 0 before any."""
        return self.clipped / self.rows if self.rows else 0.0


def with_scale(
    model: torch.nn.Module,
    granularity: str,
    *,
    masks: dict[str, Tensor] | None = None,
    constant: dict[str, Tensor] | None = None,
) -> Clipping:
    """Replace every activation quantizer of `model` (after surgery with W4A16) in place; returns the clip counter.

    Raises ValueError for an unknown granularity or a constant scale without its calibration.
    """
    if granularity not in GRANULARITIES:
        raise ValueError(f"unknown scale granularity {granularity!r}; known: {', '.join(GRANULARITIES)}")
    if granularity == "constant" and constant is None:
        raise ValueError("a constant activation scale needs calibrated_amax(...)")
    counter = Clipping()

    def activation_of(setup: object) -> Callable[..., Tensor]:
        def activation(x: Tensor, part: str | None = None, token: Tensor | None = None) -> Tensor:
            key = setup.key(part)  # type: ignore[attr-defined]
            mask = masks[key].to(x.device) if masks is not None else None
            if granularity == "constant":
                amax = (constant or {})[key]
                counter.rows += len(x)
                counter.clipped += int((amax_of(x, "token") > amax).sum())
            else:
                amax = amax_of(x, granularity)
            return fake_quantize(x, global_scale(amax), mask)

        return activation

    for _, module in quads_layers(model):
        # An instance attribute hides the method, for this model only.
        module.quads.activation = activation_of(module.quads)
    return counter
