"""vLLM's own configuration classes, layers and weight loaders accept an export and hold its values.

What runs and what does not on a CPU: see vllm_load.py. Log-probs go through the engine with this project's plugin.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_moe import tiny_model
from tolerances import TOLERANCES

from quads.exporting import activations, parity
from quads.exporting.write import Request, export

pytestmark = pytest.mark.stack
SKIP = ("lm_head", "embed_tokens", "mlp.gate", "norm")
HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def read(checkpoint, tmp_path_factory):
    """What vLLM said, by "<format> <mode>"."""
    folder = tmp_path_factory.mktemp("exports")
    amax = activations.input_amax(checkpoint, parity.random_sequences(43), SKIP)
    exports = {}
    for name in ("compressed-tensors", "modelopt"):
        for mode in ("w4a16", "w4a4"):
            out = folder / f"{name}-{mode}"
            export(Request(checkpoint, name, mode, SKIP, amax=amax), out)
            exports[f"{name} {mode}"] = str(out)
    job = {"exports": exports, "out": str(folder / "said.json")}
    (folder / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, str(HERE / "vllm_load.py"), str(folder / "job.json")],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return json.loads((folder / "said.json").read_text())


@pytest.mark.parametrize("mode", ["w4a16", "w4a4"])
@pytest.mark.parametrize("name", ["compressed-tensors", "modelopt"])
def test_vllm_loads_an_export(read, name, mode):
    said = read[f"{name} {mode}"]
    assert said["method"] == {"compressed-tensors": "compressed-tensors", "modelopt": "modelopt_fp4"}[name]
    # KV-cache scales come with quantized KV caches only; W4A16 layers hold input scales that no kernel reads
    left = [n for n in said["not_loaded"] if ".attn." not in n and not (mode == "w4a16" and "input" in n)]
    assert left == []
    expected = {
        f"model.layers.{layer}.{part}" for layer in range(2) for part in ("self_attn.qkv_proj", "self_attn.o_proj")
    }
    linears = {n for n in said["quantized"] if "experts" not in n}
    assert linears == expected and len(said["quantized"]) == len(expected) + 2
    assert set(said["quantized"].values()) == {0}, "elements differ from the verifier's dequantized weights"
    assert sorted(n.rpartition(".")[2] for n in said["unquantized"]) == ["gate", "gate"]


@pytest.mark.parametrize("name", ["compressed-tensors", "modelopt"])
def test_vllms_emulated_forward_has_the_size_of_a_quantization_error(read, name):
    """A scale in the wrong form is off by orders of magnitude; NVFP4 activations cost about a tenth."""
    assert 0.02 < read[f"{name} w4a4"]["forward_error"] < TOLERANCES["export/vllm_forward"].limit


def test_log_probs_are_those_of_the_engine(checkpoint, tmp_path):
    """Real vLLM with this project's plugin quantizes the checkpoint itself; the export must say the same."""
    export(Request(checkpoint, "compressed-tensors", "w4a16", SKIP), tmp_path / "out")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "quads.export", "verify", str(tmp_path / "out")),
            *("--against", str(checkpoint), "--engine", "--out", str(tmp_path / "report.json")),
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    numbers = json.loads((tmp_path / "report.json").read_text())["numbers"]
    assert numbers["logprob_engine_max_nats"] <= parity.LIMIT_NATS and numbers["logprob_engine_tokens"] == 240
