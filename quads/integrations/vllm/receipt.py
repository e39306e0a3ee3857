# SPDX-License-Identifier: Apache-2.0
"""The receipt: what the engine really quantized, with which backend, written as JSON and checked for completeness.

    {"plugin", "mode", "backend", "execution", "backend_check", "config", "model", "modules": [{"module", "kind",
     "status", "reason", "weight", "activation", "activation_kernel", "shapes", "loads"}], "counts", "masks", "reloads",
     "tensor_parallel_size", "versions", "pid"}
    execution = {"backend", "chosen_by", "product", "activation_kernel", "activation_reason", "graph_safe",
                 "graph_reason", "engine_mode", "non_finite_input"}
    backend_check = of quads.integrations.vllm.guard: {"backend", "layers", "largest"}, null with backend reference

Modules, shapes and masks are those of rank 0 of a tensor parallel group, which writes the file.
Written after the model is loaded and after every completed weight update; atomically, so that a reader never sees half
of it. Raises RuntimeError when a linear or an experts layer is in high precision although nothing asked for that, when
a skip entry fits no module, and ValueError naming a parameter outside the quantized layers that is not finite.
Differs from a log line: vLLM logs and goes on when a plugin cannot be loaded; the launcher checks this file instead.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

import quads
from quads.integrations.vllm.guard import check_layers
from quads.integrations.vllm.quantization import QuadsConfig, engine_layer_name
from quads.integrations.vllm.shards import is_first_rank
from quads.integrations.vllm.state import quads_layers
from quads.kernels.backend import product
from quads.layers.names import DEFAULT_SKIP, ROUTERS, skip_reason
from quads.numerics.qdq import check_finite

logger = logging.getLogger(__name__)

_CHECKED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def finish_load(model: torch.nn.Module, config: QuadsConfig) -> None:
    """Check that the model is complete, that its backend multiplies as the reference does, and write the receipt."""
    check_skip(model, config)
    check_parameters(model)
    config.backend_check = check_layers(model, config)
    receipt = build_receipt(model, config)
    left = [row["module"] for row in receipt["modules"] if row["status"] == "missed"]
    if left:
        raise RuntimeError(
            f"left in high precision although not in skip: {', '.join(left)}; the model builds them without vLLM's "
            f"quant config. Add them to skip, on the trainer's side too, or extend the plugin"
        )
    counts = receipt["counts"]
    if not counts["quantized_linears"] + counts["quantized_experts"]:
        raise RuntimeError(f"no layer of {receipt['model']} was quantized; skip={list(config.engine.skip)}")
    logger.info("quads %s, %s: %s", receipt["mode"], receipt["backend"], counts)
    write_receipt(receipt, config)


def check_skip(model: torch.nn.Module, config: QuadsConfig) -> None:
    """RuntimeError for a skip entry that fits no module: a slip, or a name that only the trainer knows."""
    names = [engine_layer_name(path) for path, _ in model.named_modules(remove_duplicate=False)]
    names = [
        name for name in names if name.rpartition(".")[2] not in ROUTERS
    ]  # skip_reason names a router for any entry
    # Names of what is never quantized anyway may be absent: not every model has a router or an untied head.
    entries = [e for e in config.engine.skip if e not in DEFAULT_SKIP and e.rpartition(".")[2] not in ROUTERS]
    idle = [entry for entry in entries if not any(skip_reason(name, (entry,)) for name in names)]
    if idle:
        last = sorted({name.rpartition(".")[2] for name in names if name})
        raise RuntimeError(
            f"skip holds {', '.join(map(repr, idle))}, which fits no module of {type(model).__name__}; an entry is a "
            f"dotted part of an engine module name (fused projections have one name). Last parts of its modules: "
            f"{', '.join(last)}"
        )


def check_parameters(model: torch.nn.Module) -> None:
    """ValueError naming a parameter that is not finite; quantized layers are checked when they are quantized."""
    quantized = {id(module) for module, _ in quads_layers(model)}
    for path, module in model.named_modules():
        for name, parameter in () if id(module) in quantized else module.named_parameters(recurse=False):
            if parameter.dtype in _CHECKED and parameter.device.type != "meta":
                check_finite(parameter.data, f"{path}.{name}")


def execution(config: QuadsConfig) -> dict[str, Any]:
    """What multiplies and what quantizes activations, by whose choice, and whether vLLM may capture it."""
    engine = config.engine
    kernel = config.activation_kernel == "triton"
    return {
        "backend": engine.backend,
        "chosen_by": "quantization_config.backend, whose default is reference; an unavailable one is an error",
        "product": product(engine.backend),
        "activation_kernel": config.activation_kernel,
        "activation_reason": config.activation_reason,
        "graph_safe": config.graph_safe,
        "graph_reason": config.graph_reason,
        "engine_mode": config.engine_mode,
        "non_finite_input": "NaN in its row" if kernel or engine.mode.activation == "bf16" else "error",
    }


def build_receipt(model: torch.nn.Module, config: QuadsConfig) -> dict[str, Any]:
    """The receipt as plain values."""
    states = {id(module): state for module, state in quads_layers(model)}
    rows = []
    for path, module in model.named_modules():
        if isinstance(module, (LinearBase, RoutedExperts, VocabParallelEmbedding)):
            rows.append(_row(path, module, states.get(id(module)), config))
    quantized = [row for row in rows if row["status"] == "quantized"]
    return {
        "plugin": "quads",
        "mode": config.engine.mode.name,
        "backend": config.backend,
        "execution": execution(config),
        "backend_check": config.backend_check,
        "config": config.engine.to_dict(),
        "model": type(model).__name__,
        "modules": rows,
        "counts": {
            "quantized_linears": sum(row["layer"] == "linear" for row in quantized),
            "quantized_experts": sum(row["layer"] == "experts" for row in quantized),
            "high_precision": len(rows) - len(quantized),
        },
        "masks": {key: value for state in states.values() for key, value in state.mask_report().items()},
        "reloads": config.reloads,
        "tensor_parallel_size": get_tensor_model_parallel_world_size(),
        "versions": {
            "vllm": importlib.metadata.version("vllm"),
            "torch": torch.__version__,
            "quads": quads.__version__,
        },
        "pid": os.getpid(),
    }


def _row(path: str, module: torch.nn.Module, state: Any, config: QuadsConfig) -> dict[str, Any]:
    mode = config.engine.mode
    name = engine_layer_name(path)
    row = {
        "module": name,
        "kind": type(module).__name__,
        "layer": state.kind if state else "",
        "shapes": {n: list(p.shape) for n, p in module.named_parameters(recurse=False)},
        "loads": state.loads if state else 0,
    }
    if state is not None:
        formats = {"weight": mode.weight, "activation": mode.activation}
        return row | {"status": "quantized", "reason": "", **formats, "activation_kernel": config.activation_kernel}
    if isinstance(module, VocabParallelEmbedding):
        reason = "embedding or output head is never quantized"
    elif isinstance(module, GateLinear):
        reason = "router is never quantized"
    else:
        reason = skip_reason(name, config.engine.skip)
    status = "missed" if reason is None else "skipped"
    return row | {"status": status, "reason": reason or "", "weight": "unchanged", "activation": "unchanged"}


def write_receipt(receipt: dict[str, Any], config: QuadsConfig) -> None:
    """Write atomically to the path named in the config; nothing when it is null, or on a later rank of a tensor
    parallel group.
    """
    if config.engine.receipt is None or not is_first_rank():
        return
    path = Path(config.engine.receipt)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(receipt, indent=1) + "\n")
    os.replace(temporary, path)
