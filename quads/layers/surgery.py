# SPDX-License-Identifier: Apache-2.0
"""apply_surgery(model, precision): swap classes so that the model multiplies with quantized weights.

Swapped: every torch.nn.Linear and every known fused experts container (experts.KNOWN_EXPERTS) that is not skipped.
Unchanged: parameters, their names, the state dict. Call it before FSDP2's fully_shard.
Stops when a module cannot be handled: an experts tensor of unknown layout, a subclass of nn.Linear (its own forward
would be lost), K that is no multiple of 16 (NVFP4 block). Nothing is changed in that case.
Differs from a name list of layers to quantize: what is not quantized must be skipped by name or is an error, so a
renamed expert tensor cannot slip through in high precision.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch

from quads.layers.cache import WeightCache
from quads.layers.execution import Execution
from quads.layers.experts import ExpertsForward, experts_class, layout_problem
from quads.layers.linear import QuadsLinear
from quads.layers.names import group_members, skip_reason
from quads.layers.setup import LayerSetup, Observer, Precision
from quads.numerics.formats import BLOCK

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SurgeryRow:
    """One module; shapes by parameter name; keys = engine names of its inputs (masks)."""

    module: str
    kind: str
    status: str
    reason: str
    weight: str
    activation: str
    shapes: dict[str, list[int]]
    keys: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SurgeryReport:
    """What surgery did; `rows` covers every nn.Linear and every module with a parameter of 3 or more dimensions."""

    precision: Precision
    rows: list[SurgeryRow]
    execution: Execution = field(default_factory=Execution)

    @property
    def quantized(self) -> int:
        """Number of swapped modules."""
        return sum(row.status == "quantized" for row in self.rows)

    def to_dict(self) -> dict:
        """Plain values for JSON."""
        return {
            "precision": asdict(self.precision),
            "execution": asdict(self.execution),
            "counts": {"quantized": self.quantized, "skipped": len(self.rows) - self.quantized},
            "rows": [asdict(row) for row in self.rows],
        }

    def to_json(self) -> str:
        """Indented JSON text."""
        return json.dumps(self.to_dict(), indent=1)


def apply_surgery(model: torch.nn.Module, precision: Precision, execution: Execution | None = None) -> SurgeryReport:
    """Swap classes in place; returns the report.

    Raises ValueError / TypeError, and RuntimeError for an execution that cannot run here, before anything is changed.
    """
    execution = execution or Execution()
    execution.check(precision.weight, precision.activation, precision.rac)
    modules = dict(model.named_modules())
    rows = [row for name, module in modules.items() if (row := _plan(name, module, precision)) is not None]
    cache = None if execution.cache == "off" else WeightCache(verify=execution.cache == "verify")
    for row in rows:
        if row.status != "quantized":
            continue
        module = modules[row.module]
        is_linear = isinstance(module, torch.nn.Linear)
        group = _siblings(row.module, modules, precision) if is_linear else ()
        module.quads = LayerSetup(row.module, precision, group, execution, _ancestors(row.module, modules), cache)
        module.__class__ = QuadsLinear if is_linear else experts_class(type(module))
        if cache is not None:
            module.register_load_state_dict_post_hook(cache.invalidate)
    if cache is not None:
        model.register_forward_pre_hook(cache.see_shards)
    report = SurgeryReport(precision, rows, execution)
    if not report.quantized:
        raise ValueError(
            f"surgery found nothing to quantize in {type(model).__name__}: {len(rows)} module(s), all skipped by "
            f"{precision.skip}; shorten skip"
        )
    logger.info(
        "surgery: %d modules quantized (weight %s, activation %s), %d kept in high precision",
        *(report.quantized, precision.weight, precision.activation, len(rows) - report.quantized),
    )
    return report


def _plan(name: str, module: torch.nn.Module, precision: Precision) -> SurgeryRow | None:
    shapes = {n: list(p.shape) for n, p in module.named_parameters(recurse=False)}
    is_linear = isinstance(module, torch.nn.Linear)
    if not is_linear and all(len(shape) < 3 for shape in shapes.values()):
        return None
    kind = type(module).__name__
    reason = skip_reason(name, precision.skip)
    if reason is None and isinstance(module, torch.nn.modules.conv._ConvNd):
        reason = "convolution: no NVFP4 kernel multiplies it"
    if reason is not None:
        return SurgeryRow(name, kind, "skipped", reason, "unchanged", "unchanged", shapes)
    if isinstance(module, (QuadsLinear, ExpertsForward)):
        raise TypeError(f"{name}: surgery was already applied to this model; build a fresh one")
    keys = _linear_keys(name, module) if is_linear else _experts_keys(name, module, shapes)
    if "nvfp4" in (precision.weight, precision.activation):
        for parameter, shape in shapes.items():
            if len(shape) > 1 and shape[-1] % BLOCK:
                raise ValueError(
                    f"{name}.{parameter}: K={shape[-1]} (shape {shape}) is no multiple of {BLOCK}, the NVFP4 block "
                    f"along K; pad the model's dimension or add {name.rpartition('.')[2]!r} to skip"
                )
    return SurgeryRow(name, kind, "quantized", "", precision.weight, precision.activation, shapes, keys)


def _linear_keys(name: str, module: torch.nn.Module) -> list[str]:
    if type(module) is not torch.nn.Linear:
        raise TypeError(
            f"{name}: class {type(module).__qualname__} is a subclass of torch.nn.Linear and surgery would replace its "
            f"forward; known: torch.nn.Linear. Apply surgery before other wrappers, or add the module to skip"
        )
    return [LayerSetup(name, Precision()).key()]


def _experts_keys(name: str, module: torch.nn.Module, shapes: dict[str, list[int]]) -> list[str]:
    problem = layout_problem(module)
    if problem is not None:
        raise TypeError(
            f"{name}: parameter(s) {shapes} of {type(module).__qualname__} look like fused experts that surgery does "
            f"not know ({problem}). Add the class to quads.layers.experts after reading its forward, or list it in skip"
        )
    return [f"{name}.w13", f"{name}.w2"]


def _siblings(name: str, modules: dict[str, torch.nn.Module], precision: Precision) -> tuple[torch.nn.Module, ...]:
    head = name.rpartition(".")[0]
    names = [f"{head}.{member}" if head else member for member in group_members(name)]
    kept = [n for n in names if n in modules and skip_reason(n, precision.skip) is None]
    return tuple(modules[n] for n in kept) if len(kept) > 1 else ()


def _ancestors(name: str, modules: dict[str, torch.nn.Module]) -> tuple[torch.nn.Module, ...]:
    parts = name.split(".") if name else []
    return tuple(modules[".".join(parts[:i])] for i in range(len(parts) + 1))


def weight_cache(model: torch.nn.Module) -> WeightCache | None:
    """The cache of a model after surgery, None when it has none."""
    return next((module.quads.cache for _, module in quads_layers(model)), None)


def invalidate_weight_cache(model: torch.nn.Module) -> None:
    """Forget the kept weights: after an edit that no version counter shows, or to give their memory back."""
    cache = weight_cache(model)
    if cache is not None:
        cache.invalidate()


def quads_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """(name at surgery, module) of every swapped layer, in model order."""
    for module in model.modules():
        if isinstance(module, (QuadsLinear, ExpertsForward)):
            yield module.quads.name, module


@contextmanager
def observing(layers: Iterable[torch.nn.Module], observer: Observer) -> Iterator[None]:
    """`observer` sees every quantized input of the swapped `layers` while the block runs.

    q, k and v read the same input: it is observed once.
    """
    seen: set[str] = set()
    chosen = []
    for module in layers:
        key = module.quads.key()
        if not (isinstance(module, QuadsLinear) and key in seen):
            chosen.append(module)
        seen.add(key)
    for module in chosen:
        module.quads.observer = observer
    try:
        yield
    finally:
        for module in chosen:
            module.quads.observer = None


def set_static_masks(model: torch.nn.Module, masks: dict[str, torch.Tensor]) -> None:
    """Hand static RAC masks (bool [K] by engine key) to the layers. Raises ValueError when a layer's mask is
    missing.
    """
    missing: list[str] = []
    for name, module in quads_layers(model):
        setup = module.quads
        keys = [setup.key()] if isinstance(module, QuadsLinear) else [f"{name}.w13", f"{name}.w2"]
        missing += [key for key in keys if key not in masks]
        setup.masks = {key: masks[key] for key in keys if key in masks}
    if missing:
        raise ValueError(f"no static RAC mask for {missing}; calibrate the same model that you quantize")


def quantized_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(parameter name, fp32 dequantized weight) of every swapped layer; sharded parameters are gathered.

    The engine's counterpart is quads.integrations.vllm.reload.engine_weights: equal names, equal values.
    """
    for name, module in quads_layers(model):
        setup = module.quads
        if isinstance(module, QuadsLinear):
            amax = setup.shared_amax(gather)
            yield f"{name}.weight", setup.dequantized(gather(module.weight), amax, "weight")
        else:
            w13, w2 = gather(module.gate_up_proj), gather(module.down_proj)
            values = module.quantized(w13, w2, setup.dequantized)
            yield from zip((f"{name}.gate_up_proj", f"{name}.down_proj"), values, strict=True)


def gather(parameter: torch.Tensor) -> torch.Tensor:
    """The whole tensor behind a (possibly FSDP2-sharded) parameter, detached."""
    value = parameter.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value
