"""Child process of test_triton_engine.py: real vLLM engines with backend triton, on CPU in Triton's interpreter.

    python triton_engine_runs.py JOB.json      job: {"models": {"A", "B"}, "masks": {"A", "B"}, "out": DIR}

Engines in bf16: reference eager, triton eager, and on CPU triton compiled (vLLM's compilation with the eager backend of
Dynamo, which traces the whole model without a graph break), on a GPU triton with decode steps as CUDA graphs, three
sequences padded to four. Each starts from A without masks, gets A and its masks, scores,
gets B, scores. Before that what is refused, and what it says. Output: OUT/triton.json.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import sys
from pathlib import Path

from quads.rollout.device import GPU

os.environ.pop("TORCHDYNAMO_DISABLE", None)
os.environ.update(
    **(
        GPU
        if "cpu" not in importlib.metadata.version("vllm")
        # CI_ENV: else vLLM replaces the eager backend by Inductor, whose fused kernels round differently.
        else {"VLLM_CPU_CI_ENV": "1", "TRITON_INTERPRET": "1"}
    ),
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    VLLM_PLUGINS="quads",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_DISABLE_COMPILE_CACHE="1",
)

import torch
from safetensors.torch import load_file
from vllm import LLM, SamplingParams

from quads.integrations.vllm.execution import execution_arguments
from quads.integrations.vllm.reload import LayerwiseReload, file_weights
from quads.layers.names import RAC_MASK_PREFIX
from quads.numerics.rac import RacSpec
from quads.rollout.mode import RolloutMode

ON_GPU = "cpu" not in importlib.metadata.version("vllm")
W4A4_RAC = RolloutMode("nvfp4", "nvfp4", RacSpec(0.5))
SEQUENCES = [[2, 9, 30, 11, 7, 21, 40, 3], [5, 6, 41, 8, 19]]
if ON_GPU:
    SEQUENCES.append([17, 33, 4, 12, 12, 25])
NEW_TOKENS = 8 if ON_GPU else 2
SEATS = 4
CAPTURED = "graphs" if ON_GPU else "compiled"


def start(model: str, config: dict, eager: bool = True, dtype: str = "bfloat16") -> LLM:
    if ON_GPU:
        execution = execution_arguments(not eager, [1, 2, SEATS])
        execution |= {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.02}
    else:
        execution = {"enforce_eager": eager, "compilation_config": {"backend": "eager"}}
    return LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=32,
        max_num_seqs=SEATS,
        max_num_batched_tokens=32,
        async_scheduling=False,  # else a step's error is lost behind that of the sampling it left without input
        **execution,
        kv_cache_memory_bytes=16 << 20,
        enable_prefix_caching=False,
        disable_log_stats=True,
        quantization="quads",
        hf_overrides={"quantization_config": config},
    )


def stop(llm: LLM) -> None:
    llm.llm_engine.engine_core.shutdown()
    gc.collect()


def runner_of(llm: LLM):
    worker = llm.llm_engine.model_executor.driver_worker
    return getattr(worker, "worker", worker).model_runner


def push(llm: LLM, model: str, masks: str | None, poison: str = "") -> None:
    """One update; the first element of the tensor whose name ends with `poison` becomes NaN."""
    stream = [(n, t.clone()) for n, t in file_weights(model)]
    for name, tensor in stream:
        if poison and name.endswith(poison):
            tensor.view(-1)[0] = float("nan")
    if masks:
        stream[5:5] = [(RAC_MASK_PREFIX + key, mask) for key, mask in load_file(masks).items()]
    runner = runner_of(llm)
    with LayerwiseReload(runner.get_model(), runner.vllm_config, runner.model_config) as update:
        update.load(stream)


def score(llm: LLM) -> list[list[float]]:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, prompt_logprobs=0, logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in SEQUENCES], params, use_tqdm=False)
    scored = []
    for ids, output in zip(SEQUENCES, outputs, strict=True):
        prompt = [step[t].logprob for step, t in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
        sampled = output.outputs[0]
        scored.append(prompt + [step[t].logprob for step, t in zip(sampled.logprobs, sampled.token_ids, strict=True)])
    return scored


def message(action) -> str:
    """Text of the error that `action` raises, or "no error"."""
    try:
        action()
    except (RuntimeError, ValueError) as error:
        cause = error.__cause__
        return f"{type(error).__name__}: {error}" + (f" <- {cause}" if cause else "")
    return "no error"


def engine(job: dict, backend: str, eager: bool) -> dict:
    receipt = Path(job["out"]) / f"receipt_{backend}_{eager}.json"
    config = W4A4_RAC.to_quantization_config("sync", ("lm_head", "mlp.gate"), str(receipt), backend)
    llm = start(job["models"]["A"], config, eager)
    result = {"no_mask": message(lambda: score(llm))}
    stop(llm)
    llm = start(job["models"]["A"], config, eager)
    for name in ("A", "B"):
        push(llm, job["models"][name], job["masks"][name])
        result[name] = score(llm)
    result["receipt"] = json.loads(receipt.read_text())
    result["hash"] = runner_of(llm).vllm_config.compute_hash()
    stop(llm)
    return result


def refusals(job: dict) -> dict[str, str]:
    model = job["models"]["A"]
    w4a4 = RolloutMode("nvfp4", "nvfp4")
    said = {}
    for name, config, eager, dtype in (
        ("reference_compiled", w4a4.to_quantization_config(), False, "bfloat16"),
        ("batch_compiled", RolloutMode("nvfp4", "nvfp4", RacSpec(0.5, mask="batch")).to_quantization_config(
            backend="triton"), False, "bfloat16"),
        ("float32", w4a4.to_quantization_config(backend="triton"), True, "float32"),
        ("native", w4a4.to_quantization_config(backend="native"), True, "bfloat16"),
        ("skip", w4a4.to_quantization_config(skip=("lm_head", "mlp.exprets", "q_proj")), True, "bfloat16"),
    ):  # fmt: skip
        said[name] = message(lambda c=config, e=eager, d=dtype: start(model, c, e, d))
        gc.collect()
    for part in ("layers.1.input_layernorm.weight", "layers.0.mlp.gate.weight", "layers.0.self_attn.k_proj.weight"):
        llm = start(model, w4a4.to_quantization_config(skip=("lm_head", "mlp.gate")))
        said[part] = message(lambda p=part, e=llm: push(e, model, None, poison=p))
        stop(llm)
    for part, folder in job["broken"].items():
        said[f"start {part}"] = message(lambda f=folder: start(f, w4a4.to_quantization_config()))
        gc.collect()
    return said


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(0)
    results = {"refusals": refusals(job)}
    for backend, eager in (("reference", True), ("triton", True), ("triton", False)):
        results[f"{backend},{'eager' if eager else CAPTURED}"] = engine(job, backend, eager)
    (Path(job["out"]) / "triton.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
