"""The stage on a train folder: mode and calibration from the run's own files, and errors that say what to do."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_up_results import made_up_arms, made_up_experiment, write_run
from tiny_moe import tiny_model

from quads import export as stage
from quads.exporting import parity

BF16, NAIVE, QUADS = 0, 1, 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture
def train(tmp_path, checkpoint, request):
    """A made-up run whose checkpoint is real; its data has moved since it was launched."""
    results = tmp_path / "results"
    folder, _ = write_run(results, made_up_experiment(), made_up_arms()[getattr(request, "param", QUADS)], 0)
    result = json.loads((folder / "result.json").read_text()) | {"checkpoint": str(checkpoint)}
    (folder / "result.json").write_text(json.dumps(result))
    said = "data.train_files=" + json.dumps("/elsewhere/results/shared/data-abc/train.parquet")
    (folder / "launch.json").write_text(json.dumps({"overrides": ["data.seed=0", said]}))
    data = results / "shared" / "data-abc"
    data.mkdir(parents=True)
    pq.write_table(pa.table({"input_ids": parity.random_sequences(43)}), data / "calibration.parquet")
    return folder


def test_a_run_is_exported_as_its_rollouts_are_and_verified(train, tmp_path, capsys):
    out = tmp_path / "out"
    assert stage.main(["--train", str(train), "--format", "modelopt", "--out", str(out)]) == 0
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_algo"] == "NVFP4" and config["dtype"] == "bfloat16"
    said = json.loads((out / "quads_manifest.json").read_text())
    assert said["export"]["mode"] == "w4a4" and said["run"]["rac"]["k"] == 0.5
    assert said["export"]["static_input_scales"]["from"] == "16 sequences, 256 tokens of data-abc/calibration.parquet"
    report = tmp_path / "report.json"
    assert stage.main(["verify", str(out), "--against", str(train), "--out", str(report)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(report.read_text()) and printed["ok"]
    assert printed["numbers"]["logprob_trainer_max_nats"] <= parity.LIMIT_NATS


@pytest.mark.parametrize(("train", "rac"), [(NAIVE, False), (QUADS, True)], indirect=["train"])
@pytest.mark.parametrize("mode", ["w4a4", "w4a16"])
def test_an_export_that_lacks_the_rollouts_rac_says_so(train, rac, mode, tmp_path, caplog):
    out = tmp_path / "out"
    assert stage.main(["--train", str(train), "--format", "modelopt", "--mode", mode, "--out", str(out)]) == 0
    assert json.loads((out / "quads_manifest.json").read_text())["export"]["rac_left_out"] is rac
    warned = [r.getMessage() for r in caplog.records if r.name == "quads.export" and r.levelname == "WARNING"]
    assert len(warned) == rac
    for said in (f"plain {mode.upper()} weights", "a stock engine serves it without RAC"):
        assert all(said in line for line in warned)


def test_verify_fails_with_the_finding(train, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["--train", str(train), "--format", "compressed-tensors", "--mode", "w4a16", "--out", str(out)]
    assert stage.main(words) == 0
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["ignore"].pop()
    (out / "config.json").write_text(json.dumps(config))
    assert stage.main(["verify", str(out), "--against", str(train), "--no-logprobs"]) == 1
    failed = [f["check"] for f in json.loads(capsys.readouterr().out)["findings"] if not f["ok"]]
    assert failed == ["skip list"]


def test_a_checkpoint_that_is_cut_off_is_a_sentence(train, tmp_path, checkpoint, caplog):
    torn = tmp_path / "torn"
    torn.mkdir()
    for path in checkpoint.iterdir():
        (torn / path.name).write_bytes(path.read_bytes())
    (torn / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes()[:5000])
    (tmp_path / "configs" / "arms").mkdir(parents=True)
    arm = json.loads((train / "result.json").read_text())["run"]["arm"]
    (tmp_path / "configs" / "arms" / "quads.yaml").write_text(json.dumps(arm))
    words = [
        "--checkpoint",
        str(torn),
        "--arm",
        "quads",
        "--configs",
        str(tmp_path / "configs"),
        "--format",
        "modelopt",
    ]
    data = next((tmp_path / "results" / "shared").glob("*/calibration.parquet"))
    for mode in (["--mode", "w4a16"], ["--mode", "w4a4", "--calibration", str(data)]):
        caplog.clear()
        assert stage.main([*words, *mode, "--out", str(tmp_path / "out")]) == 1
        assert f"{torn / 'model.safetensors'}: damaged or cut off" in caplog.text
    assert not (tmp_path / "out").exists()
    caplog.clear()
    out = tmp_path / "made"
    assert stage.main(["--train", str(train), "--format", "modelopt", "--mode", "w4a16", "--out", str(out)]) == 0
    (shard,) = out.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-100])
    assert stage.main(["verify", str(out)]) == 1
    assert f"{shard}: damaged or cut off" in caplog.text


@pytest.mark.parametrize(
    ("name", "drop", "said"),
    [
        ("receipt.json", lambda c: c.pop("model"), "lacks the key(s) model"),
        (
            "receipt.json",
            lambda c: c["config"].pop("scale_group"),
            "lacks what a manifest needs (KeyError('scale_group')",
        ),
        ("result.json", lambda c: c["run"].pop("runtime"), "lacks what a manifest needs (KeyError('runtime')"),
        ("result.json", lambda c: c["run"].pop("arm"), "run.arm is missing"),
    ],
)
def test_incomplete_files_of_a_run_are_a_sentence(train, tmp_path, caplog, name, drop, said):
    content = json.loads((train / name).read_text())
    drop(content)
    (train / name).write_text(json.dumps(content))
    assert stage.main(["--train", str(train), "--format", "modelopt", "--out", str(tmp_path / "out")]) == 1
    assert said in caplog.text and not (tmp_path / "out").exists()


def test_w4a4_without_calibration_tokens_is_an_error(train, tmp_path, caplog):
    (train.parents[2] / "shared" / "data-abc" / "calibration.parquet").unlink()
    assert stage.main(["--train", str(train), "--format", "modelopt", "--out", str(tmp_path / "out")]) == 1
    assert "w4a4 needs calibration tokens; none were found beside the run's data" in caplog.text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("train", [BF16], indirect=True)
def test_an_arm_without_nvfp4_weights_needs_a_mode(train, tmp_path, caplog):
    words = ["--train", str(train), "--format", "compressed-tensors", "--out", str(tmp_path / "out")]
    assert stage.main(words) == 1
    assert "arm bf16 rolls out with bf16 weights" in caplog.text and "--mode w4a16" in caplog.text
    assert stage.main([*words, "--mode", "w4a16"]) == 0


def test_a_checkpoint_that_is_gone_is_named(train, tmp_path, caplog):
    result = json.loads((train / "result.json").read_text()) | {"checkpoint": str(tmp_path / "gone")}
    (train / "result.json").write_text(json.dumps(result))
    assert stage.main(["--train", str(train), "--format", "modelopt", "--out", str(tmp_path / "out")]) == 1
    assert f"checkpoint {tmp_path / 'gone'} is missing" in caplog.text


def test_an_output_folder_that_is_in_use_is_refused_before_anything_is_read(tmp_path, caplog):
    used, file = tmp_path / "used", tmp_path / "file"
    used.mkdir()
    (used / "notes.txt").write_text("mine")
    file.write_text("mine")
    for out, said in ((used, "is not empty"), (file, "is not a folder")):
        # --train does not exist either: the output is what is asked about first
        assert stage.main(["--train", str(tmp_path / "x"), "--format", "modelopt", "--out", str(out)]) == 1
        assert f"{out} {said}; give" in caplog.messages[-1]
    assert [p.name for p in used.iterdir()] == ["notes.txt"]


def test_a_run_that_does_not_exist_is_answered_with_those_that_do(train, tmp_path, caplog):
    def said_of(folder):
        assert stage.main(["--train", str(folder), "--format", "modelopt", "--out", str(tmp_path / "out")]) == 1
        return caplog.messages[-1]

    assert (
        said_of(train.parent / "nope") == f"no folder {train.parent / 'nope'}; known under {train.parent}: {train.name}"
    )
    assert f"(did you mean {train.name}?)" in said_of(train.parent / train.name[:-1])
    assert f"no finished run under {tmp_path / 'results/x/train'}" in said_of(tmp_path / "results/x/train/nope")
    assert "is not a folder; give results/<experiment>/train/<run>" in said_of(train / "result.json")
    assert not (tmp_path / "out").exists()


def test_a_run_that_is_not_finished_is_answered_with_the_rule(train, tmp_path, caplog):
    (train / "result.json").unlink()
    assert stage.main(["--train", str(train), "--format", "modelopt", "--out", str(tmp_path / "out")]) == 1
    assert f"training result {train / 'result.json'}: missing. Rebuild it with: " in caplog.text
