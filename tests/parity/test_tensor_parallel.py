"""Tensor parallel size 2 = size 1: engines of the real vLLM (tensor_parallel_runs.py), and layers with simulated ranks.

1. every held q*s and factor equal, after a load and after an update                        real engines
2. float32 log-probs equal but for the order of additions and codes that it flips           real engines
3. quantized inputs of split layers are slices of those of one rank, bit for bit; partial outputs add up   threads
"""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from programs import run_program
from tolerances import TOLERANCES

from quads.layers.weights import quantize_rows
from quads.numerics.qdq import quantize_activation
from quads.numerics.rac import RacSpec
from quads.rollout.mode import EngineConfig, RolloutMode

pytestmark = pytest.mark.stack
# One with a replicated k/v head, one with everything that crosses ranks; the program has all five.
CHECKED = ("w4a16", "w4a4+rac")
UPDATES = [f"{mode} {name}" for mode in CHECKED for name in ("A", "B")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("tensor_parallel")
    child = run_program("tensor_parallel_runs.py", out, "--modes", ",".join(CHECKED), timeout=1200)
    (out / "log").write_text(child.stdout + child.stderr)
    return out


def rows(runs: Path) -> dict:
    return json.loads((runs / "report.json").read_text())["rows"]


def test_layers_of_backend_triton():
    """Float32 outputs of two simulated ranks, in Triton's interpreter, add up to those of one."""
    found = json.loads(run_program("tensor_parallel_layers.py").stdout.splitlines()[-1])
    assert len(found) == 3
    for case, differences in found.items():
        assert max(differences) <= TOLERANCES["experts_loop_relative"].limit, (case, differences)


@pytest.mark.parametrize("update", UPDATES)
def test_engines_hold_the_same_weights(runs, update):
    row = rows(runs)[update]
    assert row["differing"] == 0 and row["tensors"] == 24 and row["elements"] > 50_000
    assert (row["per_shard"] > 0) == (not update.startswith("bf16")), "scales per shard would have been noticed"


@pytest.mark.parametrize("update", UPDATES)
def test_float32_logprobs(runs, update):
    row = rows(runs)[update]
    assert row["logprobs"] == 24 * 17
    assert row["median"] <= TOLERANCES["parity_logprob_max"].limit
    if update.split()[0] in ("bf16", "w4a16"):
        assert row["max"] <= TOLERANCES["parity_logprob_max"].limit
    assert row["above"] <= TOLERANCES["parity_logprob_share_above"].limit


def test_receipts(runs):
    for mode in CHECKED:
        for size in (1, 2):
            receipt = json.loads((runs / f"{mode}.tp{size}.receipt.json").read_text())
            assert (receipt["mode"], receipt["tensor_parallel_size"], receipt["reloads"]) == (mode, size, 2)
            experts = next(r for r in receipt["modules"] if r["module"] == "model.layers.1.mlp.experts")
            assert experts["shapes"]["w2_weight"] == [8, 64, 32 // size] and experts["loads"] == 3
    masks = receipt["masks"]
    assert masks["model.layers.0.mlp.experts.w2"]["channels"] == 16
    assert masks["model.layers.0.mlp.experts.w13"]["channels"] == 64


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        (
            "token_mask",
            ["layers.0.self_attn.o_proj: RAC mask 'token' with tensor parallel size 2", "use mask 'static'"],
        ),
        ("broken", ["model.layers.0.self_attn.o_proj.weight is not finite", "refused on another tensor parallel rank"]),
    ],
)
def test_refusals(runs, case, parts):
    """The executor hides a worker's sentence; the log holds it."""
    assert json.loads((runs / "refusals.json").read_text())[case]
    log = (runs / "log").read_text()
    assert all(part in log for part in parts)


# Simulated ranks


def in_ranks(monkeypatch, size: int, run) -> list:
    """[run(rank)], every rank a thread; the group's reduction by barriers. It loses NaN, as real ones may."""
    from quads.integrations.vllm import shards

    barrier, local = threading.Barrier(size, timeout=60), {}

    def all_reduce(x: torch.Tensor, op, group) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        local[threading.current_thread().name] = x.clone()
        barrier.wait()
        x.copy_(functools.reduce(torch.fmax, local.values()))
        barrier.wait()

    monkeypatch.setattr(shards.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(shards, "get_tp_group", lambda: SimpleNamespace(device_group=None))
    results: list = [None] * size

    def work(rank: int) -> None:
        results[rank] = run(rank)

    threads = [threading.Thread(target=work, args=(rank,), name=str(rank)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("rac", [None, RacSpec(0.5)], ids=["plain", "rac"])
@pytest.mark.parametrize("fmt", ["fp8", "nvfp4"])
def test_experts_over_ranks(monkeypatch, fmt, rac, size):
    if fmt == "fp8" and rac:
        return
    from quads.integrations.vllm import moe
    from quads.integrations.vllm.quantization import QuadsConfig
    from quads.integrations.vllm.shards import Shard
    from quads.integrations.vllm.state import LayerState

    experts, width, hidden, tokens = 3, 32, 64, 9
    generator = torch.Generator().manual_seed(5)
    mode = RolloutMode(fmt, fmt, rac)
    config = EngineConfig(mode, "sync" if rac else None)
    gate_up = torch.randn(experts, 2, hidden, width, generator=generator)
    gate_up[:, 1, -3] *= 30  # the loud channels of the second GEMM's input lie on the last rank
    down = torch.randn(experts, width, hidden, generator=generator)
    down[..., -1] *= 30
    x = torch.randn(tokens, width, generator=generator)
    ids = torch.randint(0, experts, (tokens, 2), generator=generator)
    weights = torch.rand(tokens, 2, generator=generator)
    mask = torch.arange(hidden) % 48 < 16

    def run(rank: int, size: int):
        part = slice(rank * hidden // size, (rank + 1) * hidden // size)
        shard, own = Shard(size, rank), hidden // size
        names = {"e.w13": width, "e.w2": own}
        state = LayerState("e", "experts", config, names, [own] * 2, shard, frozenset(["e.w2"] if size > 1 else []))
        state.prepare_masks(torch.device("cpu"))
        if rac:
            state.set_mask("e.w13", torch.arange(width) < 16)
            state.set_mask("e.w2", mask)
        both = gate_up[:, :, part].flatten(1, 2)
        w13 = quantize_rows(both, fmt, [own] * 2, "fused", "w13", shard.everywhere, False)
        w2 = quantize_rows(down[..., part].contiguous(), fmt, [width], "fused", "w2", shard.everywhere, True)
        layer = SimpleNamespace(w13_weight=w13.qs, w13_rcp=w13.rcp, w2_weight=w2.qs, w2_rcp=w2.rcp, expert_map=None,
                                apply_router_weight_on_input=False, quads_state=state)  # fmt: skip
        method = object.__new__(moe.QuadsMoEMethod)
        method.config, method.name = QuadsConfig(config), "e"
        inputs = []
        original = state.quantize_input
        state.quantize_input = lambda key, x: inputs.append(original(key, x)) or inputs[-1]
        return method.apply(layer, x, weights, ids), inputs[1], w13, w2

    y, h, w13, w2 = run(0, 1)
    got = in_ranks(monkeypatch, size, lambda rank: run(rank, size))
    assert torch.equal(torch.cat([g[1].qs for g in got], -1), h.qs)
    assert all(torch.equal(g[1].rcp, h.rcp) for g in got)
    assert torch.equal(torch.cat([g[2].qs.unflatten(1, (2, -1)) for g in got], 2).flatten(1, 2), w13.qs)
    assert torch.equal(torch.cat([g[3].qs for g in got], -1), w2.qs)
    difference = (sum(g[0] for g in got) - y).abs().max() / y.abs().max()
    assert float(difference) <= TOLERANCES["experts_loop_relative"].limit
    if size > 1:
        alone = quantize_activation(got[0][1].dequantize(), fmt)
        assert not torch.equal(alone.rcp, h.rcp), "the first rank alone would have scaled otherwise"


def test_a_non_finite_token_is_an_error_on_every_rank(monkeypatch):
    from quads.integrations.vllm.shards import Shard
    from quads.integrations.vllm.state import LayerState

    def run(rank: int) -> str:
        config = EngineConfig(RolloutMode("nvfp4", "nvfp4"))
        state = LayerState("o", "linear", config, {"o": 32}, [8], Shard(2, rank, True), frozenset(["o"]))
        x = torch.ones(3, 32)
        if rank == 1:
            x[2, 5] = torch.nan
        try:
            state.quantize_input("o", x)
        except ValueError as error:
            return str(error)
        return "no error"

    for said in in_ranks(monkeypatch, 2, run):
        assert said.startswith("input of o: ") and "finite" in said


def test_verl_is_refused():
    from quads.integrations.vllm.shards import check_parallel

    ours, verl = (
        "quads.integrations.vllm.reload.WorkerExtension",
        "quads.integrations.verl.extension.QuadsWorkerExtension",
    )
    for size, extension in ((1, verl), (2, ours), (2, "")):
        check_parallel(SimpleNamespace(tensor_parallel_size=size, worker_extension_cls=extension))
    with pytest.raises(RuntimeError, match="tensor_model_parallel_size=1"):
        check_parallel(SimpleNamespace(tensor_parallel_size=2, worker_extension_cls=verl))


@pytest.mark.parametrize(
    ("name", "mode", "backend", "local", "parts"),
    [
        ("o", RolloutMode("nvfp4", "bf16"), "reference", 24, ["o: K=48 over tensor parallel size 2", "block 16"]),
        ("w2", RolloutMode("nvfp4", "nvfp4", RacSpec(0.5, mask="batch")), "reference", 32, ["w2: RAC mask 'batch'"]),
        ("w2", RolloutMode("nvfp4", "nvfp4"), "native", 32, ["w2: backend 'native'", "'triton'"]),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_named(name, mode, backend, local, parts):
    from quads.integrations.vllm.shards import Shard, check_shard

    config = EngineConfig(mode, backend=backend)
    check_shard(name, config, Shard(), local, True)
    with pytest.raises(ValueError) as error:
        check_shard(name, config, Shard(2, 0, True), local, True)
    assert all(part in str(error.value) for part in parts)
