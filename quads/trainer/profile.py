# SPDX-License-Identifier: Apache-2.0
"""Where a GPU's time goes while a block runs: kernels by kind, communication that nothing hides, and idle time.

    busy     = length of the union of all kernels' intervals         idle = wall - busy
    exposed  = busy - length of the union of all kernels but communication's
    kind     = "quantizers" for OWN, else the first of KINDS whose words a kernel's name holds; kernels overlap, so that
               kinds may add up to more than busy

Seconds, of this process's GPU. Recorded by torch.profiler with GPU activity alone, which costs the host nothing per
operator; the events are read afterwards. Differs from a trace for a viewer in that it fits into a result's JSON.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

# quads.kernels' quantizers of weights and activations, by the exact names that Triton reports.
OWN = ("_amax_kernel", "_quantize_kernel", "_fused_kernel", "_kernel", "_static_kernel", "_token_kernel",
       "_per_token_kernel")  # fmt: skip
# Order matters: `ncclDevKernel_ReduceScatter` is communication, `reduce_kernel` is not.
KINDS: dict[str, tuple[str, ...]] = {
    "communication": ("nccl",),
    "copies": ("memcpy", "memset", "split_with_sizes", "chunk_cat", "catarray"),
    "attention": ("flash", "fmha", "attention"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "grouped", "_mm_", "splitk"),
    "optimizer": ("adam", "multi_tensor_apply"),
    "softmax": ("softmax", "logsumexp", "nll_loss"),
    "sort and scatter": ("sort", "scatter", "gather", "index", "topk", "scan", "embedding"),
    "sums": ("reduce",),
    "elementwise": ("elementwise", "cunn", "fill"),
}


@dataclass(frozen=True)
class Kernel:
    """One launch: name, start and end in seconds on one clock."""

    name: str
    start: float
    end: float


def kind(name: str) -> str:
    """The kind of a kernel, "other" when no word fits."""
    if name in OWN:
        return "quantizers"
    low = name.lower()
    return next((found for found, words in KINDS.items() if any(word in low for word in words)), "other")


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def summary(kernels: list[Kernel], wall: float, most: int = 25) -> dict[str, Any]:
    """The module docstring's numbers, and the `most` kernels that took most time (name cut to 90 characters)."""
    by_name: dict[str, list[float]] = {}
    for k in kernels:
        by_name.setdefault(k.name, []).append(k.end - k.start)
    kind_of = {name: kind(name) for name in by_name}  # of tens of thousands of launches a few hundred names
    kinds: dict[str, list[float]] = {}
    for name, times in by_name.items():
        kinds.setdefault(kind_of[name], []).extend(times)
    busy = union((k.start, k.end) for k in kernels)
    hidden = union((k.start, k.end) for k in kernels if kind_of[k.name] != "communication")
    top = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:most]
    return {
        "wall_s": wall,
        "busy_s": busy,
        "idle_s": max(0.0, wall - busy),
        "exposed_communication_s": busy - hidden,
        "launches": len(kernels),
        "kinds": {
            name: {"s": sum(times), "launches": len(times)} for name, times in sorted(kinds.items(), key=_by_time)
        },
        "kernels": [{"name": n[:90], "kind": kind_of[n], "s": sum(t), "launches": len(t)} for n, t in top],
    }


def _by_time(item: tuple[str, list[float]]) -> float:
    return -sum(item[1])


@contextmanager
def profiled() -> Iterator[dict[str, Any]]:
    """Fill the dict with `summary` of the block when it ends. Raises RuntimeError without CUDA."""
    if not torch.cuda.is_available():
        raise RuntimeError("the update's profile is of GPU kernels, and torch sees no CUDA device")
    found: dict[str, Any] = {}
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        begun = time.perf_counter()
        yield found
        torch.cuda.synchronize()
        wall = time.perf_counter() - begun
    try:
        found.update(summary(_kernels(profiler), wall))
    except Exception as error:  # a benchmark of minutes is not lost for its profile; the result says what is missing
        found.update(wall_s=wall, failed=repr(error))


def _kernels(profiler: torch.profiler.profile) -> list[Kernel]:
    return [
        Kernel(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
        for event in profiler.events() or []
        # Annotations span kernels and would count as busy.
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
