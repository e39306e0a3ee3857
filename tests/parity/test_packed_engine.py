"""Backends native and cutlass in the real vLLM, weight updates included. On CPU in Triton's interpreter, with a
stand-in for vLLM's FP4 ops; on FP4 units nobody has run it.

    1. weights are bytes, and decode to those of the reference engine, bit for bit, after an update too
    2. an update writes into the same addresses, shapes and dtypes
    3. native ~ reference, compiled == eager; cutlass, which rounds twice, in a wider bound
"""

from __future__ import annotations

import json

import pytest
import torch
from programs import random_prompts, run_program, two_models
from tolerances import TOLERANCES

pytestmark = [pytest.mark.stack, pytest.mark.long]
PACKED = ("native,eager", "native,compiled", "cutlass,eager")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("packed")
    job = {**two_models(root, random_prompts(8, 10)), "out": str(root)}
    (root / "job.json").write_text(json.dumps(job))
    run_program("packed_engine_runs.py", root / "job.json", folders=("kernels",), timeout=900)
    found = json.loads((root / "packed.json").read_text())
    for name in found:
        backend, eager = name.split(",")
        found[name]["weights"] = torch.load(root / f"weights_{backend}_{eager == 'eager'}.pt")
    return found


def flat(logprobs: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for row in logprobs for value in row])


@pytest.mark.parametrize("engine", PACKED)
def test_weights_are_packed_and_decode_to_the_same_bits(results, engine):
    expected, got = results["reference,eager"]["weights"], results[engine]["weights"]
    assert expected.keys() == got.keys() and all(torch.equal(got[name], w) for name, w in expected.items())
    codes = [t for n, t in results[engine]["tensors B"].items() if n.endswith("weight")]
    assert codes and all(dtype == "torch.uint8" for _, _, dtype in codes)


@pytest.mark.parametrize("engine", PACKED)
def test_an_update_is_in_place(results, engine):
    assert results[engine]["tensors A"] == results[engine]["tensors B"]
    assert results[engine]["A"] != results[engine]["B"]


@pytest.mark.parametrize("update", ["A", "B"])
def test_log_probs(results, update):
    reference = flat(results["reference,eager"][update])
    for engine in PACKED:
        difference = float((flat(results[engine][update]) - reference).abs().mean())
        print(engine, update, difference)
        name = "cutlass_engine_logprob_mean" if engine.startswith("cutlass") else "triton_engine_logprob_mean"
        assert difference <= TOLERANCES[name].limit, engine
    assert torch.equal(flat(results["native,eager"][update]), flat(results["native,compiled"][update]))


@pytest.mark.parametrize("engine", PACKED)
def test_receipts(results, engine):
    receipt = results[engine]["receipt"]
    said = receipt["execution"]
    backend = engine.split(",")[0]
    assert receipt["backend"].startswith("native (FP4") and said["backend"] == backend
    assert said["graph_safe"] and said["activation_kernel"] == "triton" and said["product"]
    assert sum(m["status"] == "quantized" for m in receipt["modules"]) == 6
