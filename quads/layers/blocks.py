"""Inputs and outputs of every decoder layer's attention and feed-forward block, in trainer and engine alike.

    attention    x -> y      what enters and leaves self-attention (after o_proj), before the residual addition
    feed_forward x -> y      the same for the MoE (or dense) block
    layer        stream      the residual stream after the layer

Keys: "<module>.in", "<module>.out" with the trainer's module names (`model.layers.0.self_attn`, `model.layers.0.mlp`),
and `model.layers.0` for the stream. Every forward appends one float32 CPU copy [rows, D], rows = tokens in order.
A copy, because an engine adds the next norm's residual in place. Where a layer returns (update, stream) separately, as
vLLM's do, the stream is their sum in float32; the engine itself rounds it once more when it adds them. A training run
keeps less (`first`): a selection of the first forward's outputs and streams, in its own dtype.
Differs from `output_hidden_states` in that both programs are read at the same places, blocks included.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from quads.layers.names import trainer_module

_LAYER = re.compile(r"(^|\.)layers\.\d+$")
_FEED_FORWARD = ("mlp", "block_sparse_moe")


def blocks(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """(name as in the trainer, module): attention, feed-forward and the layer itself, layer by layer.

    Raises ValueError for a model without decoder layers of that kind.
    """
    found = False
    for name, module in model.named_modules():
        inner = next((part for part in _FEED_FORWARD if hasattr(module, part)), None)
        if not _LAYER.search(name) or inner is None or not hasattr(module, "self_attn"):
            continue
        found = True
        for part in ("self_attn", inner):
            yield trainer_module(f"{name}.{part}"), getattr(module, part)
        yield name, module
    if not found:
        raise ValueError(f"{type(model).__name__} has no decoder layer with self_attn and one of {_FEED_FORWARD}")


@contextmanager
def recorded(
    model: torch.nn.Module, first: Callable[[Tensor], Tensor] | None = None
) -> Iterator[dict[str, list[Tensor]]]:
    """While the block runs: key -> one tensor per forward, see the module docstring.

    first: keep a CPU copy of first(x) alone, for outputs and streams x [..., D] of the first forward; later forwards
    and inputs cost nothing.
    """
    kept: dict[str, list[Tensor]] = {}
    handles = []

    def keep(key: str, x: Tensor) -> None:
        if first is None:
            kept.setdefault(key, []).append(_copy(x))
        elif key not in kept:
            kept[key] = [first(x).detach().to("cpu", copy=True)]

    def before(key: str) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep(key, _input(args, kwargs))

        return hook

    def after(key: str) -> Any:
        def hook(_: Any, args: Any, output: Any) -> None:
            keep(key, _stream(output))

        return hook

    try:
        for name, module in blocks(model):
            if _LAYER.search(name):
                handles.append(module.register_forward_hook(after(name)))
            else:
                if first is None:
                    handles.append(module.register_forward_pre_hook(before(f"{name}.in"), with_kwargs=True))
                handles.append(module.register_forward_hook(after(f"{name}.out")))
        yield kept
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def fed(model: torch.nn.Module, inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """While the block runs, every attention and feed-forward block gets inputs["<module>.in"] [rows, D] instead of its
    own input (one forward of those rows; the trainer's model).
    """
    handles = []

    def before(value: Tensor) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            own = _input(args, kwargs)
            given = value.to(own).view(own.shape)
            if "hidden_states" in kwargs:
                return args, {**kwargs, "hidden_states": given}
            return (given, *args[1:]), kwargs

        return hook

    try:
        for name, module in blocks(model):
            if not _LAYER.search(name):
                handles.append(module.register_forward_pre_hook(before(inputs[f"{name}.in"]), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    value: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return value


def _stream(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    first, *rest = output
    if rest and isinstance(rest[0], Tensor) and rest[0].shape == first.shape:
        return first.float() + rest[0].float()
    value: Tensor = first
    return value


def _copy(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float32, copy=True).reshape(-1, x.shape[-1])
