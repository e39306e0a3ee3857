"""Run -> overrides: golden values per arm, and verl's own config accepts every key (composed for real)."""

import json
from pathlib import Path

import pytest

from quads.config import Grpo, load_arm, load_arms, load_experiment, resolve_run
from quads.integrations.verl.overrides import RunPaths, hydra_value, quantization_config, verl_overrides

PATHS = RunPaths(*(Path("/r") / name for name in ("data", "model", "ckpt", "out", "ray")))


def overrides(arm: str, **grpo: object) -> dict[str, str]:
    experiment = load_experiment("toy")
    experiment = experiment.model_copy(update={"grpo": experiment.grpo.model_copy(update=grpo)})
    return dict(o.split("=", 1) for o in verl_overrides(resolve_run(experiment, load_arm(arm), 7), PATHS))


def test_golden_quads():
    got = overrides("quads")
    want = {
        "algorithm.rollout_correction.bypass_mode": "true",
        "algorithm.rollout_correction.rollout_is": "null",
        "data.seed": "7",
        "data.train_batch_size": "12",
        "actor_rollout_ref.actor.clip_ratio_c": "1000000000.0",
        "actor_rollout_ref.actor.optim.lr": "0.0005",
        "actor_rollout_ref.actor.optim.betas": "[0.9,0.95]",
        "actor_rollout_ref.rollout.n": "8",
        "actor_rollout_ref.rollout.max_model_len": "24",
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.quantization": '"quads"',
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.kv_cache_memory_bytes": "33554432",
        "trainer.save_freq": "20",
        "trainer.total_training_steps": "60",
    }
    assert {k: got[k] for k in want} == want
    assert '"activation":"nvfp4"' not in got["+actor_rollout_ref.quads"]  # asymmetric: A16 in the trainer
    assert 'weight:"nvfp4",activation:"bf16"' in got["+actor_rollout_ref.quads"]
    assert 'calibration:"/r/data/calibration.parquet"' in got["+actor_rollout_ref.quads"]


def test_arms_differ_only_where_they_say():
    bf16, naive = overrides("bf16"), overrides("nvfp4_naive")
    changed = {k for k in bf16 if bf16[k] != naive[k]}
    assert changed == {
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides",
        "trainer.experiment_name",
    }


def test_importance_sampling_recomputes_the_old_log_probs():
    got = overrides("nvfp4_naive_tis")
    assert got["algorithm.rollout_correction.bypass_mode"] == "false"
    assert got["algorithm.rollout_correction.rollout_is"] == '"token"'
    assert got["algorithm.rollout_correction.rollout_is_threshold"] == "2.0"


def test_dual_clip_is_explicit():
    assert overrides("bf16", dual_clip=3.0)["actor_rollout_ref.actor.clip_ratio_c"] == "3.0"
    assert Grpo().dual_clip is None


def test_masks_arrive_by_sync_only_for_static_rac():
    experiment = load_experiment("toy")
    by_arm = {
        a.name: quantization_config(resolve_run(experiment, a, 0), None) for a in load_arms(experiment, more=True)
    }
    assert {n for n, c in by_arm.items() if c["rac_masks"] == "sync"} == {"quads", "rac_only"}


def graphs_run(**runtime: object):
    experiment = load_experiment("toy")
    gpu = {"device": "cuda", "rollout_backend": "triton", "rollout_graphs": True, "max_sequences": 96}
    changed = experiment.runtime.model_copy(update=gpu | runtime)
    return resolve_run(experiment.model_copy(update={"runtime": changed}), load_arm("quads"), 7)


def test_backend_and_graphs_reach_the_engine():
    plain = dict(o.split("=", 1) for o in verl_overrides(graphs_run(rollout_graphs=False), PATHS))
    graphs = dict(o.split("=", 1) for o in verl_overrides(graphs_run(), PATHS))
    kwargs, eager = "+actor_rollout_ref.rollout.engine_kwargs.vllm", "actor_rollout_ref.rollout.enforce_eager"
    assert 'backend:"triton"' in plain[f"{kwargs}.hf_overrides"]
    assert (plain[eager], graphs[eager]) == ("true", "false")
    assert f"{kwargs}.compilation_config" not in plain
    compilation = json.loads(json.loads(graphs[f"{kwargs}.compilation_config"]))
    assert compilation["mode"] == 0 and compilation["cudagraph_mode"] == "FULL_DECODE_ONLY"
    assert compilation["cudagraph_capture_sizes"][-1] == 96
    assert 'backend:"reference"' in overrides("quads")[f"{kwargs}.hf_overrides"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        ("a b", '"a b"'),
        ([1, "x"], '[1,"x"]'),
        ({"a": None, "b": [0.5]}, "{a:null,b:[0.5]}"),
    ],
)
def test_hydra_values(value, text):
    assert hydra_value(value) == text


@pytest.mark.stack
def test_verl_composes_every_arm():
    from quads.integrations.verl.main import compose

    experiment = load_experiment("toy")
    for arm in load_arms(experiment, more=True):
        config = compose(verl_overrides(resolve_run(experiment, arm, 0), PATHS))
        plugin = config.actor_rollout_ref.rollout.engine_kwargs.vllm.hf_overrides.quantization_config
        assert (plugin.weight, plugin.activation) == (arm.rollout.weight, arm.rollout.activation)
        assert config.actor_rollout_ref.quads.weight == arm.trainer.weight
        assert config.algorithm.rollout_correction.bypass_mode == (arm.correction.old_log_probs == "rollout")


@pytest.mark.stack
def test_verl_hands_graphs_to_vllm_as_written():
    """Through Hydra, and parsed as verl does; vLLM's own class takes the values."""
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode

    from quads.integrations.verl.main import compose

    rollout = compose(verl_overrides(graphs_run(), PATHS)).actor_rollout_ref.rollout
    assert rollout.enforce_eager is False
    parsed = json.loads(rollout.engine_kwargs.vllm.compilation_config)
    config = CompilationConfig(**parsed)
    assert (config.mode, config.cudagraph_mode) == (CompilationMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY)
    assert config.cudagraph_capture_sizes == parsed["cudagraph_capture_sizes"]
