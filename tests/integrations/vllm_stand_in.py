"""Modules of the vLLM plugin executed against stand-ins for vLLM: importing the real one takes many seconds, and its
CPU build has no FP4 ops. What the stand-ins claim about vLLM is read from the installed source (`source`).
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> ModuleType:
    """Module `name` with nothing but `contents`, until the end of the test."""
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def plugin_module(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """quads.integrations.vllm.<name>, executed anew: it sees the stand-ins, and is forgotten with them."""
    full = f"quads.integrations.vllm.{name}"
    spec = importlib.util.find_spec(full)
    assert spec is not None and spec.loader is not None, full
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, full, module)
    spec.loader.exec_module(module)
    return module


def source(*parts: str) -> Path:
    """A file of the installed vLLM; skips where there is none."""
    spec = PathFinder.find_spec("vllm")  # unlike importlib.util, it does not see a stand-in
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    return Path(spec.submodule_search_locations[0]).joinpath(*parts)
