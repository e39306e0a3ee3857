"""The quantization manifest: built from what both sides said, complete, and refused where they contradict."""

import json
from pathlib import Path

import pytest
from made_up_results import made_up_arms, made_up_experiment, write_run

from quads.exporting.manifest import from_run, masks_hash
from quads.files import ResultFileError

QUADS = 3


@pytest.fixture
def train(tmp_path):
    return write_run(tmp_path, made_up_experiment(), made_up_arms()[QUADS], 0)[0]


def edit(path, change):
    content = json.loads(path.read_text())
    content = json.loads(content) if isinstance(content, str) else content
    change(content)
    path.write_text(json.dumps(content))


def test_both_sides_stand_beside_each_other(train):
    manifest = from_run(train)
    rows = {m.module: m for m in manifest.modules}
    qkv = rows["model.layers.0.self_attn.qkv_proj"]
    assert qkv.parts == tuple(f"model.layers.0.self_attn.{p}_proj" for p in "qkv")
    assert (qkv.rollout_weight, qkv.rollout_activation) == ("nvfp4", "nvfp4")
    assert (qkv.trainer_weight, qkv.trainer_activation) == ("nvfp4", "bf16")
    assert qkv.kernel == "emulated (torch)"
    experts = rows["model.layers.0.mlp.experts"]
    assert experts.status == "quantized" and experts.parts == ("model.layers.0.mlp.experts",)
    head = rows["lm_head"]
    assert (head.status, head.rollout_weight, head.trainer_weight) == ("skipped", "unchanged", "unchanged")
    attention = rows["model.layers.0.self_attn.attn"]
    assert attention.kv_cache == manifest.kv_cache == "bfloat16 (not quantized)"
    assert set(manifest.conventions) == {"weight nvfp4", "activation nvfp4", "scale group"}
    assert manifest.rac["k"] == 0.5 and len(manifest.rac["masks"]) == 3
    assert manifest.counts == {"quantized": 2, "kv cache": 1, "skipped": 1}


def test_tags_say_it_in_few_words(train):
    tags = from_run(train).tags()
    assert tags["quads.mode"] == "w4a4+rac" and tags["quads.weight"] == "nvfp4"
    assert tags["quads.rac"] == "k=0.5 block16 static sumsq" and tags["quads.trainer_weight"] == "nvfp4"
    assert tags["quads.rac_masks"] == masks_hash(from_run(train).rac)


def test_an_arm_without_quantization_has_a_manifest_too(tmp_path):
    train, _ = write_run(tmp_path, made_up_experiment(), made_up_arms()[0], 0)
    manifest = from_run(train)
    assert manifest.rac is None and manifest.tags()["quads.rac"] == "none"
    assert manifest.tags()["quads.rac_masks"] == "none" and "weight bf16" in manifest.conventions


def test_the_digest_follows_formats_and_masks_only(train):
    first = from_run(train).digest
    edit(train / "result.json", lambda r: r.update(checkpoint="elsewhere", commit="1" * 40))
    edit(train / "receipt.json", lambda r: r.update(pid=7, reloads=9, versions={"vllm": "1"}))
    edit(train / "surgery.json", lambda s: None)  # no longer a string inside JSON
    assert from_run(train).digest == first
    edit(train / "receipt.json", lambda r: r["masks"]["model.layers.0.mlp.experts.w2"].update(sha256="cd" * 8))
    assert from_run(train).digest != first
    second = from_run(train).digest
    edit(train / "receipt.json", lambda r: r["modules"][0].update(activation="bf16"))
    assert from_run(train).digest not in (first, second)


def test_json_holds_everything_and_reads_back(train):
    manifest = from_run(train)
    content = json.loads(manifest.to_json())
    assert content["digest"] == manifest.digest and len(content["modules"]) == len(manifest.modules)
    assert content["conventions"]["weight nvfp4"]["profile"] == "verl_export"


def test_an_engine_module_that_the_trainer_does_not_know_is_refused(train):
    edit(train / "surgery.json", lambda s: s["rows"].pop(3))
    with pytest.raises(ResultFileError, match=r"engine quantized model\.layers\.0\.mlp\.experts.*surgery\.json"):
        from_run(train)


def test_a_trainer_module_that_the_engine_does_not_know_is_refused(train):
    edit(train / "receipt.json", lambda r: r["modules"].pop(1))
    with pytest.raises(ResultFileError, match=r"trainer quantized model\.layers\.0\.mlp\.experts"):
        from_run(train)


@pytest.mark.parametrize("name", ["receipt.json", "surgery.json"])
def test_a_missing_file_names_the_command(train, tmp_path, monkeypatch, name):
    (train / name).unlink()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("results").symlink_to(train)
    with pytest.raises(ResultFileError, match=rf"{name}.*snakemake --forcerun results/result\.json"):
        from_run(Path("results"))
