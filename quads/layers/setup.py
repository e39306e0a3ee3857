# SPDX-License-Identifier: Apache-2.0
"""What a swapped layer multiplies with, and the straight-through estimators.

    forward   y = A(x) W(w)^T      W(w) = dequantize(quantize(round_bf16(w))), A(x) likewise per token
    backward  dL/dw = dL/dW,  dL/dx = dL/dA      (identity through both quantizers)

Master weights keep their dtype; W(w) is cast once to that dtype. How it is computed is `Execution`'s, and whether it is
computed again is the cache's. Precision "bf16" for weights means the rounding alone,
because bf16 is what the engine receives and stores.
Source: asymmetric QAT (weights nvfp4, activations bf16); symmetric QAT is activations nvfp4.
Differs from `w + (q - w).detach()`: that sum rounds once more, and trainer and engine would no longer hold equal
weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from quads.layers.cache import Source, WeightCache
from quads.layers.execution import Execution
from quads.layers.names import DEFAULT_SKIP, engine_name
from quads.layers.weights import SCALE_GROUPS, group_amax
from quads.numerics.qdq import quantize_weight
from quads.numerics.rac import RacSpec

FORMATS = ("bf16", "fp8", "nvfp4")
# (engine key, x [rows, K], token of each row or None when rows are the tokens) -> None
Observer = Callable[[str, torch.Tensor, torch.Tensor | None], None]


@dataclass(frozen=True)
class Precision:
    """weight, activation: bf16 | fp8 | nvfp4 (fp8 exists for parity checks); rac: second pass, for diagnostics.

    scale_group: "fused" shares one NVFP4 global scale among q/k/v and among gate/up, "shard" does not.
    skip: dotted name parts that stay in high precision (see names.skip_reason). Raises ValueError for unknown values.
    """

    weight: str = "bf16"
    activation: str = "bf16"
    scale_group: str = "fused"
    rac: RacSpec | None = None
    skip: tuple[str, ...] = DEFAULT_SKIP

    def __post_init__(self) -> None:
        for what, got, known in (
            ("weight", self.weight, FORMATS),
            ("activation", self.activation, FORMATS),
            ("scale_group", self.scale_group, SCALE_GROUPS),
        ):
            if got not in known:
                raise ValueError(f"Precision.{what}={got!r} is unknown; known: {', '.join(known)}")
        if self.rac is not None and self.activation != "nvfp4":
            raise ValueError(
                f"Precision.rac compensates the NVFP4 activation error but activation is {self.activation!r}; "
                f"set activation='nvfp4' or drop rac"
            )


@dataclass
class LayerSetup:
    """Per-layer state that is no parameter: kept out of the state dict, read at every forward.

    group: modules (this one included) that share the weight scale; () for none.
    masks: static RAC masks, bool [K] by engine key. observer: sees every input while calibrating.
    ancestors: modules that contain this one (FSDP2 may shard at any of them). cache: None when every forward computes.
    """

    name: str
    precision: Precision
    group: tuple[torch.nn.Module, ...] = ()
    execution: Execution = field(default_factory=Execution)
    ancestors: tuple[torch.nn.Module, ...] = ()
    cache: WeightCache | None = None
    masks: dict[str, torch.Tensor] = field(default_factory=dict)
    observer: Observer | None = None

    def key(self, part: str | None = None) -> str:
        """Engine name under which masks travel: `...qkv_proj`, or `...experts.w13` with part "w13"."""
        return engine_name(self.name) if part is None else f"{self.name}.{part}"

    def activation(self, x: torch.Tensor, part: str | None = None, token: torch.Tensor | None = None) -> torch.Tensor:
        """A(x) for x [rows, K]; same shape and dtype. Raises ValueError naming the layer."""
        key = self.key(part)
        if self.observer is not None:
            self.observer(key, x.detach(), token)
        if self.precision.activation == "bf16":
            return x
        return _straight_through(x, lambda value: self._fake_activation(value, key))

    def _fake_activation(self, x: torch.Tensor, key: str) -> torch.Tensor:
        rac, mask = self.precision.rac, None
        if rac is not None and rac.mask == "static":
            mask = self.masks.get(key)
            if mask is None:
                raise ValueError(f"{key}: RAC is static but no mask is set; call set_static_masks(model, masks) first")
            mask = mask.to(x.device)
        try:
            return self.execution.fake_activation(x, self.precision.activation, rac, mask)
        except ValueError as error:
            raise ValueError(f"input of {key}: {error}") from error

    def weight(
        self, module: torch.nn.Module, param: str, quantize: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """W(w) of parameter `param` [..., N, K] of the layer `module`, shape and dtype of w; gradient straight through.

        quantize: computes it from w; runs once per optimizer step when the layer has a cache.
        """
        sources = [Source(member, param) for member in self.group] or [Source(module, param)]
        return _straight_through(
            getattr(module, param), lambda w: self._kept(f"{self.name}.{param}", sources, lambda: quantize(w))
        )

    def _kept(self, key: str, sources: list[Source], compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self.cache is None:
            return compute()
        variant = (self.precision.weight, self.precision.scale_group)
        # A view of its own: autograd marks what a Function returns, which must not be the kept tensor.
        return self.cache.get(key, variant, sources, compute).detach()

    def fake(self, w: torch.Tensor, amax: torch.Tensor | None, param: str) -> torch.Tensor:
        """W(w) of w [..., N, K] by the layer's backend, no gradient; amax as in `quantize_weight`.

        Errors name the parameter.
        """
        try:
            return self.execution.fake_weight(w, self.precision.weight, amax)
        except ValueError as error:
            raise ValueError(f"{self.name}.{param}: {error}") from error

    def dequantized(self, w: torch.Tensor, amax: torch.Tensor | None, param: str) -> torch.Tensor:
        """fp32 dequantized weight of w [..., N, K] by the definition, no gradient, never kept."""
        try:
            return quantize_weight(w, self.precision.weight, amax).dequantize()
        except ValueError as error:
            raise ValueError(f"{self.name}.{param}: {error}") from error

    def shared_amax(self, gather: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach) -> torch.Tensor | None:
        """fp32 [1, 1] over the group's weights, or None when this layer's own amax decides.

        gather: how to get a whole tensor from a parameter; the default needs it to be unsharded already.
        """
        if not self.group or self.precision.weight != "nvfp4" or self.precision.scale_group != "fused":
            return None
        weights = [gather(member.weight) for member in self.group]
        if any(hasattr(w, "full_tensor") for w in weights):
            raise RuntimeError(
                f"{self.name}: a projection that shares its scale is still sharded; apply fully_shard to whole decoder "
                f"layers, or use scale_group='shard'"
            )
        return group_amax(weights, self.execution.amax)

    def kept_amax(self) -> torch.Tensor | None:
        """`shared_amax()` in a forward: once per group and optimizer step when the layer has a cache."""
        if not self.group or self.precision.weight != "nvfp4" or self.precision.scale_group != "fused":
            return None
        sources = [Source(member, "weight") for member in self.group]
        return self._kept(f"{self.key()} amax", sources, self.shared_amax)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, function):
        return function(value)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _straight_through(value: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return _StraightThrough.apply(value, function)
