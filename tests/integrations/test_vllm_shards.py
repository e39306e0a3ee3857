"""Which layouts of routed experts the plugin serves: whole, or split by plain tensor parallelism; the others by name.

Layouts are decided by vLLM's own FusedMoEParallelConfig.make, executed from the installed source: under expert
parallelism it says tensor parallel size 1, so that the size alone would pass for whole experts.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
from vllm_stand_in import plugin_module, source, stand_in


def fields(tree: ast.Module, name: str) -> set[str]:
    """Annotated fields of a class."""
    cls = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.target.id for node in cls.body if isinstance(node, ast.AnnAssign)}


def layout(tensor: int, data: int, experts: bool, rank: int = 0) -> SimpleNamespace:
    """The FusedMoEConfig of rank `rank` of `tensor`, in the first of `data` groups; experts: expert parallelism."""
    path = source("model_executor", "layers", "fused_moe", "config.py")
    tree = ast.parse(path.read_text())
    assert "moe_parallel_config" in fields(tree, "FusedMoEConfig")
    tree.body = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "FusedMoEParallelConfig"]
    namespace = {
        "dataclass": dataclass,
        "get_tensor_model_parallel_rank": lambda: rank,
        "get_dp_group": lambda: SimpleNamespace(rank_in_group=0),
    }
    exec(compile(tree, str(path), "exec"), namespace)
    asked = SimpleNamespace(enable_expert_parallel=experts, all2all_backend="", enable_eplb=False)
    return SimpleNamespace(moe_parallel_config=namespace["FusedMoEParallelConfig"].make(tensor, 1, data, 1, asked))


def shards_of(monkeypatch: pytest.MonkeyPatch, tensor: int) -> ModuleType:
    """shards.py on a rank of a tensor parallel group of `tensor`."""
    group = {"get_tensor_model_parallel_rank": None, "get_tp_group": None}
    stand_in(monkeypatch, "vllm.distributed", get_tensor_model_parallel_world_size=lambda: tensor, **group)
    stand_in(monkeypatch, "vllm.model_executor.layers.linear", ReplicatedLinear=None, RowParallelLinear=None)
    return plugin_module(monkeypatch, "shards")


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("tensor", [2, 4])
def test_expert_parallelism_in_a_tensor_parallel_group_is_refused(monkeypatch, tensor, data) -> None:
    moe = layout(tensor, data, experts=True)
    assert moe.moe_parallel_config.tp_size == 1
    with pytest.raises(ValueError) as error:
        shards_of(monkeypatch, tensor).expert_shard("model.layers.0.mlp.experts", moe)
    assert str(error.value) == (
        f"model.layers.0.mlp.experts: expert parallelism together with tensor parallel size {tensor} is not supported; "
        f"set enable_expert_parallel=False"
    )


@pytest.mark.parametrize(("tensor", "data"), [(1, 2), (2, 2), (2, 4)])
def test_experts_spread_over_data_parallel_ranks_are_refused(monkeypatch, tensor, data) -> None:
    with pytest.raises(ValueError) as error:
        shards_of(monkeypatch, tensor).expert_shard("e", layout(tensor, data, experts=False))
    assert str(error.value) == (
        f"e: experts spread over {tensor * data} ranks in a tensor parallel group of {tensor} are not supported; run "
        f"data parallel replicas as engines of their own"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_plain_tensor_parallelism_is_served(monkeypatch, rank) -> None:
    shards = shards_of(monkeypatch, 2)
    assert shards.expert_shard("e", layout(2, 1, experts=False, rank=rank)) == shards.Shard(2, rank)


@pytest.mark.parametrize("experts", [False, True])
def test_one_rank_is_whole_whatever_was_asked(monkeypatch, experts) -> None:
    """vLLM itself ignores enable_expert_parallel where there is nothing to spread over."""
    shards = shards_of(monkeypatch, 1)
    assert shards.expert_shard("e", layout(1, 1, experts)) == shards.Shard()
