"""Child process of test_triton_engine.py: real vLLM engines with backend triton, on CPU in Triton's interpreter.

    python triton_engine_runs.py JOB.json      job: {"models": {"A", "B"}, "masks": {"A", "B"}, "out": DIR}

Engines in bf16: reference eager, triton eager, and on CPU triton compiled (vLLM's compilation with the eager backend of
Dynamo, which traces the whole model without a graph break), on a GPU triton with decode steps as CUDA graphs, three
sequences padded to four. Each starts from A without masks, gets A and its masks, scores,
gets B, scores. Before that what is refused, and what it says. Output: OUT/triton.json.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import vllm_engines  # isort: skip  (sets the environment)
from vllm_engines import ON_GPU, message, new_engine, runner_of, stop, update, weight_stream  # isort: skip

os.environ["VLLM_DISABLE_COMPILE_CACHE"] = "1"
if not ON_GPU:
    os.environ.pop("TORCHDYNAMO_DISABLE")
    # CI_ENV: else vLLM replaces the eager backend by Inductor, whose fused kernels round differently.
    os.environ.update(VLLM_CPU_CI_ENV="1", TRITON_INTERPRET="1")

import torch
from vllm import LLM

from quads.integrations.vllm.execution import execution_arguments
from quads.numerics.rac import RacSpec
from quads.rollout.mode import RolloutMode

W4A4_RAC = RolloutMode("nvfp4", "nvfp4", RacSpec(0.5))
FP8 = RolloutMode("fp8", "fp8")
SEQUENCES = [[2, 9, 30, 11, 7, 21, 40, 3], [5, 6, 41, 8, 19]]
if ON_GPU:
    SEQUENCES.append([17, 33, 4, 12, 12, 25])
NEW_TOKENS = 8 if ON_GPU else 2
SEATS = 4
CAPTURED = "graphs" if ON_GPU else "compiled"


def start(model: str, config: dict, eager: bool = True, dtype: str = "bfloat16") -> LLM:
    if ON_GPU:
        execution = execution_arguments(not eager, [1, 2, SEATS])
    else:
        execution = {"enforce_eager": eager, "compilation_config": {"backend": "eager"}}
    room = {"max_model_len": 32, "max_num_seqs": SEATS, "max_num_batched_tokens": 32}
    return new_engine(model, config, dtype=dtype, **room, **execution)


def push(llm: LLM, model: str, masks: str | None, poison: str = "") -> None:
    """One update; the first element of the tensor whose name ends with `poison` becomes NaN."""
    stream = weight_stream(model, masks)
    for name, tensor in stream:
        if poison and name.endswith(poison):
            tensor.view(-1)[0] = float("nan")
    update(llm, stream)


def score(llm: LLM) -> list[list[float]]:
    return vllm_engines.score(llm, SEQUENCES, NEW_TOKENS)


def engine(job: dict, mode: RolloutMode, backend: str, eager: bool) -> dict:
    receipt = Path(job["out"]) / f"receipt_{mode.name}_{backend}_{eager}.json"
    masks = "sync" if mode.needs_masks else None
    config = mode.to_quantization_config(masks, ("lm_head", "mlp.gate"), str(receipt), backend)
    llm = start(job["models"]["A"], config, eager)
    result = {}
    if masks:
        result["no_mask"] = message(lambda: score(llm))
        stop(llm)
        llm = start(job["models"]["A"], config, eager)
    for name in ("A", "B"):
        push(llm, job["models"][name], job["masks"][name] if masks else None)
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
    for label, mode in (("", W4A4_RAC), ("fp8,", FP8)):
        for backend, eager in (("reference", True), ("triton", True), ("triton", False)):
            results[f"{label}{backend},{'eager' if eager else CAPTURED}"] = engine(job, mode, backend, eager)
    (Path(job["out"]) / "triton.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
