"""A checkpoint of real size in miniature: its files are a model, its first layers are one too, sizes are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quads.bench import real_model
from quads.config import ConfigError, Experiment, Model, Warmup, load_experiment
from quads.config.experiment import Outliers

SIZES = Model(hidden=64, layers=3, heads=4, kv_heads=2, head_dim=32, experts=4, experts_per_token=2, expert_hidden=32)


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> Experiment:
    monkeypatch.setattr(real_model, "VOCABULARY", 80)
    outliers = Outliers(strength=8.0, channels_per_norm=2)
    warmup = Warmup(clean_steps=0, noisy_steps=0, outliers=outliers)
    return Experiment(name="tiny", title="", arms=("bf16",), model=SIZES, warmup=warmup)


def made(experiment: Experiment, layers: int, out: Path) -> Path:
    """A finished folder."""
    (out / "manifest.json").write_text(json.dumps(real_model.make(experiment, layers, "cpu", out)))
    return out


def test_it_is_a_model(experiment: Experiment, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    manifest = real_model.make(experiment, 3, "cpu", tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == manifest["parameters"] == real_model.count(SIZES, 3)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert len(tokenizer) == model.config.vocab_size == 80
    assert tokenizer("^3+5=").input_ids == [42, 3, 15, 40]
    logits = model(torch.arange(12)[None]).logits
    assert torch.isfinite(logits).all() and 0.1 < logits.std() < 10
    for layer in model.model.layers:  # the outlier channels: gains of the strength, their readers' columns small
        gain = layer.input_layernorm.weight
        assert sorted(set(gain.tolist())) == [1.0, 8.0] and int((gain > 1).sum()) == 2
        loud = gain > 1
        q = layer.self_attn.q_proj.weight
        assert q[:, loud].std() < q[:, ~loud].std() / 4


def test_layers_differ_and_the_seed_decides(experiment: Experiment, tmp_path: Path) -> None:
    for name in ("a", "b"):
        real_model.make(experiment, 2, "cpu", tmp_path / name)
    first, second, again = (
        load_file(tmp_path / where) for where in ("a/model-layer000.safetensors", "a/model-layer001.safetensors",
                                                  "b/model-layer000.safetensors")
    )  # fmt: skip
    key = "mlp.experts.1.up_proj.weight"
    assert torch.equal(first[f"model.layers.0.{key}"], again[f"model.layers.0.{key}"])
    assert not torch.equal(first[f"model.layers.0.{key}"], second[f"model.layers.1.{key}"])


def test_first_layers_of_a_deeper_one(experiment: Experiment, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    made(experiment, 3, tmp_path / "deep")
    manifest = real_model.make(experiment, 2, "cpu", tmp_path / "shallow", tmp_path / "deep")
    deep, shallow = (
        AutoModelForCausalLM.from_pretrained(tmp_path / n, dtype=torch.float32) for n in ("deep", "shallow")
    )
    assert sum(p.numel() for p in shallow.parameters()) == manifest["parameters"]
    kept = shallow.state_dict()
    assert len(kept) < len(deep.state_dict())
    assert all(torch.equal(value, deep.state_dict()[name]) for name, value in kept.items())
    index = json.loads((tmp_path / "shallow" / real_model.INDEX).read_text())["weight_map"]
    assert "model-layer002.safetensors" not in index.values()


def test_too_few_layers_are_named(experiment: Experiment, tmp_path: Path) -> None:
    made(experiment, 2, tmp_path / "shallow")
    with pytest.raises(ConfigError, match=r"has no model-layer002.*at least 3 layers"):
        real_model.make(experiment, 3, "cpu", tmp_path / "deep", tmp_path / "shallow")


def test_a_full_disk_is_seen_before_it_is_full(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_model.shutil, "disk_usage", lambda path: real_model.shutil._ntuple_diskusage(9, 9, 9))
    with pytest.raises(ConfigError, match="are needed"):
        real_model.make(experiment, 2, "cpu", tmp_path / "m")
    assert not (tmp_path / "m" / "manifest.json").exists()


def test_the_experiment_has_qwen3_30b_a3b_sizes() -> None:
    """30,532,122,624 is the published model's parameter count."""
    assert real_model.count(load_experiment("real_size").model, 48) == 30_532_122_624


def test_a_source_is_checked_before_anything_is_replaced(experiment: Experiment, tmp_path: Path) -> None:
    source = made(experiment, 2, tmp_path / "deep")
    with pytest.raises(ConfigError, match="is --out itself"):
        real_model.make(experiment, 2, "cpu", source, source)
    assert load_file(source / "model-layer001.safetensors")  # still there, no link to itself
    other = experiment.model_copy(update={"model": SIZES.model_copy(update={"hidden": 128})})
    with pytest.raises(ConfigError, match="made with another model"):
        real_model.make(other, 1, "cpu", tmp_path / "small", source)
    (source / "manifest.json").unlink()
    with pytest.raises(ConfigError, match="no manifest"):
        real_model.make(experiment, 1, "cpu", tmp_path / "small", source)
    assert not (tmp_path / "small").exists()


def test_layers_have_outliers_of_their_own(experiment: Experiment, tmp_path: Path) -> None:
    folder = made(experiment, 3, tmp_path / "m")
    layers = [load_file(folder / real_model.layer_file(i)) for i in range(3)]
    gains = [layer[f"model.layers.{i}.input_layernorm.weight"] for i, layer in enumerate(layers)]
    assert len({tuple((gain > 1).nonzero()[:, 0].tolist()) for gain in gains}) > 1


def test_the_stage_writes_its_manifest_last_and_says_what_is_wrong(tmp_path: Path, monkeypatch, caplog) -> None:
    config = tmp_path / "configs"
    config.mkdir()
    (config / "tiny.yaml").write_text(
        "{name: tiny, title: t, arms: [bf16], model: {hidden: 64, layers: 2, heads: 4, kv_heads: 2, head_dim: 32, "
        "experts: 4, experts_per_token: 2, expert_hidden: 32}}"
    )
    monkeypatch.setattr(real_model, "VOCABULARY", 80)
    words = ["--experiment", str(config / "tiny.yaml"), "--out", str(tmp_path / "m")]
    assert real_model.main(words) == 0 and (tmp_path / "m" / "manifest.json").is_file()
    monkeypatch.setattr(real_model, "write_shards", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        real_model.main(words)
    assert not (tmp_path / "m" / "manifest.json").exists() and not (tmp_path / "m" / real_model.INDEX).exists()
    (tmp_path / "file").touch()
    assert real_model.main([*words[:-1], str(tmp_path / "file")]) == 1
    assert real_model.main([*words, "--layers", "0"]) == 1 and "at least one layer" in caplog.text
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert real_model.main([*words, "--device", "cuda"]) == 1 and "no CUDA device here" in caplog.text
