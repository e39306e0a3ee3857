"""Child of test_tensor_parallel.py: layers of backend triton on two simulated ranks, in Triton's interpreter.

    python tensor_parallel_layers.py     ->  JSON {"<format> <rac>": [experts, linear]}, each the largest difference of
                                             one rank's float32 output and the sum of two, relative to the largest value

The choice of the interpreter must precede the import of Triton, hence a process of its own. Ranks are threads that hold
one lock except while they wait for each other: the interpreter is not made for two threads.
"""

from __future__ import annotations

import functools
import json
import os
import threading
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import torch

from quads.integrations.vllm import shards
from quads.integrations.vllm.moe import QuadsMoEMethod
from quads.integrations.vllm.quantization import QuadsConfig, QuadsLinearMethod
from quads.integrations.vllm.shards import Shard
from quads.integrations.vllm.state import LayerState
from quads.layers.weights import quantize_rows
from quads.numerics.rac import RacSpec
from quads.rollout.mode import EngineConfig, RolloutMode

EXPERTS, WIDTH, HIDDEN, TOKENS, RANKS = 3, 64, 64, 9, 2
CASES = (("nvfp4", None), ("nvfp4", RacSpec(0.5)), ("fp8", None))
LOCK = threading.Lock()


def in_ranks(run) -> list:
    """[run(rank)], with the group's maximum by barriers."""
    barrier, local = threading.Barrier(RANKS, timeout=100), {}

    def wait() -> None:
        LOCK.release()
        barrier.wait()
        LOCK.acquire()

    def all_reduce(x, op, group) -> None:
        local[threading.current_thread().name] = x.clone()
        wait()
        x.copy_(functools.reduce(torch.fmax, local.values()))
        wait()

    shards.dist = SimpleNamespace(all_reduce=all_reduce, ReduceOp=torch.distributed.ReduceOp)
    shards.get_tp_group = lambda: SimpleNamespace(device_group=None)
    results: list = [None] * RANKS

    def work(rank: int) -> None:
        with LOCK:
            results[rank] = run(rank)

    threads = [threading.Thread(target=work, args=(rank,), name=str(rank)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def outputs(fmt: str, rac: RacSpec | None, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial outputs [T, D] of experts and of a row-parallel linear."""
    generator = torch.Generator().manual_seed(5)
    gate_up = torch.randn(EXPERTS, 2, HIDDEN, WIDTH, generator=generator)
    gate_up[:, 1, -3] *= 30  # the loud channel of the second GEMM's input lies on the last rank
    down = torch.randn(EXPERTS, WIDTH, HIDDEN, generator=generator)
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    x[:, -2] *= 20
    ids = torch.randint(0, EXPERTS, (TOKENS, 2), generator=generator)
    own, shard = HIDDEN // size, Shard(size, rank, True)
    part = slice(rank * own, (rank + 1) * own)
    config = EngineConfig(RolloutMode(fmt, fmt, rac), "sync" if rac else None, backend="triton")

    def state(name: str, inputs: dict[str, int], split: str) -> LayerState:
        made = LayerState(name, name, config, inputs, [own] * 2, shard, frozenset([split] if size > 1 else []))
        made.prepare_masks(torch.device("cpu"))
        for key in made.masks:
            made.set_mask(key, torch.arange(64) % 48 < 16)
        return made

    def weight(w: torch.Tensor, widths: list[int], inner: bool) -> tuple[torch.Tensor, torch.Tensor]:
        q = quantize_rows(w.contiguous(), fmt, widths, "fused", "w", shard.everywhere, inner)
        return q.qs.bfloat16(), q.rcp

    quads_config = QuadsConfig(config)
    quads_config.graph_safe = size == 1  # as preflight sets it
    moe, linear = object.__new__(QuadsMoEMethod), object.__new__(QuadsLinearMethod)
    moe.config, moe.name, linear.config, linear.name = quads_config, "e", quads_config, "o"
    w13 = weight(gate_up[:, :, part].flatten(1, 2), [own] * 2, False)
    w2, o = weight(down[..., part], [WIDTH], True), weight(down[0][:, part], [WIDTH], True)
    experts = SimpleNamespace(w13_weight=w13[0], w13_rcp=w13[1], w2_weight=w2[0], w2_rcp=w2[1], expert_map=None,
                              apply_router_weight_on_input=False,
                              quads_state=state("e", {"e.w13": WIDTH, "e.w2": own}, "e.w2"))  # fmt: skip
    row = SimpleNamespace(weight=o[0], weight_rcp=o[1], quads_state=state("o", {"o": own}, "o"))
    y = moe.apply(experts, x, torch.rand(TOKENS, 2, generator=generator), ids)
    return y, linear.apply(row, x[:, part].contiguous())


def main() -> None:
    found = {}
    for fmt, rac in CASES:
        whole = outputs(fmt, rac, 0, 1)
        parts = zip(*in_ranks(functools.partial(_rank, fmt, rac)), strict=True)
        found[f"{fmt} {'rac' if rac else 'plain'}"] = [
            float((sum(p) - y).abs().max() / y.abs().max()) for y, p in zip(whole, parts, strict=True)
        ]
    print(json.dumps(found))


def _rank(fmt: str, rac: RacSpec | None, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return outputs(fmt, rac, rank, RANKS)


if __name__ == "__main__":
    main()
