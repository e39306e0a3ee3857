"""Exports of a tiny model in both formats: what the verifier sees, and what compressed-tensors' own code sees."""

import json

import pytest
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize as ct_dequantize
from compressed_tensors.quantization.lifecycle.forward import quantize as ct_quantize
from safetensors.torch import load_file
from tiny_moe import tiny_model
from tolerances import TOLERANCES

from quads.exporting import activations, parity
from quads.exporting.checkpoint import Checkpoint, CheckpointError
from quads.exporting.plan import make_plan
from quads.exporting.verify import Export, verify
from quads.exporting.write import MANIFEST, Request, export
from quads.numerics.qdq import quantize_weight

SKIP = ("lm_head", "embed_tokens", "mlp.gate", "norm")
FORMATS = ("compressed-tensors", "modelopt")
MODULES = 2 * (4 + 3 * 8)


def failed(report):
    return {f.check for f in report.findings if not f.ok}


@pytest.mark.parametrize("mode", ["w4a16", "w4a4"])
@pytest.mark.parametrize("name", FORMATS)
def test_an_export_passes_every_check(exports, checkpoint, name, mode):
    report = verify(exports[name, mode], checkpoint)
    assert report.ok, report.to_dict()
    alone = {"layout", "config", "bits", "scales", "skip list", "groups"} | ({"inputs"} if mode == "w4a4" else set())
    assert {f.check for f in report.findings} == alone | {"weights", "rest", "model"}
    alone_report = verify(exports[name, mode])
    assert alone_report.ok and {f.check for f in alone_report.findings} == alone
    elements = 2 * (128 * 64 + 2 * 64 * 64 + 64 * 128 + 8 * 3 * 64 * 32)
    assert report.numbers["weights_elements"] == elements and report.numbers["weights_different"] == 0
    scalars = 1 if mode == "w4a16" else 2
    assert report.numbers["bits_per_quantized_parameter"] == pytest.approx(4.5 + 32 * scalars * MODULES / elements)


@pytest.mark.parametrize("name", FORMATS)
def test_dequantized_values_are_the_numerics_own(exports, checkpoint, name):
    source, made = Checkpoint(checkpoint), Export(exports[name, "w4a16"])
    alone = "model.layers.1.mlp.experts.5.down_proj"
    assert torch.equal(made.dequantized(alone), quantize_weight(source.get(f"{alone}.weight"), "nvfp4").dequantize())
    group = [f"model.layers.0.self_attn.{p}_proj" for p in "qkv"]
    fused = quantize_weight(torch.cat([source.get(f"{m}.weight") for m in group]), "nvfp4").dequantize()
    assert torch.equal(torch.cat([made.dequantized(m) for m in group]), fused)


def test_compressed_tensors_reads_the_same_codes_and_values(exports):
    folder = exports["compressed-tensors", "w4a4"]
    tensors = load_file(folder / "model-00001.safetensors")
    made, config = Export(folder), json.loads((folder / "config.json").read_text())
    (scheme,) = QuantizationConfig.model_validate(config["quantization_config"]).config_groups.values()
    assert scheme.weights.group_size == 16 and scheme.weights.strategy == "tensor_group"
    for module in made.modules:
        local = {n.rpartition(".")[2]: t for n, t in tensors.items() if n.rpartition(".")[0] == module}
        assert set(NVFP4PackedCompressor.compression_param_names(scheme)) == set(local)
        rows, half = local["weight_packed"].shape
        codes = unpack_fp4_from_uint8(local["weight_packed"], rows, 2 * half, torch.float32)
        values = ct_dequantize(
            x_q=codes,
            scale=local["weight_scale"].float(),
            global_scale=local["weight_global_scale"],
            dtype=torch.float32,
        )
        ours = made.dequantized(module)
        # theirs is q (s / gs), an engine's (q s) (1 / gs): the last bit differs
        limit = TOLERANCES["export/compressed_tensors_ulp"].limit
        assert float(((values - ours).abs() / ours.abs().clamp(min=1e-30)).max()) <= limit
        low = NVFP4PackedCompressor.decompress(local, scheme)["weight"].float()
        assert float((low - ours).abs().max()) <= TOLERANCES["export/decompress_bf16"].limit * float(ours.abs().max())


def test_compressed_tensors_writes_the_same_bytes(exports, checkpoint):
    folder = exports["compressed-tensors", "w4a16"]
    tensors, source = load_file(folder / "model-00001.safetensors"), Checkpoint(checkpoint)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(config).config_groups.values()
    for module in Export(folder).modules:
        w_NK = source.get(f"{module}.weight").to(torch.bfloat16).float()
        scale, gs = tensors[f"{module}.weight_scale"].float(), tensors[f"{module}.weight_global_scale"]
        theirs = pack_fp4_to_uint8(
            ct_quantize(x=w_NK, scale=scale, global_scale=gs, zero_point=None, args=scheme.weights)
        )
        assert torch.equal(theirs, tensors[f"{module}.weight_packed"])


def test_their_converter_turns_one_format_into_the_other(exports):
    plan_ignore = json.loads((exports["modelopt", "w4a4"] / "config.json").read_text())["quantization_config"]["ignore"]
    tensors = load_file(exports["modelopt", "w4a4"] / "model-00001.safetensors")
    converter = ModelOptNvfp4Converter(ignore=plan_ignore, targets=["re:.*proj$"])
    converter.validate(tensors)
    converted = converter.process(dict(tensors))
    expected = load_file(exports["compressed-tensors", "w4a4"] / "model-00001.safetensors")
    assert converted.keys() == expected.keys()
    for name, value in expected.items():
        theirs = converted[name]
        if "global_scale" in name:
            # they invert the multiplier, which was rounded once already
            ulp = torch.nextafter(value, torch.full_like(value, torch.inf)) - value
            assert abs(float(theirs) - float(value)) <= float(ulp), name
        else:
            assert torch.equal(theirs.view(torch.uint8), value.view(torch.uint8)), name


@pytest.mark.parametrize("name", FORMATS)
def test_static_input_scales_are_those_of_the_calibration(exports, amax, name):
    made = Export(exports[name, "w4a4"])
    for module, key in (
        ("model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.1.mlp.experts.3.up_proj", "model.layers.1.mlp.experts.w13"),
        ("model.layers.1.mlp.experts.3.down_proj", "model.layers.1.mlp.experts.w2"),
    ):
        stored = float(made.files.get(f"{module}.{made.form.input_global}"))
        largest = float(amax[key])
        assert stored == pytest.approx(2688.0 / largest if name == "compressed-tensors" else largest / 2688.0, rel=1e-6)


def test_calibration_finds_the_largest_input(checkpoint):
    """Against a hook on the stock model."""
    model, sequences = tiny_model(), parity.random_sequences(43, count=3)
    plan = make_plan(Checkpoint(checkpoint), SKIP)
    assert set(plan.inputs) == {
        f"model.layers.{layer}.{part}"
        for layer in range(2)
        for part in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts.w13", "mlp.experts.w2")
    }
    seen = []
    layer = model.model.layers[0]
    layer.self_attn.q_proj.register_forward_pre_hook(lambda module, args: seen.append(float(args[0].abs().max())))
    with torch.no_grad():
        for ids in sequences:
            model(torch.tensor([ids]))
    amax = activations.input_amax(checkpoint, sequences, SKIP)
    # the first layer's attention input depends on no quantized weight
    assert float(amax["model.layers.0.self_attn.qkv_proj"]) == pytest.approx(max(seen), rel=1e-6)


def test_the_log_probs_of_an_export_are_the_trainers(exports, checkpoint):
    for name in FORMATS:
        found = parity.against_trainer(exports[name, "w4a16"], checkpoint, SKIP, parity.random_sequences(43))
        assert found["max_nats"] <= TOLERANCES["export/logprob_trainer"].limit, found
        assert found["tokens"] == 16 * 15


def test_a_wrong_code_changes_the_log_probs(broken, checkpoint):
    def change(tensors, config):
        tensors["model.layers.0.self_attn.o_proj.weight_packed"][:4] ^= 0x77

    found = parity.against_trainer(broken(change), checkpoint, SKIP, parity.random_sequences(43))
    assert found["max_nats"] > 100 * parity.LIMIT_NATS


def test_shards_are_bounded_and_read_back(checkpoint, tmp_path):
    export(Request(checkpoint, "compressed-tensors", "w4a16", SKIP), tmp_path / "out", shard_bytes=20_000)
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 3 and all(s.stat().st_size < 30_000 for s in shards)
    assert verify(tmp_path / "out", checkpoint).ok


def test_requests_that_cannot_be_met(checkpoint, tmp_path):
    with pytest.raises(ValueError, match=r"weight_scale_group 'shard'.*wrong weights.*'fused'"):
        export(Request(checkpoint, "modelopt", "w4a16", SKIP, scale_group="shard"), tmp_path / "a")
    with pytest.raises(ValueError, match=r"static input scale.*8 of 8 inputs.*--mode w4a16"):
        export(Request(checkpoint, "modelopt", "w4a4", SKIP), tmp_path / "a")
    with pytest.raises(ValueError, match="unknown export format 'gguf'; known: compressed-tensors, modelopt"):
        export(Request(checkpoint, "gguf", "w4a16", SKIP), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(ValueError, match="full is not empty"):
        export(Request(checkpoint, "modelopt", "w4a16", SKIP), tmp_path / "full")
    with pytest.raises(CheckpointError, match="no quantization_config"):
        verify(checkpoint)
    with pytest.raises(CheckpointError, match=r"config\.json.*unusable"):
        verify(tmp_path / "full")


def test_more_modules_kept_in_high_precision(checkpoint, tmp_path):
    skip = (*SKIP, "o_proj")
    export(Request(checkpoint, "compressed-tensors", "w4a16", skip), tmp_path / "out")
    report = verify(tmp_path / "out", checkpoint)
    assert report.ok and len(Export(tmp_path / "out").modules) == MODULES - 2
    assert failed(verify(tmp_path / "out", checkpoint, skip=SKIP)) == {"layout", "skip list"}
    said = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert "model.layers.0.self_attn.o_proj" in said["export"]["ignored"] and said["run"] is None
