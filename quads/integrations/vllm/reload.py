# SPDX-License-Identifier: Apache-2.0
"""Weight updates of a running "quads" engine, and dumps of what it multiplies with.

    with LayerwiseReload(model, vllm_config, model_config) as update:
        for bucket in buckets:                      # [(checkpoint name, tensor), ...] in any grouping
            update.load(bucket)                     # names "quads.rac_mask.<key>" are masks, the rest are weights

Weights arrive in checkpoint names and values; vLLM's layerwise reload buffers them per layer, quantizes each layer
once it is complete and copies the result into the old storage: addresses, shapes and dtypes stay. The engine then
equals one that was started from the new weights, bit for bit.
Contract: an update is complete or it is an error. A tensor that is not finite is an error that names it. Every
quantized layer must be loaded exactly once, every other layer with parameters fully, and with rac_masks="sync" every
mask must be sent. After a failed update the engine refuses further ones, because part of its weights is gone. A
bucket's tensors must stay valid until the update ends (clone them when the sender reuses its buffer). With prefix
caching on, reset the prefix cache afterwards.
Differs from `model.load_weights`, which skips quantization, and from vLLM's stock reload of BF16 experts on CPU, which
writes unpacked data over a packed layout without notice (refused here).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from quads.integrations.vllm.native import stored
from quads.integrations.vllm.quantization import QuadsConfig
from quads.integrations.vllm.receipt import build_receipt, write_receipt
from quads.integrations.vllm.shards import Shard, gathered, is_first_rank
from quads.integrations.vllm.state import LayerState, quads_layers
from quads.layers.names import RAC_MASK_PREFIX, trainer_names
from quads.numerics.qdq import WeightQ, check_finite

logger = logging.getLogger(__name__)

Weights = Iterable[tuple[str, torch.Tensor]]


def engine_config(model: torch.nn.Module) -> QuadsConfig:
    """The QuadsConfig of a loaded model. Raises RuntimeError when the engine does not run method "quads"."""
    for module, _ in quads_layers(model):
        return module.quant_method.config
    raise RuntimeError(
        f"{type(model).__name__} has no layer of quantization method 'quads'; start the engine with "
        f"quantization='quads' and check that the plugin is installed (entry point vllm.general_plugins)"
    )


class LayerwiseReload:
    """One weight update as a context manager; `load` may be called any number of times inside."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, model_config: Any):
        self.model, self.vllm_config, self.model_config = model, vllm_config, model_config
        self.config = engine_config(model)
        self.states: list[LayerState] = [state for _, state in quads_layers(model)]
        self.tensors = 0  # weights seen in this update

    def __enter__(self) -> LayerwiseReload:
        if self.config.broken:
            raise RuntimeError(f"an earlier weight update failed ({self.config.broken}); restart the engine")
        _refuse_stock_experts_on_cpu(self.model)
        self.before = {state.name: (state.loads, dict(state.mask_loads)) for state in self.states}
        self.context = set_current_vllm_config(self.vllm_config)
        self.context.__enter__()
        initialize_layerwise_reload(self.model)
        return self

    def load(self, bucket: Weights) -> None:
        """bucket: (name, tensor) pairs, streamed. Raises ValueError for an unknown mask."""
        self.model.load_weights(self._without_masks(bucket))

    def _without_masks(self, bucket: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in bucket:
            if name.startswith(RAC_MASK_PREFIX):
                self._set_mask(name.removeprefix(RAC_MASK_PREFIX), tensor)
            else:
                self.tensors += 1
                if tensor.is_floating_point() and tensor.element_size() > 1:
                    check_finite(tensor, f"weight update: {name}")
                yield name, tensor

    def _set_mask(self, key: str, mask: torch.Tensor) -> None:
        for state in self.states:
            if key in state.masks:
                state.set_mask(key, mask)
                return
        known = sorted(key for state in self.states for key in state.masks)
        raise ValueError(
            f"RAC mask for unknown key {key!r} in mode {self.config.engine.mode.name}; "
            f"known: {', '.join(known) or 'none'}"
        )

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                self._check_loaded()
                finalize_layerwise_reload(self.model, self.model_config)
                self._check_masks()
                self.config.reloads += 1
                write_receipt(build_receipt(self.model, self.config), self.config)
                logger.info("weight update %d: %d tensors", self.config.reloads, self.tensors)
        except BaseException as raised:
            error = raised
            raise
        finally:
            if error is not None:
                self.config.broken = f"{type(error).__name__}: {error}"
            self.context.__exit__(kind, error, trace)

    def _check_loaded(self) -> None:
        missing = [name for name, module in self.model.named_modules() if _is_incomplete(module)]
        missing += [state.name for state in self.states if state.loads != self.before[state.name][0] + 1]
        if missing:
            raise RuntimeError(
                f"weight update is incomplete after {self.tensors} tensors: {', '.join(sorted(set(missing)))} got only "
                f"part of their weights (or none, or twice); send the whole state dict in checkpoint names"
            )

    def _check_masks(self) -> None:
        if self.config.engine.rac_masks != "sync":
            return
        missing = [
            key
            for state in self.states
            for key in state.masks
            if state.mask_loads.get(key, 0) == self.before[state.name][1].get(key, 0)
        ]
        if missing:
            raise RuntimeError(
                f"weight update without RAC masks for {', '.join(missing)}; send a tensor named "
                f"'{RAC_MASK_PREFIX}<key>' for each with every update (rac_masks='sync')"
            )


def _is_incomplete(module: torch.nn.Module) -> bool:
    """Whether a layer with parameters of its own still waits for some of them (attention is loaded last by vLLM)."""
    info = get_layerwise_info(module)
    has_parameters = any(p is not None for p in module._parameters.values())
    is_attention = hasattr(module, "process_weights_after_loading")
    if not has_parameters or is_attention or not info.can_load():
        return False
    # vLLM pads the vocabulary (43 rows become 64): the padding is filled in, never loaded.
    padding = 0
    if isinstance(module, VocabParallelEmbedding):
        rows = module.num_embeddings_per_partition - module.shard_indices.num_org_elements
        padding = rows * module.embedding_dim
    return info.load_numel < info.load_numel_total - padding


def _refuse_stock_experts_on_cpu(model: torch.nn.Module) -> None:
    quantized = {id(module) for module, _ in quads_layers(model)}
    for name, module in model.named_modules():
        if current_platform.is_cpu() and isinstance(module, RoutedExperts) and id(module) not in quantized:
            raise RuntimeError(
                f"{name}: vLLM's own CPU experts cannot be refreshed (packed once, overwritten unpacked later); remove "
                f"'experts' from skip, mode bf16 serves them through the plugin"
            )


def layerwise_reload(worker_or_runner: Any, weights: Weights) -> int:
    """One whole update from a stream of (name, tensor); returns the number of completed updates."""
    runner = getattr(worker_or_runner, "model_runner", worker_or_runner)
    with LayerwiseReload(runner.get_model(), runner.vllm_config, runner.model_config) as update:
        update.load(weights)
    return update.config.reloads


def engine_operands(model: torch.nn.Module) -> dict[str, WeightQ]:
    """Trainer parameter name -> what the engine multiplies with, quantized layers only: q*s in the engine's dtype and
    its factor fp32 [..., N, 1]. Under tensor parallelism the whole weight from all shards, on every rank: a collective.

    Names and shapes are the trainer's (q/k/v and dense gate/up split by logical width; experts as gate_up_proj [E, 2F,
    D] and down_proj [E, D, F]). Raises RuntimeError when ranks with parts of one row disagree about its factor.
    """
    operands: dict[str, WeightQ] = {}
    for module, state in quads_layers(model):
        if state.kind == "experts":
            w13 = stored(module, "w13_weight", state.config, state.inputs[f"{state.name}.w13"])
            parts = [_whole(part, state.shard, False, state.name) for part in _split(w13, state.widths)]
            operands[f"{state.name}.gate_up_proj"] = WeightQ(*(torch.cat(p, -2) for p in zip(*parts, strict=True)))
            w2 = stored(module, "w2_weight", state.config, state.inputs[f"{state.name}.w2"])
            operands[f"{state.name}.down_proj"] = _whole(w2, state.shard, True, state.name)
            continue
        parts = _split(stored(module, "weight", state.config, state.inputs[state.name]), state.widths)
        for i, (name, part) in enumerate(zip(trainer_names(state.name), parts, strict=True)):
            replicas = state.shard.replicas if i else 1  # k and v of a q/k/v: several ranks may hold the same heads
            operands[f"{name}.weight"] = _whole(part, state.shard, state.shard.inner, name, replicas)
    return operands


def operand_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """`engine_operands` as tensors to store, "<name>.qs" and "<name>.rcp": what quads.trainer.weights.Dump reads."""
    return {f"{name}.{key}": t for name, w in engine_operands(model).items() for key, t in w._asdict().items()}


def _split(w: WeightQ, widths: list[int]) -> list[WeightQ]:
    return [WeightQ(*part) for part in zip(w.qs.split(widths, -2), w.rcp.split(widths, -2), strict=True)]


def _whole(w: WeightQ, shard: Shard, inner: bool, name: str, replicas: int = 1) -> WeightQ:
    if shard.size == 1:
        return w
    if not inner:
        return WeightQ(gathered(w.qs, -2, replicas), gathered(w.rcp, -2, replicas))
    rcp = gathered(w.rcp, -1)
    if not torch.equal(rcp, w.rcp.expand_as(rcp)):
        raise RuntimeError(f"{name}: tensor parallel ranks hold different scales of the same rows; restart the engine")
    return WeightQ(gathered(w.qs, -1), w.rcp)


def engine_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Trainer parameter name -> fp32 dequantized weight as the engine multiplies with it: `engine_operands`, of which
    it has the names, shapes and errors. Compare with quads.layers.surgery.quantized_weights.
    """
    return {name: operand.dequantize() for name, operand in engine_operands(model).items()}


def file_weights(path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of one safetensors file, or of all of a folder in sorted order. Raises FileNotFoundError."""
    from safetensors import safe_open

    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise FileNotFoundError(f"{path}: no safetensors file; give a file or a checkpoint folder")
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name)


class WorkerExtension:
    """Methods for plain vLLM: LLM(worker_extension_cls="quads.integrations.vllm.reload.WorkerExtension"), then
    llm.collective_rpc("quads_reload_from_file", args=(path,)). verl's engine has an extension of its own.
    """

    def quads_reload_from_file(self, path: str, masks: str | None = None) -> int:
        """Weights from a safetensors file or checkpoint folder, masks (by engine key) from another; number of
        updates.
        """

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            for key, mask in file_weights(masks) if masks else ():
                yield RAC_MASK_PREFIX + key, mask
            yield from file_weights(path)

        return layerwise_reload(self, stream())

    def quads_reload(self, tensors: list[tuple[str, torch.Tensor]]) -> int:
        """Weights and masks from memory; number of updates so far."""
        return layerwise_reload(self, tensors)

    def quads_dump_weights(self, path: str, operands: bool = False) -> int:
        """Write engine_weights as safetensors (fp32), atomically, or with `operands` "<name>.qs" and "<name>.rcp" of
        engine_operands; returns the number of weights. The first rank of a tensor parallel group writes.
        """
        from safetensors.torch import save_file

        model = self.model_runner.get_model()
        tensors = operand_tensors(model) if operands else engine_weights(model)
        count = len(tensors) // 2 if operands else len(tensors)
        if not is_first_rank():
            return count
        temporary = f"{path}.{os.getpid()}"
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, temporary)
        os.replace(temporary, path)
        return count

    def quads_receipt(self) -> dict[str, Any]:
        """The receipt of this worker as plain values."""
        model = self.model_runner.get_model()
        return build_receipt(model, engine_config(model))
