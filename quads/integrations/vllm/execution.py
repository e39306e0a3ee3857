# SPDX-License-Identifier: Apache-2.0
"""How an engine executes: with which backend, eager or with decode steps as captured CUDA graphs. The one place that
says so, for training, evaluation and benchmarks.

    eager    enforce_eager=True
    graphs   compilation mode 0 (none), cudagraph_mode FULL_DECODE_ONLY, capture sizes as below

Compilation stays off under graphs: Inductor, and vLLM's `custom_ops: none` that goes with it, round norms and rotary
embeddings otherwise, which FP4 rounding amplifies (docs/kernels.md). With mode 0 vLLM runs the same operators as an
eager engine. Only decode batches are captured: attention then takes the kernel that an eager decode step takes, and it
is the mode that every attention backend with graphs has. Prompts, and batches that mix prompts with decoding, run
eagerly.
A step of b sequences replays the smallest captured size >= b on padded rows. Sizes: 1, 2, 4, 8, then two per power of
two, then `max_sequences` itself, so that no decode batch is left out; vLLM's own list captures three times as many.
Contract: no vllm, no torch. Differs from verl's default (FULL_AND_PIECEWISE), which compiles with Inductor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quads.config import Runtime

COMPILATION_OFF = 0
DECODE_ONLY = "FULL_DECODE_ONLY"
FP4_UNITS = ("native", "cutlass")  # they multiply NVFP4 activations with NVFP4 weights and nothing else


def serving_backend(mode: str, wanted: str) -> str:
    """The backend of an engine in `mode` (a name of MODES, or w4a4+rac) in an experiment that asks for `wanted`.

    Modes without NVFP4 activations have no product on FP4 units: there `native` and `cutlass` mean `triton`. A rule,
    not a fallback: it depends on names alone, and where FP4 units are missing the W4A4 engines stop.
    """
    return "triton" if wanted in FP4_UNITS and not mode.startswith("w4a4") else wanted


def capture_sizes(max_sequences: int) -> list[int]:
    """Decode batch sizes to capture, ascending, the last is `max_sequences` >= 1."""
    powers = [2**i for i in range(max_sequences.bit_length())]
    between = [3 * p // 2 for p in powers if p >= 8]
    return sorted({s for s in (*powers, *between) if s < max_sequences} | {max_sequences})


def execution_arguments(graphs: bool, sizes: Sequence[int]) -> dict[str, Any]:
    """Engine arguments of vLLM: `enforce_eager`, and with graphs `compilation_config` for exactly these batch sizes."""
    if not graphs:
        return {"enforce_eager": True}
    compilation = {
        "mode": COMPILATION_OFF,
        "cudagraph_mode": DECODE_ONLY,
        "cudagraph_capture_sizes": sorted(set(sizes)),
    }
    return {"enforce_eager": False, "compilation_config": compilation}


def mismatch(receipt: Mapping[str, Any], runtime: Runtime) -> str | None:
    """Sentence naming what the plugin's receipt says otherwise than `runtime` asks, or None."""
    execution = receipt.get("execution", {})
    backend, mode = execution.get("backend", "reference"), execution.get("engine_mode", "eager")
    wanted = serving_backend(receipt.get("mode", "w4a4"), runtime.rollout_backend)
    if backend != wanted:
        return f"the engine multiplies with backend {backend!r}, asked for {wanted!r}"
    if (mode != "eager") != runtime.rollout_graphs:
        return f"the engine runs {mode!r}, asked for rollout_graphs={runtime.rollout_graphs}"
    return None
