"""prepare then warmup on a tiny experiment: files, manifest last, clear errors."""

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quads import prepare, warmup
from quads.data import chain
from quads.files import ResultFileError, read_result

EXPERIMENT = """
name: tiny
title: stages only
arms: [bf16]
model: {{experts: 4}}
data: {{operations: 2, train_prompts: 24, eval_prompts: {eval_prompts}, calibration_prompts: 4}}
warmup: {{clean_steps: 3, noisy_steps: 2, batch: 8}}
grpo: {{steps: 2, prompts_per_step: 12}}
"""


@pytest.fixture
def stage(tmp_path):
    """Writes the experiment, prepares its data, returns a function that runs the warm-up stage."""
    config = tmp_path / "configs" / "tiny.yaml"
    config.parent.mkdir()
    config.write_text(EXPERIMENT.format(eval_prompts=8))
    prepare.main(["--experiment", str(config), "--out", str(tmp_path / "data")])

    def run(out="model"):
        warmup.main(["--experiment", str(config), "--data", str(tmp_path / "data"), "--out", str(tmp_path / out)])
        return tmp_path / out

    run.config = config
    run.data = tmp_path / "data"
    return run


def test_stage_writes_a_loadable_checkpoint_and_says_what_it_measured(stage, caplog):
    caplog.set_level(logging.INFO)
    out = stage()
    manifest = read_result(out / "manifest.json", "model manifest", ("accuracy", "config_hash", "weights_sha256"))
    assert "step 5/5 noisy" in caplog.text and "s left" in caplog.text
    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert warmup.weights_hash(model) == manifest["weights_sha256"]
    assert model.config.vocab_size == len(tokenizer) == 43
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == chain.ID[";"]
    assert manifest["parameters"] == sum(p.numel() for p in model.parameters())
    assert manifest["outliers"]["injected"] and manifest["outliers"]["strength"] == 12.0
    for when in ("before_injection", "after_injection"):
        assert manifest["accuracy"][when]["problems"] == 512
    gain = model.model.layers[0].input_layernorm.weight
    chosen = manifest["outliers"]["channels"]["model.layers.0.input_layernorm"]
    assert sorted(gain.topk(2).indices.tolist()) == chosen
    assert (gain[chosen] > 6).all()
    assert (out / "model.safetensors").stat().st_mode == (out / "config.json").stat().st_mode


def test_stage_repeats_bit_for_bit(stage):
    first, second = (read_result(stage(name) / "manifest.json", "model manifest") for name in ("a", "b"))
    assert first["weights_sha256"] == second["weights_sha256"]
    assert first["accuracy"] == second["accuracy"]


def test_data_of_another_config_is_refused(stage):
    stage.config.write_text(EXPERIMENT.format(eval_prompts=9))
    with pytest.raises(ValueError, match=r"made with data config .* but tiny has .*quads\.prepare"):
        stage()


def test_missing_data_is_named(stage):
    (stage.data / "manifest.json").unlink()
    with pytest.raises(ResultFileError, match=r"data manifest .*missing"):
        stage()


def test_a_failed_warm_up_leaves_no_manifest(stage, monkeypatch):
    out = stage()
    monkeypatch.setattr(warmup, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        stage()
    assert not (out / "manifest.json").exists()


def test_weights_hash_sees_one_changed_bit():
    layer = torch.nn.Linear(3, 2)
    before = warmup.weights_hash(layer)
    with torch.no_grad():
        layer.weight[0, 0] = torch.nextafter(layer.weight[0, 0], torch.tensor(9.0))
    assert warmup.weights_hash(layer) != before
