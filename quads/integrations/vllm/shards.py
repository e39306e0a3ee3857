# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: a layer that is spread over ranks quantizes like the whole layer on one rank.

    column-parallel  w [N/p, K]   q/k/v, gate/up, w13    inputs replicated
    row-parallel     w [N, K/p]   o, down, w2            inputs split along K; vLLM adds the partial outputs

p ranks of vLLM's tensor parallel group. Scales come from amax over the whole weight (NVFP4: tensor, fused group or
expert; fp8: row) and over the whole token, so the local amax becomes the maximum over the group; then every shard is a
slice of what one rank would hold, bit for bit, and so is every quantized input. Outputs differ by the order of the
additions, and by the rounding of every partial output to the engine's dtype.
Contract: an error of one rank is an error of all, because a rank that raises alone would leave the others waiting. A
maximum is exact: any order gives the same bits.
TRAP: layers are quantized as they become complete, so all ranks must get the tensors in one order. vLLM's default
loader and a weight update do; a loader that takes files as they arrive (enable_multithread_load) does not.
Refused by name: masks that are chosen while running (batch, token) where K is split, because they rank channels that
other ranks hold; expert parallelism at the same time; backends other than reference and triton; engines of several
ranks under verl; CUDA graphs and compilation of quantized activations, because their amax crosses the ranks inside a
layer.
Differs from vLLM's own quantization methods, whose scales are those of the shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size, get_tp_group
from vllm.model_executor.layers.linear import ReplicatedLinear, RowParallelLinear

from quads.numerics.formats import BLOCK
from quads.rollout.mode import EngineConfig

GIVEN_AMAX = ("reference", "triton")  # backends that can quantize a token with an amax from elsewhere


@dataclass(frozen=True)
class Shard:
    """One layer on this rank: `size` ranks share it, this one is `rank`; `replicas` ranks hold the same k and v heads.
    `inner`: a linear's K is split (experts: w13 along rows, w2 along K, whatever it says).
    """

    size: int = 1
    rank: int = 0
    inner: bool = False
    replicas: int = 1

    @property
    def everywhere(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The maximum over the layer's ranks, None when there is one."""
        return maximum if self.size > 1 else None

    def slice(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of full [size * n, ...]."""
        return full.chunk(self.size)[self.rank]


def linear_shard(layer: torch.nn.Module) -> Shard:
    """Shard of a LinearBase."""
    size = getattr(layer, "tp_size", 1)
    if size == 1 or isinstance(layer, ReplicatedLinear):
        return Shard()
    rank = getattr(layer, "tp_rank", get_tensor_model_parallel_rank())
    return Shard(size, rank, isinstance(layer, RowParallelLinear), getattr(layer, "num_kv_head_replicas", 1))


def expert_shard(name: str, moe: Any) -> Shard:
    """Shard of a RoutedExperts, from its FusedMoEConfig. Raises ValueError for layouts other than plain tensor parallel
    experts.
    """
    parallel, group = moe.moe_parallel_config, get_tensor_model_parallel_world_size()
    if group > 1 and parallel.use_ep:
        raise ValueError(
            f"{name}: expert parallelism together with tensor parallel size {group} is not supported; set "
            f"enable_expert_parallel=False"
        )
    # vLLM also spreads experts over data parallel ranks, whose tokens differ: no amax is common there.
    if parallel.tp_size not in (1, group):
        raise ValueError(
            f"{name}: experts spread over {parallel.tp_size} ranks in a tensor parallel group of {group} are not "
            f"supported; run data parallel replicas as engines of their own"
        )
    return Shard(parallel.tp_size, parallel.tp_rank) if parallel.tp_size > 1 else Shard()


def check_parallel(parallel: Any) -> None:
    """RuntimeError for vLLM's ParallelConfig when verl drives an engine of several ranks: its weight sync and weight
    comparison have only been written for one.
    """
    size = parallel.tensor_parallel_size
    if size > 1 and parallel.worker_extension_cls.startswith("quads.integrations.verl."):
        raise RuntimeError(
            f"tensor parallel size {size} under verl is not supported; set "
            f"actor_rollout_ref.rollout.tensor_model_parallel_size=1 and use data parallel replicas"
        )


def check_shard(name: str, config: EngineConfig, shard: Shard, local: int, inner: bool) -> None:
    """ValueError naming the layer when its shards, `local` input channels each, cannot behave as one layer; `inner`: K
    is split.
    """
    if shard.size == 1:
        return
    mode, size = config.mode, f"tensor parallel size {shard.size}"
    if config.backend not in GIVEN_AMAX:
        raise ValueError(
            f"{name}: backend {config.backend!r} with {size} is not supported (its kernels take scales from one rank's "
            f"part); use {' or '.join(map(repr, GIVEN_AMAX))}, or tensor_parallel_size=1"
        )
    if not inner or (mode.activation == "bf16" and mode.weight != "nvfp4"):
        return
    if "nvfp4" in (mode.weight, mode.activation) and local % BLOCK:
        raise ValueError(
            f"{name}: K={local * shard.size} over {size} leaves {local} channels to a rank, no multiple of the NVFP4 "
            f"block {BLOCK}; use a smaller tensor_parallel_size"
        )
    if mode.rac is not None and not mode.needs_masks:
        raise ValueError(
            f"{name}: RAC mask {mode.rac.mask!r} with {size} is not supported: it ranks all {local * shard.size} "
            f"channels of the layer, of which a rank holds {local}; use mask 'static', or tensor_parallel_size=1"
        )


def maximum(x: torch.Tensor) -> torch.Tensor:
    """Elementwise maximum of x over the tensor parallel group; NaN counts as infinity, which all ranks then refuse."""
    # A reduction's MAX may lose a NaN, depending on the library and on the order.
    x = torch.nan_to_num(x, nan=torch.inf, posinf=torch.inf).contiguous()
    dist.all_reduce(x, dist.ReduceOp.MAX, get_tp_group().device_group)
    return x


def agreed(check: Callable[[], None], shard: Shard, name: str, device: torch.device) -> None:
    """Run `check`; its ValueError is raised here, and one naming the layer on every other rank."""
    error = None
    try:
        check()
    except ValueError as raised:
        error = raised
    if shard.size > 1:
        failed = maximum(torch.tensor([float(error is not None)], device=device))
        if error is None and bool(failed):
            raise ValueError(f"{name}: refused on another tensor parallel rank; its log says why")
    if error is not None:
        raise error


def gathered(x: torch.Tensor, dim: int, replicas: int = 1) -> torch.Tensor:
    """The shards of all ranks along `dim`, one of `replicas` equal neighbours each; a collective."""
    group = get_tp_group()
    shards = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(group.world_size)]
    dist.all_gather(shards, x.contiguous(), group.device_group)
    return torch.cat(shards[::replicas], dim)


def is_first_rank() -> bool:
    """Whether this rank speaks for its tensor parallel group (writes files)."""
    return get_tensor_model_parallel_rank() == 0
