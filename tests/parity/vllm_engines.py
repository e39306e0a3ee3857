"""What the programs of this folder that start real vLLM engines share.

    new_engine     the plugin's engine with room for a few short sequences
    weight_stream, update    a checkpoint's tensors and masks, and the three-step update with them
    score          log-probs by prefill and by decoding

TRAP: importing this module sets the environment that vLLM reads at its import, so it comes first and imports no vLLM.
"""

from __future__ import annotations

import gc
import importlib.metadata
from typing import Any

from quads.config import Runtime
from quads.integrations.vllm.generate import prepare_environment

ON_GPU = "cpu" not in importlib.metadata.version("vllm")
prepare_environment(Runtime(device="cuda" if ON_GPU else "cpu", threads=1))
# The one backend for float32 and head_dim 32, and a small share, because other runs may use the card.
GPU_ARGUMENTS = {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.02}
WORKER_EXTENSION = "quads.integrations.vllm.reload.WorkerExtension"
HIGH_PRECISION = ("lm_head", "mlp.gate")


def new_engine(model: str, config: dict, **arguments: Any):
    """An LLM of `model` with quantization config `config`; `arguments` replace those below."""
    from vllm import LLM

    ours = {
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 1024,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 16 << 20,
        "enable_prefix_caching": False,
        "async_scheduling": False,  # else a step's error is lost behind that of the sampling it left without input
        "disable_log_stats": True,
        **(GPU_ARGUMENTS if ON_GPU else {}),
    }
    overrides = {"quantization_config": config}
    return LLM(model=model, quantization="quads", hf_overrides=overrides, **(ours | arguments))


def stop(llm) -> None:
    """Shut the engine down, so that the next one can be built."""
    llm.llm_engine.engine_core.shutdown()
    gc.collect()


def runner_of(llm):
    """The model runner of an engine in this process."""
    worker = llm.llm_engine.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def weight_stream(model: str, masks: str | None) -> list:
    """(name, tensor) of a checkpoint folder, cloned, with the masks of a safetensors file in the middle."""
    from safetensors.torch import load_file

    from quads.integrations.vllm.reload import file_weights
    from quads.layers.names import RAC_MASK_PREFIX

    stream = [(n, t.clone()) for n, t in file_weights(model)]
    if masks:
        stream[5:5] = [(RAC_MASK_PREFIX + key, mask) for key, mask in load_file(masks).items()]
    return stream


def update(llm, stream: list, bucket: int | None = None) -> None:
    """The three-step weight update, in buckets of `bucket` tensors or in one."""
    from quads.integrations.vllm.reload import LayerwiseReload

    runner = runner_of(llm)
    with LayerwiseReload(runner.get_model(), runner.vllm_config, runner.model_config) as reload:
        for i in range(0, len(stream), bucket or len(stream)):
            reload.load(stream[i : i + (bucket or len(stream))])


def score(llm, sequences: list[list[int]], new: int = 0) -> list[list[float]]:
    """Log-probs of tokens 1.. of every sequence, by prefill, and of `new` greedy tokens after it, by decoding."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=max(new, 1), prompt_logprobs=0, logprobs=0, ignore_eos=True)
    params.detokenize = False
    outputs = llm.generate([{"prompt_token_ids": s} for s in sequences], params, use_tqdm=False)
    rows = []
    for output, ids in zip(outputs, sequences, strict=True):
        prompt = [step[t].logprob for step, t in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        sampled = output.outputs[0]
        decoded = [step[t].logprob for step, t in zip(sampled.logprobs, sampled.token_ids, strict=True)]
        rows.append(prompt + decoded[:new])
    return rows


def message(action) -> str:
    """Text of the error that `action` raises and of its cause, or "no error"."""
    try:
        action()
    except (RuntimeError, ValueError) as error:
        cause = error.__cause__
        return f"{type(error).__name__}: {error}" + (f" <- {cause}" if cause else "")
    return "no error"
