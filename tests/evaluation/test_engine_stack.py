"""Two real vLLM engines in one process on a tiny random checkpoint: modes, seeds, and log-probs that are log-probs.

Started in its own process: vLLM reads its environment at import, and this test must not decide it for others.
"""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.stack

SCRIPT = """
import json, sys
from pathlib import Path
from quads.config import Evaluation, Experiment
from quads.integrations.vllm.generate import Engine, EngineError, prepare_environment
out = Path(sys.argv[1])
experiment = Experiment(name="tiny", title="", arms=("bf16",))
prepare_environment(experiment.runtime)
from quads.rollout.mode import RolloutMode
from quads.toy.model import make_model
from quads.toy.tokenizer import make_tokenizer
make_model(experiment.model, seed=0).save_pretrained(out / "model")
make_tokenizer().save_pretrained(out / "model")
prompts, seeds = [[42, 3, 15, 32, 40], [42, 7, 11, 40], [42, 3, 15, 32, 40]], [11, 12, 11]
said = {}
for name, fmt in (("w4a4", "nvfp4"), ("bf16", "bf16")):
    mode = RolloutMode(fmt, fmt)
    with Engine(out / "model", mode.to_quantization_config(), mode=name, receipt=out / f"{name}.json",
                runtime=experiment.runtime, sampling=Evaluation(), max_tokens=8, max_model_len=24) as engine:
        first = engine.generate(prompts, seeds)
        alone = engine.generate(prompts[:1], seeds[:1])
        said[name] = {"first": [vars(s) for s in first], "alone": vars(alone[0]), "receipt": engine.receipt["mode"]}
try:
    with Engine(out / "model", RolloutMode().to_quantization_config(), mode="w4a4", receipt=out / "wrong.json",
                runtime=experiment.runtime, sampling=Evaluation(), max_tokens=8, max_model_len=24):
        said["wrong"] = "accepted"
except EngineError as error:
    said["wrong"] = str(error)
(out / "said.json").write_text(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    out = tmp_path_factory.mktemp("engines")
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(out)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((out / "said.json").read_text())


def test_both_engines_ran_in_one_process_with_their_own_mode(said):
    assert said["w4a4"]["receipt"] == "w4a4" and said["bf16"]["receipt"] == "bf16"
    assert said["w4a4"]["first"] != said["bf16"]["first"]


def test_a_receipt_of_another_mode_stops(said):
    assert "serves mode 'bf16', asked for 'w4a4'" in said["wrong"]


@pytest.mark.parametrize("mode", ["w4a4", "bf16"])
def test_samples_are_finite_bounded_and_decided_by_prompt_and_seed(said, mode):
    first, alone = said[mode]["first"], said[mode]["alone"]
    for sample in first:
        assert 1 <= len(sample["token_ids"]) <= 8 and len(sample["logprobs"]) == len(sample["token_ids"])
        assert all(-50.0 < p <= 0.0 for p in sample["logprobs"])
        assert sample["finish_reason"] == ("stop" if sample["token_ids"][-1] == 41 else "length")
    assert first[0]["token_ids"] == first[2]["token_ids"] == alone["token_ids"]
    assert first[0]["token_ids"] != first[1]["token_ids"]
