"""Run -> Hydra overrides of verl's ppo_trainer config: a pure function, golden-tested.

Contract: every value that decides a result is passed explicitly, so that no default of verl does; keys that verl's
YAML lacks carry Hydra's `+`. Checked against verl 0.9.1 by composing its own config (tests/integrations).

Traps paid for:
- `algorithm.rollout_correction.bypass_mode` is what makes rollout log-probs the old ones;
  `actor.use_rollout_log_probs` exists in a dataclass and is read nowhere.
- verl's dual clip defaults to 3.0 in the actor config; null here means off and is passed as a bound never reached.
- distributed_executor_backend=uni needs VLLM_ENABLE_V1_MULTIPROCESSING=0 (set by the session), else vLLM's CPU
  platform turns it back into mp.
- enforce_eager=false alone compiles with Inductor, and verl sets cudagraph_mode to FULL_AND_PIECEWISE unless
  compilation_config says otherwise: quads.integrations.vllm.execution says it.
- FSDPEngineConfig defers gradient sync by default and verl's YAML does not; deferring cannot fit a large model.
- kv_cache_memory_bytes is overridden by VLLM_CPU_KVCACHE_SPACE: the session leaves that variable unset.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quads.config import Run
from quads.integrations.vllm.execution import capture_sizes, execution_arguments, serving_backend
from quads.rollout.mode import RolloutMode

DUAL_CLIP_OFF = 1.0e9
TRAINER_MODE = "quads_sync"
PACKAGE = "quads.integrations.verl"


@dataclass(frozen=True)
class RunPaths:
    """Absolute paths of one training run."""

    data: Path
    model: Path
    checkpoints: Path
    out: Path
    ray: Path


def hydra_value(value: Any) -> str:
    """A Python value in Hydra's override grammar (quoted strings, no spaces)."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{hydra_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(hydra_value(v) for v in value) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False)
    return repr(value)


def quantization_config(run: Run, receipt: Path | None) -> dict[str, Any]:
    """The plugin's options for this run's rollout engine; static masks arrive with each weight sync."""
    mode = RolloutMode.from_arm(run.arm.model_dump())
    return mode.to_quantization_config(
        rac_masks="sync" if mode.needs_masks else None,
        skip=run.arm.keep_high_precision,
        receipt=None if receipt is None else str(receipt),
        backend=serving_backend(mode.name, run.runtime.rollout_backend),
    )


def _data(run: Run, paths: RunPaths) -> dict[str, Any]:
    return {
        "data.train_files": paths.data / "train.parquet",
        "data.val_files": paths.data / "eval.parquet",
        "data.train_batch_size": run.grpo.prompts_per_step,
        "data.max_prompt_length": run.grpo.max_prompt_tokens,
        "data.max_response_length": run.grpo.max_response_tokens,
        "data.dataloader_num_workers": 0,
        "data.shuffle": True,
        "data.seed": run.seed,
        "data.validation_shuffle": False,
        # Chains have one known length; problems in words do not, and an overlong prompt would stop the run.
        "data.filter_overlong_prompts": bool(run.data.sets),
    }


def _algorithm(run: Run) -> dict[str, Any]:
    correction = run.arm.correction
    values: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": True,
        "algorithm.use_kl_in_reward": False,
        "algorithm.rollout_correction.bypass_mode": correction.old_log_probs == "rollout",
        "algorithm.rollout_correction.rollout_is": None if correction.importance == "none" else correction.importance,
    }
    if correction.importance != "none":
        values["algorithm.rollout_correction.rollout_is_threshold"] = correction.threshold
    return values


def _actor(run: Run) -> dict[str, Any]:
    grpo, runtime, actor = run.grpo, run.runtime, "actor_rollout_ref.actor"
    compute = "bf16" if runtime.compute_dtype == "bfloat16" else "fp32"
    precision = {"param_dtype": compute, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    batching = {}
    if runtime.tokens_per_gpu is not None:
        batching = {
            f"{actor}.use_dynamic_bsz": True,
            f"{actor}.ppo_max_token_len_per_gpu": runtime.tokens_per_gpu,
        }
    return batching | {
        f"{actor}.strategy": "fsdp2",
        f"{actor}.fsdp_config.strategy": "fsdp2",
        "actor_rollout_ref.ref.strategy": "fsdp2",
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"{actor}.use_torch_compile": False,
        f"{actor}.fsdp_config.seed": run.seed,
        # True would keep 4 bytes a parameter of unsharded gradients on every GPU, and its dataclass says True.
        f"{actor}.fsdp_config.use_no_sync_for_gradient_accumulation": False,
        f"{actor}.fsdp_config.model_dtype": "fp32",
        f"+{actor}.fsdp_config.mixed_precision": precision,
        f"{actor}.fsdp_config.param_offload": runtime.offload,
        f"{actor}.fsdp_config.optimizer_offload": runtime.offload,
        f"{actor}.ppo_mini_batch_size": grpo.mini_batch_prompts,
        f"{actor}.ppo_micro_batch_size_per_gpu": runtime.micro_batch(grpo.mini_batch_prompts * grpo.samples_per_prompt),
        f"{actor}.ppo_epochs": grpo.epochs_per_batch,
        f"{actor}.data_loader_seed": run.seed,
        f"{actor}.optim.lr": grpo.lr,
        f"{actor}.optim.lr_warmup_steps": 0,
        f"{actor}.optim.lr_scheduler_type": "constant",
        f"{actor}.optim.betas": list(grpo.betas),
        f"{actor}.optim.weight_decay": grpo.weight_decay,
        f"{actor}.optim.clip_grad": grpo.grad_clip,
        f"{actor}.policy_loss.loss_mode": "vanilla",
        f"{actor}.clip_ratio": grpo.clip_low,
        f"{actor}.clip_ratio_low": grpo.clip_low,
        f"{actor}.clip_ratio_high": grpo.clip_high,
        f"{actor}.clip_ratio_c": DUAL_CLIP_OFF if grpo.dual_clip is None else grpo.dual_clip,
        f"{actor}.loss_agg_mode": "token-mean",
        f"{actor}.use_kl_loss": grpo.kl_coefficient > 0,
        f"{actor}.kl_loss_coef": grpo.kl_coefficient,
        f"{actor}.calculate_entropy": True,
        f"{actor}.entropy_coeff": grpo.entropy_coefficient,
        f"{actor}.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
    }


def _rollout(run: Run, paths: RunPaths) -> dict[str, Any]:
    grpo, runtime, rollout = run.grpo, run.runtime, "actor_rollout_ref.rollout"
    inline = runtime.agent_loop == "inline"
    execution = execution_arguments(runtime.rollout_graphs, capture_sizes(runtime.max_sequences))
    values: dict[str, Any] = {
        f"{rollout}.name": "vllm",
        f"{rollout}.n": grpo.samples_per_prompt,
        f"{rollout}.seed": run.seed,
        f"{rollout}.temperature": grpo.temperature,
        f"{rollout}.top_p": 1.0,
        f"{rollout}.top_k": -1,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.dtype": runtime.engine_dtype,
        f"{rollout}.free_cache_engine": runtime.sleep,
        f"+{rollout}.enable_sleep_mode": runtime.sleep,
        f"{rollout}.enforce_eager": execution["enforce_eager"],
        f"{rollout}.enable_prefix_caching": False,
        f"{rollout}.gpu_memory_utilization": runtime.gpu_memory_utilization,
        f"{rollout}.max_model_len": grpo.max_prompt_tokens + grpo.max_response_tokens,
        f"{rollout}.max_num_batched_tokens": runtime.max_batched_tokens,
        f"{rollout}.max_num_seqs": runtime.max_sequences,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": runtime.micro_batch(
            grpo.mini_batch_prompts * grpo.samples_per_prompt
        ),
        f"{rollout}.agent.num_workers": 1,
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 4 if runtime.device == "cpu" else 512,
        f"{rollout}.val_kwargs.do_sample": True,
        f"{rollout}.val_kwargs.temperature": grpo.temperature,
        f"{rollout}.val_kwargs.top_p": 1.0,
        f"{rollout}.val_kwargs.n": 1,
    }
    engine = f"+{rollout}.engine_kwargs.vllm"
    values[f"{engine}.worker_extension_cls"] = f"{PACKAGE}.extension.QuadsWorkerExtension"
    values[f"{engine}.quantization"] = "quads"
    values[f"{engine}.hf_overrides"] = {"quantization_config": quantization_config(run, paths.out / "receipt.json")}
    values[f"{engine}.kv_cache_memory_bytes"] = runtime.kv_cache_mib * 2**20
    values[f"{engine}.distributed_executor_backend"] = "uni"
    if "compilation_config" in execution:
        # As text: verl reads text or a plain dict here, and Hydra would make the dict one of its own.
        values[f"{engine}.compilation_config"] = json.dumps(execution["compilation_config"])
    if runtime.attention_backend is not None:
        values[f"{engine}.attention_backend"] = runtime.attention_backend
    if inline:
        values[f"+{rollout}.agent.agent_loop_manager_class"] = f"{PACKAGE}.agent_loop.InlineAgentLoopManager"
    return values


def _trainer(run: Run, paths: RunPaths) -> dict[str, Any]:
    grpo, runtime = run.grpo, run.runtime
    return {
        "trainer.device": runtime.device,
        "trainer.n_gpus_per_node": runtime.gpus_per_node,
        "trainer.nnodes": runtime.nodes,
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": TRAINER_MODE,
        f"+trainer.v1.{TRAINER_MODE}": {
            "out": str(paths.out),
            "decompose_every": run.decompose_every,
            "stop_on": run.collapse.model_dump() if grpo.stop_on_collapse else None,
        },
        "trainer.project_name": "quads",
        "trainer.experiment_name": run.id,
        "trainer.logger": ["file"],
        "trainer.total_training_steps": grpo.steps,
        "trainer.total_epochs": 1,
        "trainer.save_freq": grpo.save_every,
        "trainer.test_freq": grpo.evaluate_every or grpo.steps,
        "trainer.val_before_train": True,
        "trainer.resume_mode": "auto",
        "trainer.max_actor_ckpt_to_keep": 2,
        "trainer.balance_batch": False,
        "trainer.default_local_dir": paths.checkpoints,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "reward.num_workers": 0 if runtime.agent_loop == "inline" else 1,
        "reward.custom_reward_function.path": f"pkg://{PACKAGE}.reward",
        "reward.custom_reward_function.name": "compute_score",
    }


def _ray(run: Run, paths: RunPaths) -> dict[str, Any]:
    runtime, init = run.runtime, "ray_kwargs.ray_init"
    values: dict[str, Any] = {f"+{init}.include_dashboard": False, f"+{init}._temp_dir": paths.ray}
    if runtime.nodes == 1:
        # Logical resources for Ray to hand out: verl asks for one CPU per actor, however few cores there are.
        values |= {f"{init}.num_cpus": 12, f"+{init}.num_gpus": runtime.gpus_per_node}
    store = runtime.object_store_mib or (191 if runtime.device == "cpu" else None)
    if store is not None:
        values[f"+{init}.object_store_memory"] = store * 2**20
    return values


def _quads(run: Run, paths: RunPaths) -> dict[str, Any]:
    rac = run.arm.rollout.rac
    static = rac is not None and rac.mask == "static"
    return {
        "+actor_rollout_ref.quads": {
            "weight": run.arm.trainer.weight,
            "activation": run.arm.trainer.activation,
            "scale_group": run.arm.weight_scale_group,
            "skip": list(run.arm.keep_high_precision),
            "backend": run.runtime.trainer_backend,
            "experts": run.runtime.trainer_experts,
            "cache": run.runtime.weight_cache,
            "chunked_head": run.runtime.chunked_head,
            "rac": rac.model_dump() if rac is not None and static else None,
            "calibration": str(paths.data / "calibration.parquet") if static else None,
            "masks": str(paths.checkpoints / "rac_masks.safetensors") if static else None,
            "surgery_report": str(paths.out / "surgery.json"),
            "engine_weights": str(paths.out / "engine_weights.safetensors"),
            "delta_weight_report": str(paths.out / "delta_weight.json"),
        }
    }


def verl_overrides(run: Run, paths: RunPaths) -> list[str]:
    """Overrides for `ppo_trainer`, one `key=value` per item, in a fixed order."""
    model = {
        "actor_rollout_ref.model.path": paths.model,
        "actor_rollout_ref.model.external_lib": f"{PACKAGE}.engine",
        "+actor_rollout_ref.model.override_config.attn_implementation": run.runtime.attention,
        "actor_rollout_ref.model.use_remove_padding": run.runtime.remove_padding,
        "actor_rollout_ref.model.enable_gradient_checkpointing": run.runtime.gradient_checkpointing,
    }
    merged = (
        _data(run, paths)
        | _algorithm(run)
        | model
        | _actor(run)
        | _rollout(run, paths)
        | _trainer(run, paths)
        | _ray(run, paths)
        | _quads(run, paths)
    )
    return [f"{key}={hydra_value(value)}" for key, value in merged.items()]
