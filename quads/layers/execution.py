# SPDX-License-Identifier: Apache-2.0
"""How swapped layers compute what `Precision` defines: backend of the quantizers, expert product, weight cache.

    backend   reference  quads.numerics (torch), the definition
              triton     quads.kernels, equal bit by bit; NaN instead of an error for non-finite values (no wait)
    experts   loop       one product per expert that is hit, any dtype
              grouped    one grouped product for all experts (torch grouped_mm), bf16, no host wait
    cache     off | on | verify        see quads.layers.cache

Contract: nothing falls back. `check` raises RuntimeError with the reason when a choice cannot run; the surgery report
records the choices. Backend and cache never change a bit; the grouped product adds in another order.
The rounding to bf16 of weight format "bf16" is one torch cast in either backend.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from quads.numerics import qdq
from quads.numerics.rac import RacSpec

BACKENDS = ("reference", "triton")
EXPERTS = ("loop", "grouped")
CACHES = ("off", "on", "verify")


@dataclass(frozen=True)
class Execution:
    """Choices of the module docstring. Raises ValueError for unknown ones."""

    backend: str = "reference"
    experts: str = "loop"
    cache: str = "off"

    def __post_init__(self) -> None:
        for what, got, known in (
            ("backend", self.backend, BACKENDS),
            ("experts", self.experts, EXPERTS),
            ("cache", self.cache, CACHES),
        ):
            if got not in known:
                raise ValueError(f"Execution.{what}={got!r} is unknown; known: {', '.join(known)}")

    def check(self, weight: str, activation: str, rac: RacSpec | None) -> None:
        """Raises RuntimeError when the backend cannot compute these formats here."""
        reason = None if self.backend == "reference" else _triton_problem((weight, activation), rac)
        if reason:
            raise RuntimeError(
                f"trainer backend {self.backend!r} is not available here: {reason}; choose one of {', '.join(BACKENDS)}"
            )
        if self.experts == "grouped" and not hasattr(torch, "_grouped_mm"):
            raise RuntimeError("experts='grouped' needs torch._grouped_mm, which this torch lacks; set experts='loop'")

    def fake_weight(self, w: Tensor, fmt: qdq.Format, amax: Tensor | None) -> Tensor:
        """W(w), shape and dtype of w [..., N, K]; amax as `quads.numerics.quantize_weight`."""
        if self.backend == "reference":
            return qdq.fake_quantize_weight(w, fmt, amax)
        if fmt == "bf16":
            return w.to(torch.bfloat16).to(w.dtype)
        from quads.kernels import weight

        return weight.fake_quantize_weight(w, fmt, amax)

    def amax(self, w: Tensor) -> Tensor:
        """fp32 [..., 1, 1] of w after its rounding to bf16."""
        if self.backend == "reference":
            return qdq.weight_amax(w)
        from quads.kernels import weight

        return weight.weight_amax(w)

    def fake_activation(self, x: Tensor, fmt: qdq.Format, rac: RacSpec | None, mask: Tensor | None) -> Tensor:
        """A(x), shape and dtype of x [rows, K]."""
        if self.backend == "reference":
            return qdq.fake_quantize_activation(x, fmt, rac, mask)
        from quads.kernels import activation

        return activation.fake_quantize_activation(x, fmt, rac, mask)


def _triton_problem(formats: tuple[str, ...], rac: RacSpec | None) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if rac is not None:
        return "no kernel adds both RAC passes in fp32"
    if "fp8" in formats:
        return "there is no FP8 kernel"
    from quads.kernels.encode import INTERPRETED

    if not INTERPRETED and not torch.cuda.is_available():
        return "its kernels need a CUDA device and torch sees none"
    return None
