"""Trainer = engine, reload = fresh start, on the real vLLM.

Chain of equalities, each with the test that guards it:
    1. engine weights == trainer's fake-quantized weights, element for element (bf16 engine, as in training)
    2. log-probs(float32 engine) ~ log-probs(HF float32 model after surgery), same tokens: sampled (prefill + decode)
    and
       prompt log-probs. 1e-4 catches a wrong scale, mask or weight; rounding differences are of order 1e-6. An
       activation on a rounding
       boundary may flip one code; those tokens are found from the trainer model alone and set apart
    3. log-probs after pushing weights B into an engine started from A == those of an engine started from B (0.0)
The engines run in one child process (engine_runs.py), because vLLM changes the process it lives in.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from parity_device import device
from programs import random_prompts, run_program, two_models
from safetensors.torch import load_file
from tolerances import TOLERANCES
from transformers import Qwen3MoeForCausalLM

from quads.layers.setup import Precision
from quads.layers.surgery import apply_surgery, quads_layers, quantized_weights, set_static_masks
from quads.numerics.rac import RacSpec

logger = logging.getLogger(__name__)
pytestmark = pytest.mark.stack
RAC = RacSpec(0.5)
REFERENCE = {
    "bf16": Precision(),
    "fp8": Precision("fp8", "fp8"),
    "w4a16": Precision("nvfp4"),
    "w4a4": Precision("nvfp4", "nvfp4"),
    "w4a4+rac": Precision("nvfp4", "nvfp4", rac=RAC),
    "w4a4+rac_token": Precision("nvfp4", "nvfp4", rac=RacSpec(0.5, mask="token")),
}
EXACT = ["bf16", "fp8", "w4a16", "w4a4"]
WITH_RAC = ["w4a4+rac", "w4a4+rac_token"]
PROMPT_TOKENS = 10


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Two checkpoints (float32 values, so that the rounding to bf16 is tested), masks of both, and the engines'
    results.
    """
    root = tmp_path_factory.mktemp("parity")
    prompts = random_prompts(24, PROMPT_TOKENS)
    job = {**two_models(root, prompts), "prompts": prompts.tolist(), "out": str(root)}
    (root / "job.json").write_text(json.dumps(job))
    run_program("engine_runs.py", root / "job.json")
    return job


def results(job: dict, mode: str) -> dict:
    return json.loads((Path(job["out"]) / f"{mode}.json").read_text())


def trainer_model(job: dict, precision: Precision, name: str = "A") -> Qwen3MoeForCausalLM:
    model = Qwen3MoeForCausalLM.from_pretrained(job["models"][name], dtype=torch.float32, attn_implementation="eager")
    apply_surgery(model.eval(), precision)
    if precision.rac is not None and precision.rac.mask == "static":
        set_static_masks(model, load_file(job["masks"][name]))
    return model.to(device())


def logprobs(model: Qwen3MoeForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs of tokens 1.. of ids [B, T] -> [B, T-1], on the CPU."""
    ids = ids.to(model.device)
    with torch.no_grad():
        return model(ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].cpu()


def differences(job: dict, mode: str, precision: Precision) -> tuple[torch.Tensor, torch.Tensor]:
    """|log-prob(engine) - log-prob(trainer model)| of prompt tokens [B, T-1] and of sampled tokens [B, S]."""
    got = results(job, mode)
    ids = torch.tensor(got["sequences"])
    logp = logprobs(trainer_model(job, precision), ids)
    prompt = (torch.tensor(got["prompt"]) - logp).abs()
    return prompt, (torch.tensor(got["sampled"]) - logp[:, PROMPT_TOKENS - 1 :]).abs()


def on_a_rounding_boundary(job: dict, mode: str) -> torch.Tensor:
    """bool [B, T-1]: tokens whose log-prob in the trainer model alone moves by more than 1e-4 when every quantizer's
    input
    is disturbed by float32 noise (1e-6 of the row's mean magnitude, 12 draws). There the reference is not defined to
    1e-4.
    """
    ids = torch.tensor(results(job, mode)["sequences"])
    model = trainer_model(job, REFERENCE[mode])
    plain, generator = logprobs(model, ids), torch.Generator().manual_seed(0)

    def disturb(setup):
        def activation(x, part=None, token=None):
            noise = torch.randn(x.shape, generator=generator).to(x.device) * x.abs().mean(-1, keepdim=True)
            return type(setup).activation(setup, x + 1e-6 * noise, part, token)

        setup.activation = activation

    for _, module in quads_layers(model):
        disturb(module.quads)
    return torch.stack([(logprobs(model, ids) - plain).abs() > 1e-4 for _ in range(12)]).any(0)


@pytest.mark.parametrize("mode", ["bf16", "w4a16"])
def test_float32_logprobs_match_trainer(job, mode):
    """No activation quantizer, hence no rounding boundary: every token."""
    worst = max(float(d.max()) for d in differences(job, mode, REFERENCE[mode]))
    assert worst <= TOLERANCES["parity_logprob_max"].limit


@pytest.mark.parametrize("mode", ["fp8", "w4a4", *WITH_RAC])
def test_float32_logprobs_match_trainer_off_rounding_boundaries(job, mode):
    """Every token that is not on a rounding boundary; one flipped code moves the others by up to 1e-2, engine or
    not.
    """
    prompt, sampled = differences(job, mode, REFERENCE[mode])
    boundary = on_a_rounding_boundary(job, mode)
    rest = torch.cat([prompt[~boundary], sampled[~boundary[:, PROMPT_TOKENS - 1 :]]])
    everything = torch.cat([prompt.flatten(), sampled.flatten()])
    above = float((everything > 1e-4).float().mean())
    share = float(boundary.float().mean())
    logger.info("%s: above 1e-4 %.4f, on boundary %.3f, max of the rest %.1e", mode, above, share, rest.max())
    assert float(rest.max()) <= TOLERANCES["parity_logprob_max"].limit
    assert above <= TOLERANCES["parity_logprob_share_above"].limit
    assert share <= TOLERANCES["parity_share_on_boundary"].limit


def test_parity_would_notice_another_mode(job):
    """The modes are told apart by orders of magnitude more than the tolerance."""
    pairs = [("bf16", "w4a16"), ("fp8", "bf16"), ("w4a16", "w4a4"), ("w4a4", "w4a4+rac"), ("w4a4+rac", "w4a4")]
    for mode, other in pairs:
        mean = float(differences(job, mode, REFERENCE[other])[0].mean())
        assert mean > 100 * TOLERANCES["parity_logprob_max"].limit, (mode, other, mean)


@pytest.mark.parametrize("mode", EXACT + WITH_RAC)
def test_reload_equals_fresh_engine(job, mode):
    got = results(job, mode)
    reloaded, fresh, before = (torch.tensor(got[k]) for k in ("reloaded", "fresh", "prompt"))
    assert float((reloaded - fresh).abs().max()) == 0.0
    assert float((before - fresh).abs().max()) > 0.1, "A and B must differ, or this test shows nothing"
    assert got["moved"] == [] and got["tensors"] > 20, "tensors must keep their addresses"


@pytest.mark.parametrize(
    ("run", "precision"),
    [
        ("fused", Precision("nvfp4")),
        ("shard", Precision("nvfp4", scale_group="shard")),
        ("fp8", Precision("fp8")),
        ("bf16", Precision()),
    ],
)
@pytest.mark.parametrize(("suffix", "name"), [("", "A"), ("_B", "B")])
def test_engine_weights_equal_trainer_weights(job, run, precision, suffix, name):
    """bf16 engine; "_B" after an update from B."""
    engine = load_file(Path(job["out"]) / f"weights_{run}{suffix}.safetensors")
    trainer = dict(quantized_weights(trainer_model(job, precision, name)))
    assert engine.keys() == trainer.keys() and len(engine) == 12
    assert sum(int((engine[n] != w.cpu()).sum()) for n, w in trainer.items()) == 0


def test_receipt(job):
    receipt = results(job, "w4a4+rac")["receipt"]
    assert (receipt["mode"], receipt["backend"], receipt["reloads"]) == ("w4a4+rac", "emulated (torch)", 2)
    assert receipt["counts"] == {"quantized_linears": 4, "quantized_experts": 2, "high_precision": 4}
    rows = {row["module"]: row for row in receipt["modules"]}
    assert rows["model.layers.0.mlp.gate"]["reason"].startswith("router")
    assert (
        rows["model.layers.1.mlp.experts"] | {"loads": 3, "status": "quantized"} == rows["model.layers.1.mlp.experts"]
    )
    masks = load_file(job["masks"]["B"])
    assert receipt["masks"].keys() == masks.keys()
    for key, mask in receipt["masks"].items():
        assert (mask["loads"], mask["selected"]) == (2, int(masks[key].sum())), key
    assert receipt["pid"] > 0 and receipt["versions"].keys() == {"vllm", "torch", "quads"}
    assert results(job, "bf16")["receipt"]["masks"] == {}


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("no_mask", ["RuntimeError", "layers.0.self_attn.qkv_proj", "static RAC mask", "sync"]),
        ("unknown_mask", ["ValueError", "model.layers.7.nowhere", "known: model.layers.0.mlp.experts.w13"]),
        ("after_failure", ["RuntimeError", "earlier weight update failed", "restart the engine"]),
        ("update_without_masks", ["RuntimeError", "without RAC masks", "layers.1.mlp.experts.w2"]),
        ("incomplete", ["RuntimeError", "incomplete", "model.layers.1.self_attn.qkv_proj"]),
        ("unknown_key", ["wieght", "known: activation"]),
    ],
)
def test_errors_say_what_to_do(job, case, parts):
    said = json.loads((Path(job["out"]) / "errors.json").read_text())[case]
    assert all(part in said for part in parts), said


@pytest.mark.parametrize("case", ["False,False", "False,True", "True,False", "True,True"])
def test_experts_method_equals_loop(job, case):
    """case: router weight applied on the input, experts partly on another rank."""
    difference = json.loads((Path(job["out"]) / "experts.json").read_text())[case]
    assert difference <= TOLERANCES["experts_loop_relative"].limit
