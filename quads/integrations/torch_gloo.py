"""verl on a CPU asks torch for the process group "cpu:gloo,cpu:gloo"; torch wants each device named once."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

TWICE = "cpu:gloo,cpu:gloo"


def accept_gloo_twice() -> None:
    """Let init_process_group take verl's backend string for a CPU.

    Symptom: ValueError (duplicate device type cpu) in every worker of a stock verl run without accelerator.
    Cause: verl joins "cpu:gloo" and "<device>:<its backend>"; on a CPU both are the same. Our own worker starts the
    group before verl asks for it, a stock worker does not.
    Safe because: only that one string is replaced, by what it says. Window: verl 0.9.1. Idempotent.
    """
    original = dist.init_process_group
    if getattr(original, "quads_gloo", False):
        return

    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        original("cpu:gloo" if backend == TWICE else backend, *args, **kwargs)

    init_process_group.quads_gloo = True  # type: ignore[attr-defined]
    dist.init_process_group = init_process_group
