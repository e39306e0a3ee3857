"""Exports of a tiny model in both formats and modes, and a copy of one to break."""

import json

import pytest
from safetensors.torch import load_file, save_file
from tiny_moe import tiny_model

from quads.exporting import activations, parity
from quads.exporting.checkpoint import INDEX
from quads.exporting.write import Request, export

SKIP = ("lm_head", "embed_tokens", "mlp.gate", "norm")
FORMATS = ("compressed-tensors", "modelopt")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def amax(checkpoint):
    return activations.input_amax(checkpoint, parity.random_sequences(43), SKIP)


@pytest.fixture(scope="session")
def exports(checkpoint, amax, tmp_path_factory):
    """Folder by (format, mode)."""
    out = {}
    for name in FORMATS:
        for mode in ("w4a16", "w4a4"):
            out[name, mode] = tmp_path_factory.mktemp("export") / name
            export(Request(checkpoint, name, mode, SKIP, amax=amax), out[name, mode])
    return out


@pytest.fixture
def broken(exports, tmp_path):
    """A copy of one export whose tensors and config a test may edit: edit(tensors, config) -> folder."""

    def edit(change, key=("compressed-tensors", "w4a4")):
        source, out = exports[key], tmp_path / "broken"
        out.mkdir()
        for path in source.iterdir():
            (out / path.name).write_bytes(path.read_bytes())
        tensors, config = load_file(out / "model-00001.safetensors"), json.loads((out / "config.json").read_text())
        change(tensors, config)
        save_file(tensors, out / "model-00001.safetensors", metadata={"format": "pt"})
        index = json.loads((out / INDEX).read_text())
        index["weight_map"] = dict.fromkeys(tensors, "model-00001.safetensors")
        (out / INDEX).write_text(json.dumps(index))
        (out / "config.json").write_text(json.dumps(config))
        return out

    return edit
