"""Pretrained checkpoints: linking, completeness, counting; no network."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quads.config import Checkpoint, Model, load_experiment, model_hash
from quads.data import pretrained


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, source / "model-00001-of-00002.safetensors")
    save_file({"c": torch.zeros(2, 2)}, source / "model-00002-of-00002.safetensors")
    weights = {"a": "model-00001-of-00002.safetensors", "c": "model-00002-of-00002.safetensors"}
    (source / pretrained.SHARD_INDEX).write_text(json.dumps({"weight_map": weights}))
    (source / "config.json").write_text(json.dumps({"architectures": ["Qwen3MoeForCausalLM"]}))
    (source / "tokenizer_config.json").write_text("{}")
    (source / "pytorch_model.bin").write_text("pickles are never taken")
    return source


def test_local_files_are_linked_counted_and_hashed(folder: Path, tmp_path: Path) -> None:
    found = pretrained.place(Checkpoint(path=str(folder)), tmp_path / "out")
    assert found["parameters"] == 12 + 5 + 4 and found["architecture"] == "Qwen3MoeForCausalLM"
    assert (tmp_path / "out" / "config.json").is_symlink()
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()
    assert found["files"]["config.json"]["bytes"] == (folder / "config.json").stat().st_size
    assert all(len(f["sha256"]) == 64 for f in found["files"].values())


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("model-00002-of-00002.safetensors", "names 2 shards, missing: model-00002-of-00002.safetensors"),
        ("config.json", "no config.json"),
        ("tokenizer_config.json", "no tokenizer_config.json"),
    ],
)
def test_incomplete_checkpoints_are_refused(folder: Path, tmp_path: Path, remove: str, message: str) -> None:
    (folder / remove).unlink()
    with pytest.raises(ValueError, match=message):
        pretrained.place(Checkpoint(path=str(folder)), tmp_path / "out")


def test_a_damaged_shard_and_a_missing_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"<html>not found</html>")
    with pytest.raises(ValueError, match="not a safetensors file"):
        pretrained.place(Checkpoint(path=str(folder)), tmp_path / "out")
    with pytest.raises(ValueError, match="no such folder"):
        pretrained.place(Checkpoint(path=str(tmp_path / "nowhere")), tmp_path / "out")


def test_an_unreachable_hub_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda **_: (_ for _ in ()).throw(TimeoutError("offline")))
    with pytest.raises(OSError, match=r"hub cannot be read \(TimeoutError: offline\).*model.checkpoint.path"):
        pretrained.place(Checkpoint(repo="Qwen/Qwen3-30B-A3B", revision="a" * 40), tmp_path / "out")


@pytest.mark.parametrize("values", [{}, {"repo": "a/b"}, {"path": "x", "repo": "a/b", "revision": "0" * 40}])
def test_a_checkpoint_has_one_pinned_source(values: dict) -> None:
    with pytest.raises(ValueError, match=r"model\.checkpoint"):
        Checkpoint(**values)


def test_sizes_beside_a_checkpoint_are_refused_but_defaults_survive_a_round_trip() -> None:
    with pytest.raises(ValueError, match="model sets hidden"):
        Model(checkpoint=Checkpoint(path="x"), hidden=128)
    model = Model(checkpoint=Checkpoint(path="x"))
    assert Model.model_validate(model.model_dump()) == model


def test_the_hash_of_a_pretrained_model_does_not_depend_on_data() -> None:
    paper = load_experiment("paper")
    moved = paper.model_copy(update={"data": paper.data.model_copy(update={"seed": 9})})
    assert model_hash(moved) == model_hash(paper)
    toy = load_experiment("toy")
    moved = toy.model_copy(update={"data": toy.data.model_copy(update={"seed": 9})})
    assert model_hash(moved) != model_hash(toy)


def test_a_folder_inside_the_checkpoint_destroys_nothing(folder: Path) -> None:
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    for out in (folder, folder / "inner", folder.parent):
        with pytest.raises(ValueError, match="lie in one another"):
            pretrained.place(Checkpoint(path=str(folder)), out)
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before


def test_a_shard_that_was_cut_off_is_refused(folder: Path, tmp_path: Path) -> None:
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"its header says .*cut off"):
        pretrained.place(Checkpoint(path=str(folder)), tmp_path / "out")
