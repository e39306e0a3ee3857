"""The verifier against exports that are broken in one place each."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_moe import tiny_model

from quads.exporting.checkpoint import INDEX, Checkpoint, CheckpointError
from quads.exporting.verify import verify
from quads.exporting.write import MANIFEST, Request, export

SKIP = ("lm_head", "embed_tokens", "mlp.gate", "norm")


def failed(report):
    return {f.check for f in report.findings if not f.ok}


def zero_scale(tensors, config):
    tensors["model.layers.0.self_attn.q_proj.weight_scale"].view(torch.uint8)[0, 0] = 0


def nan_scale(tensors, config):
    tensors["model.layers.0.self_attn.q_proj.weight_scale"].view(torch.uint8)[0, 0] = 0x7F


def one_code(tensors, config):
    tensors["model.layers.1.mlp.experts.7.down_proj.weight_packed"][3, 2] ^= 1


def split_group(tensors, config):
    tensors["model.layers.0.self_attn.k_proj.weight_global_scale"] *= 2


def lost_tensor(tensors, config):
    del tensors["model.norm.weight"]


def changed_norm(tensors, config):
    tensors["model.norm.weight"][0] += 1


def not_ignored(tensors, config):
    config["quantization_config"]["ignore"].remove("model.layers.0.mlp.gate")


def ignored_but_quantized(tensors, config):
    config["quantization_config"]["ignore"].append("model.layers.0.self_attn.q_proj")


def wrong_dtype(tensors, config):
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    tensors[name] = tensors[name].float()


def stray_tensor(tensors, config):
    tensors["model.layers.0.self_attn.q_proj.weight_zero_point"] = torch.zeros(1)


def input_scale(tensors, config):
    tensors["model.layers.0.self_attn.q_proj.input_global_scale"] *= 1.5


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (zero_scale, "scales"),
        (nan_scale, "scales"),
        (one_code, "weights"),
        (split_group, "groups"),
        (lost_tensor, "layout"),
        (changed_norm, "rest"),
        (not_ignored, "skip list"),
        (ignored_but_quantized, "skip list"),
        (wrong_dtype, "layout"),
        (stray_tensor, "layout"),
        (input_scale, "inputs"),
    ],
)
def test_the_verifier_finds(broken, checkpoint, change, check):
    assert check in failed(verify(broken(change), checkpoint))


def without(module, *suffixes):
    def change(tensors, config):
        for name in [n for n in tensors if n.rpartition(".")[0] == module and n.rpartition(".")[2] in suffixes]:
            del tensors[name]

    return change


DOWN = "model.layers.1.mlp.experts.3.down_proj"
O_PROJ = "model.layers.0.self_attn.o_proj"
CT, MO = ("compressed-tensors", "w4a4"), ("modelopt", "w4a4")
EVERYTHING = ("weight_packed", "weight", "weight_scale", "weight_global_scale", "weight_scale_2")
INPUTS = ("input_global_scale", "input_scale")


@pytest.mark.parametrize(
    ("key", "module", "suffixes", "said"),
    [
        (CT, O_PROJ, ["weight_scale"], "o_proj.weight_scale is missing"),
        (MO, O_PROJ, ["weight_scale"], "o_proj.weight_scale is missing"),
        (MO, O_PROJ, ["weight"], "o_proj.weight is missing"),
        (CT, DOWN, ["weight_global_scale"], "experts.3.down_proj.weight_global_scale is missing"),
        (CT, DOWN, [*EVERYTHING, *INPUTS], "experts.3.down_proj.weight_packed is missing"),
        (MO, DOWN, [*EVERYTHING, *INPUTS], "experts.3.down_proj.weight is missing"),
        (MO, DOWN, EVERYTHING[:-1], "experts.3.down_proj.weight is missing"),
        (CT, "lm_head", ["weight"], "lm_head.weight is missing"),
    ],
)
def test_what_is_not_there_is_found_without_the_source(broken, key, module, suffixes, said):
    report = verify(broken(without(module, *suffixes), key))
    (layout,) = [f for f in report.findings if f.check == "layout"]
    assert not layout.ok and said in layout.found


def test_a_matrix_of_another_model_is_found_without_the_source(broken):
    """Both shapes fit each other, but not the architecture."""

    def change(tensors, config):
        for suffix in ("weight_packed", "weight_scale"):
            tensors[f"{O_PROJ}.{suffix}"] = tensors[f"{O_PROJ}.{suffix}"].view(torch.uint8)[:32].contiguous()
        tensors[f"{O_PROJ}.weight_scale"] = tensors[f"{O_PROJ}.weight_scale"].view(torch.float8_e4m3fn)

    (layout,) = [f for f in verify(broken(change)).findings if f.check == "layout"]
    assert "(32, 64), expected torch.uint8 (64, 64)" in layout.found


@pytest.mark.parametrize(("key", "suffix"), [(CT, "input_global_scale"), (MO, "input_scale")])
def test_swapped_input_scales_are_found(broken, key, suffix):
    def change(tensors, config):
        a, b = f"{O_PROJ}.{suffix}", f"{DOWN}.{suffix}"
        tensors[a], tensors[b] = tensors[b].clone(), tensors[a].clone()

    report = verify(broken(change, key))
    assert failed(report) == {"inputs"}
    (found,) = [f.found for f in report.findings if f.check == "inputs"]
    assert O_PROJ in found and DOWN in found and "mlp.experts.w2" in found


def group(config):
    return config["quantization_config"]["config_groups"]["group_0"]


@pytest.mark.parametrize("key", [CT, MO])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors, config: group(config)["weights"].update(group_size=32), "'group_size': 32"),
        (lambda tensors, config: group(config).update(targets=["Nothing"]), "Nothing"),
        (lambda tensors, config: config["quantization_config"].update(kv_cache_scheme={"num_bits": 8}), "num_bits"),
        (lambda tensors, config: config["quantization_config"].update(more=1), "more is 1, expected 'absent'"),
    ],
)
def test_another_declaration_is_found_without_the_source(broken, key, change, said):
    report = verify(broken(change, key))
    assert failed(report) == {"config"} and said in next(f.found for f in report.findings if f.check == "config")


def test_the_second_declaration_of_modelopt_counts_too(broken):
    folder = broken(lambda tensors, config: None, MO)
    path = folder / "hf_quant_config.json"
    said = json.loads(path.read_text())
    said["quantization"]["group_size"] = 32
    path.write_text(json.dumps(said))
    assert failed(verify(folder)) == {"config"}
    path.unlink()
    assert failed(verify(folder)) == {"config"}


@pytest.mark.parametrize("values", [{"rope_theta": 5.0}, {"num_experts_per_tok": 1}, {"dtype": "float16"}])
def test_another_model_config_is_found_against_the_source(broken, checkpoint, values):
    report = verify(broken(lambda tensors, config: config.update(values)), checkpoint)
    assert failed(report) == {"model"}
    assert next(iter(values)) in next(f.found for f in report.findings if f.check == "model")


def test_fewer_experts_declared_than_stored(broken):
    assert failed(verify(broken(lambda tensors, config: config.update(num_local_experts=7)))) >= {"layout"}


def test_a_tied_head_may_be_left_out(tmp_path):
    tiny_model(tie_word_embeddings=True).save_pretrained(tmp_path / "in")
    export(Request(tmp_path / "in", "compressed-tensors", "w4a16", SKIP), tmp_path / "out")
    assert "lm_head.weight" not in Checkpoint(tmp_path / "out")
    assert verify(tmp_path / "out", tmp_path / "in").ok


def test_an_export_without_its_manifest_is_refused(broken):
    folder = broken(lambda tensors, config: None)
    (folder / MANIFEST).write_text("{}")
    with pytest.raises(CheckpointError, match=r"quads_manifest\.json: no export\.skip"):
        verify(folder)


def test_files_that_are_cut_off_are_named(checkpoint, broken):
    folder = broken(lambda tensors, config: None)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["ghost.weight"] = "model-00001.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"places ghost\.weight \(1 in all\) in a file without it"):
        verify(folder)
    shard = folder / "model-00001.safetensors"
    for size in (4, 100, shard.stat().st_size - 10):
        shard.write_bytes(shard.read_bytes()[:size])
        with pytest.raises(CheckpointError, match=r"model-00001\.safetensors: damaged or cut off"):
            verify(folder)


def test_hidden_bytes_show_in_the_bits(broken, checkpoint):
    folder = broken(lambda tensors, config: None)
    tensors = load_file(folder / "model-00001.safetensors")
    save_file({**tensors, "unlisted": torch.zeros(7)}, folder / "model-00001.safetensors", metadata={"format": "pt"})
    assert failed(verify(folder)) == {"bits"}
