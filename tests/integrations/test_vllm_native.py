"""Backend cutlass takes vLLM's ops once, before weights are loaded: which ops, for which device, and what is refused.

Signatures of the real ops: tests/kernels/test_cutlass.py. Here `vllm._custom_ops` is a stand-in with them.
TRAP: quads.kernels is imported by the fixture, not above: tests/kernels chooses Triton's interpreter before its import.
"""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace

import pytest
import torch
from vllm_stand_in import plugin_module, stand_in

from quads.rollout.mode import BACKENDS, EngineConfig, RolloutMode

W4A4 = RolloutMode("nvfp4", "nvfp4")
OTHERS = [backend for backend in BACKENDS if backend != "cutlass"]


class Ops:
    """vLLM's three FP4 functions; `asked`: for which compute capabilities its build was asked."""

    def __init__(self, *built_for: int) -> None:
        self.built_for, self.asked = built_for, []

    def cutlass_scaled_mm_supports_fp4(self, cuda_device_capability):
        self.asked.append(cuda_device_capability)
        return cuda_device_capability in self.built_for

    def cutlass_scaled_fp4_mm(self, a, b, block_scale_a, block_scale_b, alpha, out_dtype): ...

    def cutlass_fp4_moe_mm(
        self, out_tensors, a_tensors, b_tensors, a_scales, b_scales, alphas, problem_sizes, expert_offsets, sf_offsets
    ): ...


@pytest.fixture
def cutlass(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """quads.kernels.cutlass with no ops taken yet."""
    module = importlib.import_module("quads.kernels.cutlass")
    monkeypatch.setattr(module, "_ops", None)
    return module


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, cutlass: ModuleType) -> ModuleType:
    """native.py; reading vLLM's ops or the device is an error until a test provides them."""
    stand_in(monkeypatch, "vllm")
    stand_in(monkeypatch, "vllm.model_executor.utils", replace_parameter=None)
    stand_in(monkeypatch, "quads.integrations.vllm.state", ATTRIBUTE="", LayerState=None, naming_input=None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: pytest.fail("the device was asked"))
    return plugin_module(monkeypatch, "native")


def provide(monkeypatch: pytest.MonkeyPatch, ops: object, capability: tuple[int, int]) -> None:
    stand_in(monkeypatch, "vllm", _custom_ops=ops)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.parametrize(("capability", "number"), [((10, 0), 100), ((10, 3), 103), ((12, 1), 121)])
def test_the_ops_are_those_of_vllm_for_this_device(monkeypatch, plugin, cutlass, capability, number) -> None:
    ops = Ops(number)
    provide(monkeypatch, ops, capability)
    plugin.take_ops(EngineConfig(W4A4, backend="cutlass"))
    assert cutlass._ops is ops and ops.asked == [number]


@pytest.mark.parametrize("backend", OTHERS)
def test_other_backends_read_nothing(plugin, cutlass, backend) -> None:
    plugin.take_ops(EngineConfig(W4A4, backend=backend))
    assert cutlass._ops is None


def test_a_vllm_without_the_module_is_an_error(plugin) -> None:
    with pytest.raises(ImportError, match="_custom_ops"):
        plugin.take_ops(EngineConfig(W4A4, backend="cutlass"))


def test_a_build_without_kernels_for_this_device_is_refused(monkeypatch, plugin, cutlass) -> None:
    provide(monkeypatch, Ops(100), (12, 0))
    with pytest.raises(RuntimeError, match=r"capability 12\.0; choose backend native, triton or reference"):
        plugin.take_ops(EngineConfig(W4A4, backend="cutlass"))
    assert cutlass._ops is None


@pytest.mark.parametrize(
    ("name", "function", "said"),
    [
        ("cutlass_scaled_fp4_mm", lambda a, b: None, r"cutlass_scaled_fp4_mm\('a', 'b'\) instead of"),
        ("cutlass_fp4_moe_mm", None, "cutlass_fp4_moe_mm is missing"),
    ],
    ids=["other parameters", "missing"],
)
def test_ops_that_differ_are_refused_before_the_build_is_asked(
    monkeypatch, plugin, cutlass, name, function, said
) -> None:
    ops = Ops(100)
    setattr(ops, name, function)
    provide(monkeypatch, ops, (10, 0))
    with pytest.raises(RuntimeError, match=said):
        plugin.take_ops(EngineConfig(W4A4, backend="cutlass"))
    assert cutlass._ops is None and ops.asked == []


def test_packed_weights_of_several_ranks_are_refused(plugin) -> None:
    for backend in ("native", "cutlass"):
        plugin.refuse_shards("m", EngineConfig(W4A4, backend=backend), 1)
        with pytest.raises(ValueError, match=f"m: backend '{backend}' packs whole weights, .* size is 2; use"):
            plugin.refuse_shards("m", EngineConfig(W4A4, backend=backend), 2)
    for backend in ("reference", "triton"):
        plugin.refuse_shards("m", EngineConfig(W4A4, backend=backend), 2)


def preflight_of(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """preflight.py, in whose process every backend runs."""
    stand_in(monkeypatch, "quads.integrations.vllm.quantization", QuadsConfig=object)
    stand_in(monkeypatch, "quads.integrations.vllm.shards", check_parallel=lambda parallel: None)
    stand_in(monkeypatch, "quads.integrations.vllm.state", quads_layers=None)
    preflight = plugin_module(monkeypatch, "preflight")
    monkeypatch.setattr(preflight, "require", lambda *given: None)
    return preflight


def test_preflight_takes_them(monkeypatch, plugin, cutlass) -> None:
    """Without ops the first step of a served engine would be the one to fail."""
    ops, preflight = Ops(100), preflight_of(monkeypatch)
    provide(monkeypatch, ops, (10, 0))
    preflight.preflight(
        SimpleNamespace(
            quant_config=SimpleNamespace(engine=EngineConfig(W4A4, backend="cutlass"), graph_safe=True),
            model_config=SimpleNamespace(dtype=torch.bfloat16, enforce_eager=True),
            device_config=SimpleNamespace(device_type="cpu"),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            compilation_config=None,
        )
    )
    assert cutlass._ops is ops
