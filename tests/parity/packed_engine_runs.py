"""Child process of test_packed_engine.py: real vLLM engines with packed weights in Triton's interpreter, on CPU.

    python packed_engine_runs.py JOB.json      job as that of triton_engine_runs.py

The interpreter stands for the FP4 device (`incapable` answers None here), the recorder of tests/kernels/fp4_cases.py
for vLLM's ops. Engines in bf16: reference, native eager and compiled, cutlass. Each starts from A, gets A and its
masks, scores, gets B, scores; before and after B the addresses of its tensors, after B its dump.

Output: OUT/packed.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from triton_engine_runs import W4A4_RAC, push, score, start  # isort: skip  (sets the environment)

import torch
from fp4_cases import Recorder
from vllm_engines import runner_of, stop

from quads.integrations.vllm.reload import engine_weights
from quads.integrations.vllm.state import quads_layers
from quads.kernels import cutlass, native


def tensors(model: torch.nn.Module) -> dict[str, list]:
    """Address, shape and dtype of every parameter of the quantized layers."""
    return {
        f"{state.name}.{name}": [p.data_ptr(), list(p.shape), str(p.dtype)]
        for module, state in quads_layers(model)
        for name, p in module.named_parameters(recurse=False)
    }


def engine(job: dict, backend: str, eager: bool) -> dict:
    receipt = Path(job["out"]) / f"receipt_{backend}_{eager}.json"
    config = W4A4_RAC.to_quantization_config("sync", ("lm_head", "mlp.gate"), str(receipt), backend)
    llm = start(job["models"]["A"], config, eager)
    model, result = runner_of(llm).get_model(), {}
    for name in ("A", "B"):
        push(llm, job["models"][name], job["masks"][name])
        result[name] = score(llm)
        result[f"tensors {name}"] = tensors(model)
    torch.save(engine_weights(model), Path(job["out"]) / f"weights_{backend}_{eager}.pt")
    result["receipt"] = json.loads(receipt.read_text())
    stop(llm)
    return result


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(0)
    native.incapable = native.unavailable = lambda: None
    from quads.integrations.vllm import preflight

    preflight.take_ops = lambda engine: None
    cutlass.use(Recorder(), 100)
    results = {}
    for backend, eager in (("reference", True), ("native", True), ("native", False), ("cutlass", True)):
        results[f"{backend},{'eager' if eager else 'compiled'}"] = engine(job, backend, eager)
    (Path(job["out"]) / "packed.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
