"""`python -m quads.preflight` end to end on tiny checkpoints, and every bad input with its message and exit code."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from other_moe import tiny_olmoe
from preflight_models import save, write_prompts
from safetensors.torch import load_file, save_file
from tiny_moe import tiny_model

from quads import preflight
from quads.config import ConfigError, Preflight
from quads.diagnostics.preflight import head, report
from quads.diagnostics.preflight.sequences import read_sequences, split

FEW = ["--gap", "0", "--sequences", "16"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model(), tmp_path_factory.mktemp("model"), shards=True)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "p.jsonl", 64)


def test_end_to_end(checkpoint: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = preflight.main(
        [str(checkpoint), "--prompts", str(prompts), "--out", str(tmp_path), "--k", "0.25", "1", "--gap", "0.05"]
    )
    assert code == 0
    result = json.loads((tmp_path / "preflight.json").read_text())
    assert {(v["rollout"], v["trainer"]) for v in result["verdicts"]} == {
        (r, t) for r in ("fp8", "w4a16", "w4a4", "w4a4+rac-k0.5-block16-static") for t in ("bf16", "w4a16", "w4a4")
    }
    gap = {(p["trainer"], p["rollout"]): p["expected_mean_token_abs_d"] for p in result["pairs"]}
    assert gap["bf16", "bf16"] < gap["bf16", "fp8"] < gap["bf16", "w4a4"]
    assert gap["w4a16", "w4a16"] < gap["w4a16", "w4a4+rac-k0.5-block16-static"] < gap["w4a16", "w4a4"]
    # A drawn token per context estimates the expectation.
    for p in result["pairs"]:
        assert p["drawn_mean_token_abs_d"] == pytest.approx(p["expected_mean_token_abs_d"], rel=0.35)
        assert p["interval_low"] <= p["expected_mean_token_abs_d"] <= p["interval_high"]
    rows = result["search"]["rows"]
    assert len(rows) == 3 * (4 + 1) and result["sequences"]["basis"] == "response"
    for trainer, found in result["search"]["found"].items():
        reached = [r for r in rows if r["trainer"] == trainer and r["gap"] <= 0.05]
        assert (found is None) == (not reached)
        assert found is None or found["selected_channel_share"] == min(r["selected_channel_share"] for r in reached)
    text = (tmp_path / "preflight.md").read_text()
    assert "model, 8192 tokens" in text and "| toy quads (W4A16 / W4A4+RAC) | 0.062 |" in text
    assert (tmp_path / "preflight.svg").stat().st_size > 10_000 and (tmp_path / "preflight.png").is_file()
    assert "w4a4+rac-k0.5-block16-static" in capsys.readouterr().out


def test_strict_exits_3_only_when_something_hurts(checkpoint: Path, prompts: Path) -> None:
    asked = [str(checkpoint), "--prompts", str(prompts), "--strict", "--gap", "0", "--trainers"]
    assert preflight.main([*asked, "bf16", "--rollouts", "w4a4"]) == preflight.STRICT
    assert preflight.main([*asked, "w4a16", "--rollouts", "w4a16"]) == 0


def test_generated_responses_on_olmoe(tmp_path: Path) -> None:
    folder = save(tiny_olmoe(), tmp_path / "model")
    prompts = write_prompts(tmp_path / "p.jsonl", 20, responses=False)
    code = preflight.main(
        [str(folder), "--prompts", str(prompts), "--generate", "12", "--chip", "H200", "--out", str(tmp_path / "out"),
         *FEW]
    )  # fmt: skip
    result = json.loads((tmp_path / "out/preflight.json").read_text())
    assert code == 0 and result["sequences"]["basis"] == "generated" and result["model"]["class"] == "OlmoeForCausalLM"
    assert 12 <= result["sequences"]["scored_tokens"] <= 12 * 12
    speeds = {row["rollout"]: row["model_speedup_over_bf16_at_64_tokens"] for row in result["cost"]}
    assert speeds["bf16"] == 1.0 and all(speed is None for name, speed in speeds.items() if name.startswith("w4a4"))
    assert "H200 rates" in (tmp_path / "out/preflight.md").read_text()


def test_prompt_basis_is_said(checkpoint: Path, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", 64, responses=False)
    assert preflight.main([str(checkpoint), "--prompts", str(prompts), "--out", str(tmp_path), "--gap", "0"]) == 0
    assert "A gap on prompt tokens differs" in (tmp_path / "preflight.md").read_text()


def test_split_never_scores_what_calibrates(prompts: Path, checkpoint: Path) -> None:
    read = read_sequences(prompts, checkpoint, 43, Preflight())
    calibration, scored = split(read, 0.25)
    assert len(calibration.ids) == 16 and len(scored.ids) == 48
    assert sorted(map(tuple, calibration.ids + scored.ids)) == sorted(map(tuple, read.ids))
    assert [len(part.ids) for part in split(read.take([0, 1]), 0.01)] == [1, 1]


def failed(folder: Path, prompts: Path, caplog: pytest.LogCaptureFixture, *more: str) -> str:
    with caplog.at_level(logging.ERROR):
        assert preflight.main([str(folder), "--prompts", str(prompts), *FEW, *more]) == 1
    return caplog.text


def broken(checkpoint: Path, folder: Path) -> Path:
    """A copy whose files may be damaged."""
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_no_folder_and_no_config(tmp_path: Path, prompts: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "no such folder" in failed(tmp_path / "absent", prompts, caplog)
    assert "no config.json" in failed(tmp_path, prompts, caplog)


def change_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_unknown_class_is_named(
    checkpoint: Path, tmp_path: Path, prompts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = broken(checkpoint, tmp_path / "m")
    change_config(folder, architectures=["GptOssForCausalLM"])
    assert "GptOssForCausalLM" in failed(folder, prompts, caplog) and "Qwen3MoeForCausalLM" in caplog.text


def test_quantized_checkpoint(
    checkpoint: Path, tmp_path: Path, prompts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = broken(checkpoint, tmp_path / "m")
    for said in ({"quant_method": "fp8"}, "fp8"):
        change_config(folder, quantization_config=said)
        assert "quantized already (fp8)" in failed(folder, prompts, caplog)


def test_a_config_that_describes_no_model(
    checkpoint: Path, tmp_path: Path, prompts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = broken(checkpoint, tmp_path / "m")
    change_config(folder, hidden_size="x")
    assert "transformers cannot build the model" in failed(folder, prompts, caplog)
    change_config(folder, architectures="Qwen3MoeForCausalLM")
    assert "architectures=Qwen3MoeForCausalLM is not supported" in failed(folder, prompts, caplog)
    (folder / "config.json").write_text("[]")
    assert "expected a JSON object, got list" in failed(folder, prompts, caplog)


def test_missing_shard(checkpoint: Path, tmp_path: Path, prompts: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = broken(checkpoint, tmp_path / "m")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"missing shard(s): {shard.name}" in failed(folder, prompts, caplog)


def test_damaged_shard_and_no_weights(
    checkpoint: Path, tmp_path: Path, prompts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = broken(checkpoint, tmp_path / "m")
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:100])
    assert "is damaged" in failed(folder, prompts, caplog) and shard.name in caplog.text
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    assert "no *.safetensors" in failed(folder, prompts, caplog)


def test_missing_tensor_wrong_shape_extra_tensor(
    tmp_path: Path, prompts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save(tiny_model(), tmp_path / "m")
    file = folder / "model.safetensors"
    whole = load_file(file)
    key = "model.layers.1.mlp.experts.5.up_proj.weight"
    save_file({k: v for k, v in whole.items() if k != key}, file)
    assert key in failed(folder, prompts, caplog) and "not on disk" in caplog.text
    save_file(whole | {key: whole[key][:, :32].contiguous()}, file)
    assert "has shape [32, 32]" in failed(folder, prompts, caplog)
    save_file(whole | {"model.layers.2.input_layernorm.weight": torch.ones(64)}, file)
    assert "does not use, first model.layers.2.input_layernorm.weight" in failed(folder, prompts, caplog)


@pytest.mark.parametrize(
    "key", ["model.layers.1.mlp.experts.5.up_proj.weight", "model.layers.0.self_attn.q_norm.weight", "lm_head.weight"]
)
def test_nan_is_named(key: str, tmp_path: Path, prompts: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(tiny_model(), tmp_path / "m")
    whole = load_file(folder / "model.safetensors")
    whole[key].view(-1)[3] = float("nan")
    save_file(whole, folder / "model.safetensors")
    assert f"{key} is not finite: 1 of" in failed(folder, prompts, caplog)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model.layers.0.self_attn.o_proj.weight", "layer 0 of 2 cannot be run"),
        ("lm_head.weight", "trainer bf16, rollout bf16: non-finite log-probs"),
    ],
)
def test_overflow_is_a_sentence(
    key: str, message: str, tmp_path: Path, prompts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Finite weights whose products are not."""
    folder = save(tiny_model(), tmp_path / "m")
    whole = load_file(folder / "model.safetensors")
    save_file(whole | {key: torch.full_like(whole[key], 3e38)}, folder / "model.safetensors")
    assert message in failed(folder, prompts, caplog, "--out", str(tmp_path / "out"))
    assert "activations overflow" in caplog.text and not (tmp_path / "out").exists()


def test_an_expected_gap_that_is_no_number_is_unknown_on_page_and_figure(
    checkpoint: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 * infinity: a token that the rollout never draws and the trainer excludes."""
    monkeypatch.setattr(head, "_mean", lambda log_prob, value: torch.full(log_prob.shape[:1], torch.nan))
    words = [str(checkpoint), "--prompts", str(prompts), "--out", str(tmp_path), "--k", "0.5", "1", "--gap", "0.05"]
    assert preflight.main([*words, "--strict"]) == 0
    result = json.loads((tmp_path / "preflight.json").read_text())
    assert {(v["verdict"], v["gap"]) for v in result["verdicts"]} == {("unknown", None)}
    assert all("not finite" in v["reason"] for v in result["verdicts"])
    assert "**unknown**" in (tmp_path / "preflight.md").read_text() and "unknown" in capsys.readouterr().out


def test_width_that_is_no_multiple_of_16(tmp_path: Path, prompts: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save(tiny_model(moe_intermediate_size=24), tmp_path / "m")
    assert "K=24" in failed(folder, prompts, caplog) and "mlp.experts.down_proj" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty or blank"),
        ("\n  \n", "empty or blank"),
        ("{not json}\n", "line 1: not valid JSON"),
        ("[1, 2]\n", "expected an object"),
        ('{"question": "x"}\n{"question": "y"}\n', "no tokenizer"),
        ('{"input_ids": [2, 99]}\n{"input_ids": [2, 3]}\n', "token id 99 is outside"),
        ('{"input_ids": "abc"}\n', "lists of integers"),
        ('{"input_ids": 5}\n', "lists of integers"),
        ('{"input_ids": [2], "response_ids": null}\n', "lists of integers"),
        ('{"input_ids": [2, 3]}\n', "at least 2 are needed"),
        ('{"input_ids": [2], "response_ids": [4]}\n{"input_ids": [2, 3]}\n', "row 2 has no response"),
        ('{"prompt": "1+2="}\n{"prompt": "3"}\n', "no tokenizer"),
    ],
)
def test_bad_prompts(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, message: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    assert message in failed(checkpoint, path, caplog)


def test_text_prompts_need_their_field(checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the toy's tokenizer: a field that is no prompt, a blank prompt, and prompts with responses that work."""
    from quads.toy.tokenizer import make_tokenizer

    folder = broken(checkpoint, tmp_path / "m")
    make_tokenizer().save_pretrained(folder)
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "x"}\n')
    assert "row 1: has question; needs a `prompt`" in failed(folder, path, caplog)
    path.write_text('{"prompt": "  "}\n{"prompt": "^3+5="}\n')
    assert "the prompt is blank" in failed(folder, path, caplog)
    path.write_text('{"prompt": "^3+5=", "response": 8}\n')
    assert "response is int 8, expected a text" in failed(folder, path, caplog)
    path.write_text('{"prompt": "^3+5=", "response": "8;"}\n' * 4)
    read = read_sequences(path, folder, 43, Preflight())
    assert read.basis == "response" and read.scored_tokens == 8 and read.start == [4] * 4


def test_a_table_of_prompts_reads_as_its_lines_do(
    checkpoint: Path, prompts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    table = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist(rows), table)
    assert read_sequences(table, checkpoint, 43, Preflight()) == read_sequences(prompts, checkpoint, 43, Preflight())
    pq.write_table(pa.Table.from_pylist([rows[0], {"input_ids": rows[1]["input_ids"]}]), table)
    assert "row 2 has no response, others have" in failed(checkpoint, table, caplog)
    pq.write_table(pa.Table.from_pylist(rows)[:0], table)
    assert "the table has no row" in failed(checkpoint, table, caplog)
    table.write_bytes(b"PAR1")
    assert f"{table}: not a complete parquet file" in failed(checkpoint, table, caplog)


def test_prompts_are_checked_before_the_model_is_rewritten(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "apply_surgery", lambda *_: pytest.fail("surgery came first"))
    assert "no such file" in failed(checkpoint, tmp_path / "absent.jsonl", caplog)


def test_every_option_says_what_it_is() -> None:
    """A field without a description would show as `None (default ...)`."""
    helps = {action.dest: action.help or "" for action in preflight._parser()._actions}
    assert all(len(text.split()) > 3 and not text.startswith("None") for text in helps.values()), helps
    assert ".parquet" in helps["prompts"]


def test_no_prompts_file_and_bad_options(
    checkpoint: Path, prompts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert "no such file" in failed(checkpoint, tmp_path / "absent.jsonl", caplog)
    assert f"{tmp_path}: is a folder; --prompts takes a file: a .jsonl, or a .parquet" in failed(
        checkpoint, tmp_path, caplog
    )
    assert "rac.mask=batch" in failed(checkpoint, prompts, caplog, "--rac-mask", "batch")
    assert "rollouts" in failed(checkpoint, prompts, caplog, "--rollouts", "int4")
    assert (
        "responses already" in failed(checkpoint, prompts, caplog, "--generate", "4")
        or "holds responses" in caplog.text
    )
    if not torch.cuda.is_available():
        assert "no CUDA device" in failed(checkpoint, prompts, caplog, "--device", "cuda")
    for words, why in (
        (("--device", "tpu"), "use cpu, cuda, or cuda:N"),
        (("--device", "cpu:1"), "use cpu, cuda, or cuda:N"),
        (("--device", ""), "use cpu, cuda, or cuda:N"),
        (("--seed", "-1"), "seed: Input should be greater than or equal to 0"),
        (("--seed", str(2**64)), "seed: Input should be less than"),
        (("--gap", "inf"), "gap: Input should be a finite number"),
        (("--out", str(prompts)), "cannot be written"),
    ):
        caplog.clear()
        assert why in failed(checkpoint, prompts, caplog, *words), words


def test_settings_errors_are_config_errors() -> None:
    args = preflight._parser().parse_args(["m", "--prompts", "p", "--k", "0.5", "0.5"])
    with pytest.raises(ConfigError, match="rise strictly"):
        preflight.make_settings(args)
