# SPDX-License-Identifier: Apache-2.0
"""What is refused before an engine loads weights or serves: an unavailable backend, graphs that would be wrong.

    preflight      before weights are loaded: CUDA is CUDA, the backend runs here, and vLLM compiles or captures only
                   what allows it
    check_serving  before every step with tokens: all static masks have arrived

vLLM's compile and CUDA graphs (enforce_eager=False) run Python code once and then replay what it launched. So layers
must not wait for the GPU nor choose by values (`quads.kernels.backend.graph_safe`), and a check that must hold at every
request cannot stand in a layer: it stands in front of the worker's step.
"""

from __future__ import annotations

from typing import Any

import torch

from quads.integrations.vllm.native import take_ops
from quads.integrations.vllm.quantization import QuadsConfig
from quads.integrations.vllm.shards import check_parallel
from quads.integrations.vllm.state import quads_layers
from quads.kernels.backend import require


def engine_mode(vllm_config: Any) -> str:
    """ "eager", or vLLM's compilation mode and CUDA graph mode."""
    compilation = vllm_config.compilation_config
    names = [getattr(getattr(compilation, key, None), "name", "NONE") for key in ("mode", "cudagraph_mode")]
    if vllm_config.model_config.enforce_eager or names == ["NONE", "NONE"]:
        return "eager"
    return f"compilation {names[0]}, CUDA graphs {names[1]}"


def check_cuda(device: str) -> None:
    """RuntimeError when this process serves on CUDA but CUDA's events and copies are vLLM's stand-ins for the CPU."""
    if device == "cuda" and torch.cuda.Event.__module__.startswith("vllm"):
        raise RuntimeError(
            f"torch.cuda.Event is {torch.cuda.Event.__module__}'s: something in this process imported vLLM's CPU "
            "worker, and nothing would wait for the GPU any more; remove that import (quads.integrations.vllm.compat, "
            "item 4)"
        )


def preflight(vllm_config: Any) -> None:
    """RuntimeError naming what is wrong and what to change; records the engine's mode for the receipt."""
    config: QuadsConfig = vllm_config.quant_config
    check_cuda(vllm_config.device_config.device_type)
    mode = config.engine.mode
    where = (vllm_config.model_config.dtype, vllm_config.device_config.device_type)
    require(config.engine.backend, *where, (mode.weight, mode.activation))
    take_ops(config.engine)
    check_parallel(vllm_config.parallel_config)
    spread = vllm_config.parallel_config.tensor_parallel_size > 1 and config.engine.mode.activation != "bf16"
    if spread:
        config.graph_safe = False
        config.graph_reason = "the amax of a token crosses tensor parallel ranks in the middle of a layer"
    config.engine_mode = engine_mode(vllm_config)
    if config.engine_mode != "eager" and not config.graph_safe:
        raise RuntimeError(
            f"{config.engine_mode}: mode {config.engine.mode.name} with backend {config.engine.backend!r} can neither "
            f"be captured nor compiled: {config.graph_reason}; start the engine with enforce_eager=True"
            + (", or choose backend 'triton'" if config.engine.backend == "reference" and not spread else "")
        )


def check_serving(worker: Any) -> None:
    """RuntimeError naming a static mask that has not arrived; after the first success it costs one attribute."""
    config = worker.vllm_config.quant_config
    if not isinstance(config, QuadsConfig) or config.has_masks:
        return
    for _, state in quads_layers(worker.model_runner.get_model()):
        state.require_masks()
    config.has_masks = True
