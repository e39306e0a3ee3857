"""Backend triton in the real vLLM: eager and captured engines, weight updates, refusals. On CPU in the interpreter.

    1. captured == eager, bit for bit, also after an update of weights and masks (what was traced reads them in place);
       captured is torch.compile's trace on CPU, CUDA graphs of decode steps on a GPU (test_triton_engine_gpu.py)
    2. triton ~ reference: the products add in another order
    3. what cannot run is refused before weights are loaded, and what is broken is named
CUDA graphs of the layers alone: tests/kernels/test_graphs.py.
"""

from __future__ import annotations

import json

import pytest
import torch
from parity_device import device
from programs import random_prompts, run_program, two_models
from safetensors.torch import load_file, save_file
from tiny_moe import tiny_model
from tolerances import TOLERANCES

pytestmark = pytest.mark.stack
ON_GPU = device() == "cuda"
CAPTURED = "triton,graphs" if ON_GPU else "triton,compiled"
BROKEN = {
    "model.norm.weight": "model.norm.weight",
    "v_proj": "model.layers.1.self_attn.v_proj.weight",
    "up_proj": "model.layers.0.mlp.experts.3.up_proj.weight",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("triton")
    job: dict = {**two_models(root, random_prompts(8, 10)), "broken": {}, "out": str(root)}
    for part, name in BROKEN.items():
        folder = root / f"broken_{part}"
        tiny_model(1).save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        weights[name].view(-1)[-1] = float("nan")
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        job["broken"][part] = str(folder)
    (root / "job.json").write_text(json.dumps(job))
    run_program("triton_engine_runs.py", root / "job.json", timeout=900)
    return json.loads((root / "triton.json").read_text())


def flat(logprobs: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for row in logprobs for value in row])


@pytest.mark.parametrize("mode", ["", "fp8,"])
@pytest.mark.parametrize("update", ["A", "B"])
def test_captured_equals_eager(results, update, mode):
    both, captured = results[f"{mode}triton,eager"], results[mode + CAPTURED]
    assert torch.equal(flat(both[update]), flat(captured[update]))
    assert float((flat(both["A"]) - flat(both["B"])).abs().max()) > 0.1


@pytest.mark.parametrize("mode", ["", "fp8,"])
@pytest.mark.parametrize("update", ["A", "B"])
def test_triton_is_close_to_the_reference(results, update, mode):
    found, definition = results[f"{mode}triton,eager"][update], results[f"{mode}reference,eager"][update]
    difference = (flat(found) - flat(definition)).abs()
    assert float(difference.mean()) <= TOLERANCES["triton_engine_logprob_mean"].limit


@pytest.mark.parametrize("engine", ["reference,eager", "triton,eager", CAPTURED])
def test_no_request_without_masks(results, engine):
    """A compiled engine runs no Python in its layers: the check stands in front of the step."""
    said = results[engine]["no_mask"]
    assert all(part in said for part in ("layers.0.self_attn.qkv_proj", "static RAC mask", "sync")), said


def test_receipts(results):
    rows = {name: results[name]["receipt"]["execution"] for name in results if "," in name}
    assert (rows["reference,eager"]["backend"], rows["reference,eager"]["graph_safe"]) == ("reference", False)
    assert results["reference,eager"]["receipt"]["backend_check"] is None
    for name in ("triton,eager", CAPTURED):
        checked = results[name]["receipt"]["backend_check"]["layers"]
        assert [row["module"].rpartition(".")[2] for row in checked] == ["qkv_proj", "o_proj", "experts"]
        row = rows[name]
        assert (row["backend"], row["activation_kernel"], row["graph_safe"]) == ("triton", "triton", True)
        modules = [m for m in results[name]["receipt"]["modules"] if m["status"] == "quantized"]
        assert len(modules) == 6 and all(m["activation_kernel"] == "triton" for m in modules)
    assert rows["triton,eager"]["engine_mode"] == "eager"
    mode = rows[CAPTURED]["engine_mode"]
    assert mode == "compilation NONE, CUDA graphs FULL_DECODE_ONLY" if ON_GPU else mode.startswith("compilation ")


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("reference_compiled", ["enforce_eager=True", "backend 'reference'", "on the host"]),
        ("batch_compiled", ["enforce_eager=True", "a batch mask needs"]),
        ("float32", ["backend 'triton' is not available here", "bfloat16"]),
        ("native", ["backend 'native' is not available here", "choose another of"]),
        ("skip", ["'mlp.exprets', 'q_proj'", "fits no module", "qkv_proj"]),
        ("layers.1.input_layernorm.weight", ["model.layers.1.input_layernorm.weight is not finite: 1 of 64"]),
        ("layers.0.mlp.gate.weight", ["model.layers.0.mlp.gate.weight is not finite"]),
        ("layers.0.self_attn.k_proj.weight", ["model.layers.0.self_attn.k_proj.weight is not finite"]),
        ("start model.norm.weight", ["model.norm.weight is not finite: 1 of 64"]),
        ("start v_proj", ["model.layers.1.self_attn.v_proj.weight is not finite"]),
        ("start up_proj", ["model.layers.0.mlp.experts.up_proj is not finite", "(experts [3])"]),
    ],
)
def test_refusals_say_what_to_do(results, case, parts):
    said = results["refusals"][case]
    assert all(part in said for part in parts), said
