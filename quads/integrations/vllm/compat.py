# SPDX-License-Identifier: Apache-2.0
"""Everything that depends on vLLM's version, and every patch. Written for vLLM 0.26 to 0.32; run on 0.31 (CPU).

1. Renamed base class
   symptom  ImportError: OnlineLinearBase
   cause    0.26 has the same class body under the private name _Fp8OnlineLinearBase
   window   0.26 only; 0.31 and later use the first branch
2. Router without a class of its own
   symptom  the router of Qwen3-MoE is quantized silently
   cause    0.26 builds `mlp.gate` as a ReplicatedLinear with the quant config; 0.31 and later as a GateLinear
   cure     quads.layers.names.ROUTERS skips routers by name in every version
3. Nobody sees the finished model (patch `audit_after_load`)
   symptom  a linear that the model builds without the quant config stays in high precision and nothing says so
   cause    a quantization method only ever sees single layers
   safety   wraps BaseModelLoader.load_model, calls the original unchanged, then reads the model; other methods pass
            through
   window   0.26 to 0.32: the signature is (vllm_config, model_config, ...)
4. Warm-up cannot be told from serving (patch `mark_warm_up`)
   symptom  static RAC masks arrive with the first weight update, but vLLM runs the model before that
   cause    profiling and warm-up call the same forward; some warm-ups carry attention metadata like real requests
   safety   wraps compile_or_warm_up_model of the worker classes, sets a flag while the original runs
   TRAP     vLLM's CPU worker is imported on the CPU platform only: on import it replaces CUDA's events, streams,
            synchronisation and host-to-device copies by stand-ins, in the whole process, whatever runs there
   window   0.26 to 0.32
5. Nothing runs in a layer when a captured graph is replayed (patch `check_before_steps`)
   symptom  with CUDA graphs an engine without its static RAC masks would serve uncompensated, without a word
   cause    a check in a layer runs at capture only
   safety   wraps execute_model of the GPU worker class (the CPU worker inherits it): raises before, never changes it
   window   0.26 to 0.32: the first argument has total_num_scheduled_tokens

All patches are idempotent: a second install() finds its own mark and returns.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.quantization.online import fp8 as _online_fp8
from vllm.platforms import current_platform

# Item 1 of the module docstring.
OnlineLinearBase = getattr(_online_fp8, "OnlineLinearBase", None) or _online_fp8._Fp8OnlineLinearBase

_MARK = "_quads_patch"
_GPU_WORKER = ("vllm.v1.worker.gpu_worker", "Worker")  # the CPU worker's base class, and harmless to import anywhere
_CPU_WORKER = ("vllm.v1.worker.cpu_worker", "CPUWorker")
_warming_up = False


def install() -> None:
    """Install all patches; idempotent."""
    audit_after_load()
    mark_warm_up()
    check_before_steps()


def audit_after_load() -> None:
    """Item 3: run preflight before a "quads" engine loads a model, receipt.finish_load afterwards."""
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    def audited(original: Callable, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        from quads.integrations.vllm.preflight import preflight
        from quads.integrations.vllm.quantization import QuadsConfig
        from quads.integrations.vllm.receipt import finish_load

        if not isinstance(vllm_config.quant_config, QuadsConfig):
            return original(self, vllm_config, *args, **kwargs)
        preflight(vllm_config)
        model = original(self, vllm_config, *args, **kwargs)
        finish_load(model, vllm_config.quant_config)
        return model

    _wrap(BaseModelLoader, "load_model", audited)


def mark_warm_up() -> None:
    """Item 4: keep `is_start_up` true while a worker warms up."""

    def warming_up(original: Callable, *args: Any, **kwargs: Any) -> Any:
        global _warming_up
        _warming_up = True
        try:
            return original(*args, **kwargs)
        finally:
            _warming_up = False

    for module_name, class_name in (_GPU_WORKER, _CPU_WORKER) if current_platform.is_cpu() else (_GPU_WORKER,):
        worker = getattr(importlib.import_module(module_name), class_name)
        if "compile_or_warm_up_model" in vars(worker):
            _wrap(worker, "compile_or_warm_up_model", warming_up)


def check_before_steps() -> None:
    """Item 5: run preflight.check_serving before every step that has tokens."""

    def checked(original: Callable, self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        from quads.integrations.vllm.preflight import check_serving

        if scheduler_output.total_num_scheduled_tokens and not is_start_up():
            check_serving(self)
        return original(self, scheduler_output, *args, **kwargs)

    from vllm.v1.worker.gpu_worker import Worker

    _wrap(Worker, "execute_model", checked)


def is_start_up() -> bool:
    """Whether the running forward is one of vLLM's own (profiling, warm-up) and its output is thrown away."""
    return _warming_up or (is_forward_context_available() and not get_forward_context().attn_metadata)


def _wrap(owner: type, name: str, wrapper: Callable) -> None:
    original = getattr(owner, name)
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(patched, _MARK, True)
    setattr(owner, name, patched)
