# SPDX-License-Identifier: Apache-2.0
"""What the vLLM plugin calls, without vLLM: a linear and routed experts with routing on the device, and a reference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gemm_cases import DEVICE, gaussian
from tolerances import TOLERANCES
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode

from quads.kernels import backend
from quads.layers.routing import combine, route_on_device
from quads.numerics.qdq import ActivationQ, WeightQ, emulated_linear, quantize_activation, quantize_weight
from quads.numerics.rac import select


class Layers:
    """One linear [N, D] with bias and E experts [2F, D], [D, F]; weights and masks are overwritten by `load`."""

    def __init__(self, case: tuple, D: int = 64, N: int = 48, F: int = 32, E: int = 5) -> None:
        self.weight_format, self.activation, self.spec = case
        self.code, self.shapes = backend.rac_code(self.spec), {"w": (N, D), "w13": (E, 2 * F, D), "w2": (E, D, F)}
        self.inner = {"w": D, "w13": D, "w2": F}
        new = {"dtype": torch.bfloat16, "device": DEVICE}
        self.qs = {name: torch.empty(shape, **new) for name, shape in self.shapes.items()}
        self.rcp = {name: torch.empty(*shape[:-1], 1, device=DEVICE) for name, shape in self.shapes.items()}
        static = self.spec is not None and self.spec.mask == "static"
        self.masks = {n: torch.zeros(k, dtype=torch.bool, device=DEVICE) for n, k in self.inner.items() if static}
        self.bias = torch.empty(N, **new)
        self.load(0)

    def load(self, seed: int) -> None:
        """New weights, masks and bias in the old places, as a weight update does."""
        for i, (name, shape) in enumerate(self.shapes.items()):
            q = quantize_weight(gaussian(*shape, seed=10 * seed + i) / 8, self.weight_format)
            self.qs[name].copy_(q.qs)
            self.rcp[name].copy_(q.rcp.expand_as(self.rcp[name]))
        for mask in self.masks.values():
            scores = torch.rand(len(mask), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            mask.copy_(select(scores, self.spec))
        self.bias.copy_(gaussian(len(self.bias), seed=seed + 3))

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        formats = (self.activation, self.code)
        return backend.linear(x, self.qs["w"], self.rcp["w"], self.masks.get("w"), self.bias, *formats)

    def experts(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = route_on_device(ids, self.shapes["w13"][0])
        y = self.expert_rows(x, rows.token, rows.offsets)
        return combine(y, weights, rows).to(x.dtype)

    def expert_rows(self, x: torch.Tensor, token: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        tensors = (self.qs["w13"], self.rcp["w13"], self.qs["w2"], self.rcp["w2"])
        masks = (self.masks.get("w13"), self.masks.get("w2"))
        return backend.expert_rows(x, token, offsets, *tensors, *masks, self.activation, self.code)

    def both(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), self.experts(x, ids, weights)

    def reference(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A loop over experts with quads.numerics; rows are summed choice by choice.

        Not a loop over rows: its hundred thousand tiny launches at 300 tokens took minutes under compute-sanitizer.
        """
        x = x.contiguous()
        y = self.product(x, "w", bias=self.bias)
        rows = torch.zeros(*ids.shape, self.shapes["w2"][1], device=DEVICE)
        for expert in range(self.shapes["w13"][0]):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            if not len(token):
                continue
            gate, up = self.product(x[token], "w13", expert).chunk(2, -1)
            rows[token, choice] = self.product(silu(gate) * up, "w2", expert).float()
        out = torch.zeros(len(x), self.shapes["w2"][1], device=DEVICE)
        for choice in range(ids.shape[1]):
            out += rows[:, choice] * weights[:, choice, None]
        return y, out.to(x.dtype)

    def product(
        self, x: torch.Tensor, name: str, expert: int | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """y of one matrix by the definition."""
        own = slice(None) if expert is None else expert
        w = WeightQ(self.qs[name][own], self.rcp[name][own])
        return emulated_linear(self.quantized(x, name), w, x.dtype, bias)

    def quantized(self, x: torch.Tensor, name: str) -> ActivationQ:
        return quantize_activation(x, self.activation, self.spec, self.masks.get(name))


def inputs(tokens: int, D: int = 64, slots: int = 3, seed: int = 0, lowest: int = -1, highest: int = 7):
    """x [T, D], ids [T, S] (experts 3 and 4 get no rows, -1 and 5 upwards live elsewhere), router weights [T, S]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(lowest, highest, (tokens, slots), generator=generator)
    ids = torch.where((ids == 3) | (ids == 4), 1, ids).to(DEVICE)
    weights = torch.rand(tokens, slots, generator=generator).to(DEVICE)
    return gaussian(tokens, D, seed=seed).bfloat16(), ids, weights


def close(got: tuple, expected: tuple) -> None:
    for g, e in zip(got, expected, strict=True):
        assert g.shape == e.shape and g.dtype == e.dtype
        if e.numel():
            relative = float((g.float() - e.float()).abs().max() / e.float().abs().max().clamp(min=1e-30))
            print("relative", relative)
            assert relative <= TOLERANCES["engine_layers_relative"].limit


class NoWait(TorchDispatchMode):
    """Fails on operations that need a value of the device on the host."""

    WAITS = ("_local_scalar_dense", "nonzero", "bincount", "equal", "is_nonzero", "_unique2", "masked_select")

    def __torch_dispatch__(self, func: Callable, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        assert name not in self.WAITS, name
        if func.namespace == "quads":  # the mode is off inside a custom op: run its body under the mode
            with self:
                return backend.SCHEMAS[name][1](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
