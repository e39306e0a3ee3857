"""What changes on a GPU: environment, overrides and engine arguments, without a GPU; vLLM's and verl's own names."""

import dataclasses
import inspect
from pathlib import Path

import pytest

from quads.config import Evaluation, Runtime, config_hash, load_arm, load_arms, load_experiment, model_hash, resolve_run
from quads.integrations.verl.overrides import RunPaths, verl_overrides
from quads.integrations.verl.session import environment
from quads.integrations.vllm.generate import Engine, prepare_environment
from quads.rollout.device import GPU

PATHS = RunPaths(*(Path("/r") / name for name in ("data", "model", "ckpt", "out", "ray")))
EXPERIMENTS = ("toy_gpu", "gpu_medium")


def run_of(name: str, arm: str = "quads"):
    return resolve_run(load_experiment(name), load_arm(arm), 0)


def overrides(name: str, arm: str = "quads") -> dict[str, str]:
    return dict(o.split("=", 1) for o in verl_overrides(run_of(name, arm), PATHS))


def test_environment_selects_device_and_engine():
    cpu, gpu = (environment(run_of(n), Path("/tmp/quads-ray-1"), Path("/r/m.jsonl")) for n in ("toy", "toy_gpu"))
    assert cpu["VERL_PLATFORM"] == "cpu" and "VERL_ENGINE_VENDOR" not in cpu and "TRITON_F32_DEFAULT" not in cpu
    want = {"VERL_PLATFORM": "nvidia", "VERL_ENGINE_VENDOR": "quads", "TRITON_F32_DEFAULT": "ieee"}
    assert {k: gpu[k] for k in want} == want
    assert gpu["VLLM_USE_FLASHINFER_SAMPLER"] == "0" and gpu["RAY_AUTH_MODE"] == "disabled"


def test_golden_gpu_overrides():
    got = overrides("toy_gpu")
    engine = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
    want = {
        "trainer.device": '"cuda"',
        "trainer.n_gpus_per_node": "1",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "0.02",
        "actor_rollout_ref.rollout.enforce_eager": "true",
        f"{engine}.kv_cache_memory_bytes": str(64 << 20),
        f"{engine}.attention_backend": '"TRITON_ATTN"',
        f"{engine}.distributed_executor_backend": '"uni"',
        "+ray_kwargs.ray_init.num_gpus": "1",
        "+ray_kwargs.ray_init.object_store_memory": str(256 << 20),
    }
    assert {k: got[k] for k in want} == want


def test_ray_keeps_its_own_choice_of_memory_on_a_gpu_unless_told():
    run = run_of("toy_gpu")
    run = run.model_copy(update={"runtime": run.runtime.model_copy(update={"object_store_mib": None})})
    got = dict(o.split("=", 1) for o in verl_overrides(run, PATHS))
    assert "+ray_kwargs.ray_init.object_store_memory" not in got


def test_the_gpu_toy_is_the_toy():
    """Same data, start checkpoint, schedule and arms: only where it runs differs, and what shares a machine."""
    toy, gpu = load_experiment("toy"), load_experiment("toy_gpu")
    assert (config_hash(toy.data), model_hash(toy), toy.grpo) == (config_hash(gpu.data), model_hash(gpu), gpu.grpo)
    assert set(toy.arms + toy.more_arms) == set(gpu.arms + gpu.more_arms)
    a, b = overrides("toy"), overrides("toy_gpu")
    changed = {k for k in a.keys() | b.keys() if a.get(k) != b.get(k)}
    allowed = ("trainer.device", "trainer.experiment_name", "ray_kwargs", "gpu_memory", "max_num", "kv_cache_memory",
               "attention_backend", "bucket_megabytes", "trainer.v1.quads_sync")  # fmt: skip
    assert {k for k in changed if not any(word in k for word in allowed)} == set()


def test_what_shares_the_machine_is_not_in_the_hash():
    run = run_of("toy_gpu")
    other = run.model_copy(update={"runtime": run.runtime.model_copy(update={"object_store_mib": 999})})
    assert run.id == other.id


def test_evaluation_engine_on_a_gpu(tmp_path, monkeypatch):
    for name in (*GPU, "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    monkeypatch.delitem(__import__("sys").modules, "vllm")
    runtime = Runtime(device="cuda", kv_cache_mib=64, gpu_memory_utilization=0.02, attention_backend="TRITON_ATTN")
    engine = Engine(tmp_path, {}, mode="bf16", receipt=tmp_path / "r.json", runtime=runtime,
                    sampling=Evaluation(), max_tokens=8, max_model_len=24)  # fmt: skip
    arguments = engine._arguments()
    assert arguments["kv_cache_memory_bytes"] == 64 << 20 and arguments["gpu_memory_utilization"] == 0.02
    assert arguments["attention_backend"] == "TRITON_ATTN" and arguments["enforce_eager"]
    prepare_environment(runtime)
    assert __import__("os").environ["TRITON_F32_DEFAULT"] == "ieee"


@pytest.mark.stack
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_verl_composes_gpu_experiments(name):
    """Every key exists in verl's config (Hydra refuses others), every engine argument in vLLM's own arguments."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from quads.integrations.verl.main import compose

    known = {f.name for f in dataclasses.fields(AsyncEngineArgs)}
    experiment = load_experiment(name)
    for arm in load_arms(experiment, more=True):
        config = compose(verl_overrides(resolve_run(experiment, arm, 0), PATHS))
        assert config.trainer.device == "cuda"
        assert set(config.actor_rollout_ref.rollout.engine_kwargs.vllm) - known == set()


@pytest.mark.stack
def test_vllm_has_what_the_plugin_calls():
    """Names and signatures in the installed vLLM; run with 0.26 (GPU build, no GPU needed) and 0.31 (CPU build)."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod  # noqa: F401
    from vllm.model_executor.layers.quantization.online.moe_base import OnlineMoEMethodBase
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_processing, get_layerwise_info
    from vllm.v1.worker.gpu_worker import Worker

    from quads.integrations.vllm.compat import OnlineLinearBase
    from quads.integrations.vllm.register import register

    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(OnlineMoEMethodBase.apply)[1:] == [
        "layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input"
    ]  # fmt: skip
    assert names(OnlineMoEMethodBase.create_weights)[1:5] == [
        "layer", "num_experts", "hidden_size", "intermediate_size_per_partition"
    ]  # fmt: skip
    assert names(OnlineLinearBase.create_weights)[1:4] == [
        "layer",
        "input_size_per_partition",
        "output_partition_sizes",
    ]
    assert names(initialize_layerwise_reload)[0] == "model" and callable(finalize_layerwise_reload)
    assert names(finalize_layerwise_processing)[:2] == ["model", "model_config"]  # what the other passes *args on to
    assert names(BaseModelLoader.load_model)[:3] == ["self", "vllm_config", "model_config"]
    info = get_layerwise_info(__import__("torch").nn.Linear(2, 2))
    assert {"load_numel", "load_numel_total"} <= {n for n in dir(info)} and callable(info.can_load)
    register()
    assert hasattr(Worker.compile_or_warm_up_model, "_quads_patch")
