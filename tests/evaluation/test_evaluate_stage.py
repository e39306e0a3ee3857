"""The evaluation stages without an engine: which mode they ask for, what they refuse, which receipts they accept."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from quads import evaluate, paths, regrade
from quads.config import Arm, Benchmarks, ConfigError, Evaluation, Experiment, load_experiment, resolve_run
from quads.data import build, toy_benchmarks
from quads.evaluation.generations import RecordsError
from quads.evaluation.grading import Grading
from quads.evaluation.lock import locked_folder
from quads.evaluation.problems import prompts, questions
from quads.files import write_json_atomic
from quads.integrations.vllm.generate import EngineError, check_receipt
from quads.toy.tokenizer import make_tokenizer

A4 = {"weight": "nvfp4", "activation": "nvfp4"}


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "model"
    make_tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"made up")
    return folder


@pytest.fixture
def experiment():
    return Experiment(
        name="tiny",
        title="",
        arms=("bf16",),
        evaluation=Evaluation(
            bootstrap=10,
            samples={"chain_code": 2},
            benchmarks=Benchmarks(names=("chain_depth2", "chain_code"), problems=4, code_problems=2),
        ),
    )


@pytest.fixture
def folders(tmp_path, experiment):
    """Data and benchmarks of `experiment`, with few held-out chains."""
    data = experiment.data.model_copy(update={"train_prompts": 4, "eval_prompts": 3, "calibration_prompts": 2})
    build.write(build.build(data), tmp_path / "data")
    rows = toy_benchmarks.build_rows(data, experiment.evaluation.benchmarks)
    build.write(rows, tmp_path / "benchmarks")
    manifest = {"rows": {n: len(r) for n, r in rows.items()}, "sha256": {}}
    write_json_atomic(tmp_path / "benchmarks" / "manifest.json", manifest)
    return tmp_path / "data", tmp_path / "benchmarks", tmp_path / "fetched"


def test_engine_modes_of_an_arm(tmp_path):
    masks = tmp_path / "masks.safetensors"
    masks.write_bytes(b"made up")
    quads = Arm(name="quads", title="", trainer={"weight": "nvfp4"}, rollout={**A4, "rac": {"k": 0.25}})
    own, mode = evaluate.engine_mode("own", quads, masks)
    assert mode == "w4a4+rac" and own["rac_masks"] == str(masks) and own["rac"]["k"] == 0.25
    bf16, mode = evaluate.engine_mode("bf16", quads, masks)
    assert mode == "bf16" and (bf16["weight"], bf16["activation"], bf16["rac"]) == ("bf16", "bf16", None)
    assert bf16["rac_masks"] is None
    dynamic = Arm(name="dynamic", title="", rollout={**A4, "rac": {"k": 0.25, "mask": "token"}})
    assert evaluate.engine_mode("own", dynamic, None)[0]["rac_masks"] is None


@pytest.mark.parametrize("masks", [None, "gone.safetensors"])
def test_static_masks_must_be_there(tmp_path, masks):
    arm = Arm(name="quads", title="", rollout={**A4, "rac": {"k": 0.25}})
    with pytest.raises(ConfigError, match="arm quads needs static RAC masks"):
        evaluate.engine_mode("own", arm, masks and tmp_path / masks)


def test_questions_are_the_held_out_chains_then_the_benchmarks(experiment, folders):
    asked = questions(experiment, *folders)
    assert [q.id for q in asked] == [
        *(f"chain/{i}" for i in range(3)),
        *(f"chain_depth2/{i}" for i in range(4)),
        *(f"chain_code/{i}" for i in range(2)),
    ]
    assert {(q.benchmark, q.grader, q.adapter, q.samples) for q in asked} == {
        ("chain", "chain", None, 4),
        ("chain_depth2", "math", "boxed_last", 4),
        ("chain_code", "code", "print_all", 2),
    }


def test_prompts_are_tokenized_and_decoded_without_losing_marks(experiment, folders, checkpoint):
    asked = questions(experiment, *folders)
    ready, decode = prompts(asked, checkpoint, limit=16)
    assert list(ready) == [q.id for q in asked]
    assert all(len(p.token_ids) == experiment.data.operations + 3 and p.text.startswith("^") for p in ready.values())
    assert len({p.request for p in ready.values()}) == len(asked)
    assert decode([8, 6, 9, 41]) == "869"
    assert decode([8, 6, 9]) == "869"
    # a start mark in the middle must stay visible: without it this wrong answer would read as a right one
    assert decode([8, 42, 6, 9, 41]) == "8^69"
    with pytest.raises(ConfigError, match=r"problem chain/0: 9 prompt tokens, the limit is 8"):
        prompts(asked, checkpoint, limit=8)


def test_benchmarks_that_cannot_be_read_say_so(experiment, folders):
    data, benchmarks, fetched = folders
    wrong = experiment.evaluation.model_copy(update={"samples": {"aime99": 4}})
    with pytest.raises(ConfigError, match=r"evaluation\.samples names \['aime99'\]"):
        questions(experiment.model_copy(update={"evaluation": wrong}), *folders)
    write_json_atomic(benchmarks / "manifest.json", {"rows": {"chain_depth2": 5}, "sha256": {}})
    with pytest.raises(ConfigError, match="holds 4 rows, the manifest says"):
        questions(experiment, data, benchmarks, fetched)


def test_checkpoint_identity_follows_weights_and_masks(tmp_path, checkpoint):
    masks = tmp_path / "masks.safetensors"
    masks.write_bytes(b"a")
    seen = {evaluate.checkpoint_hash(checkpoint, None), evaluate.checkpoint_hash(checkpoint, masks)}
    masks.write_bytes(b"b")
    seen.add(evaluate.checkpoint_hash(checkpoint, masks))
    (checkpoint / "model.safetensors").write_bytes(b"other")
    seen.add(evaluate.checkpoint_hash(checkpoint, masks))
    assert len(seen) == 4
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds no \.safetensors"):
        evaluate.checkpoint_hash(checkpoint, None)


def test_a_training_result_of_another_run_is_refused(tmp_path, experiment):
    arm = Arm(name="bf16", title="")
    wrong = {"run_id": resolve_run(experiment, arm, 1).id, "checkpoint": "x", "rac_masks": None}
    (tmp_path / "result.json").write_text(json.dumps(wrong))
    names = ("data", "benchmarks", "fetched", "train", "cache", "out")
    places = argparse.Namespace(**dict.fromkeys(names, tmp_path), shard=None)
    with pytest.raises(ConfigError, match="is of run 'bf16-seed1"):
        evaluate.Job(experiment, arm, 0, places).run()


def test_grading_again_under_other_settings_is_refused(tmp_path, caplog):
    (tmp_path / "tiny.yaml").write_text("name: tiny\ntitle: Tiny\narms: [bf16]\n")
    write_json_atomic(tmp_path / "generation.json", {"eval_hash": "0123456789", "engines": {}})
    args = ["--experiment", str(tmp_path / "tiny.yaml")]
    for name in ("data", "benchmarks", "cache", "out"):
        args += [f"--{name}", str(tmp_path)]
    assert regrade.main(args) == 1
    assert "was generated under evaluation settings 0123456789" in caplog.text


@pytest.mark.parametrize("stage", [evaluate, regrade])
def test_the_verdict_cache_is_closed_after_an_error_too(tmp_path, monkeypatch, caplog, stage):
    def fail(*_):
        raise RecordsError("made to fail")

    closed = []
    monkeypatch.setattr(Grading, "close", lambda grading: closed.append(grading.cache))
    monkeypatch.setattr(stage, "watch_parents", lambda: None)
    monkeypatch.setattr(evaluate.Job, "run", fail)
    monkeypatch.setattr(regrade, "questions", fail)
    configs = Path(evaluate.__file__).parents[1] / "configs"
    eval_hash = paths.eval_hash(load_experiment("toy", configs=configs))
    write_json_atomic(tmp_path / "generation.json", {"eval_hash": eval_hash, "engines": {}})
    args = ["--experiment", str(configs / "toy.yaml")]
    args += ["--arm", "bf16", "--seed", "0", "--train", str(tmp_path)] if stage is evaluate else []
    for name in ("data", "benchmarks", "out"):
        args += [f"--{name}", str(tmp_path)]
    args += ["--cache", str(tmp_path / "cache")]
    assert stage.main(args) == 1 and "made to fail" in caplog.text
    assert closed == [tmp_path / "cache" / "verdicts"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no receipt at .*without the quads plugin.*vllm.general_plugins"),
        ("{", "is damaged"),
        ('{"mode": "bf16", "modules": [1]}', "serves mode 'bf16', asked for 'w4a4'"),
        ('{"mode": "w4a4", "modules": []}', "lists no module"),
    ],
)
def test_a_receipt_that_proves_nothing_stops(tmp_path, content, said):
    path = tmp_path / "receipt.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(EngineError, match=said):
        check_receipt(path, "w4a4")


def test_a_cache_in_the_place_of_the_results_is_no_second_evaluation(tmp_path, capsys):
    words = ["--experiment", "toy.yaml", "--arm", "bf16", "--seed", "0", "--train", "t", "--data", "d"]
    words += ["--benchmarks", "b", "--cache", str(tmp_path / "x" / ".." / "out"), "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        evaluate.main(words)
    assert "is --out itself" in capsys.readouterr().err


def test_two_evaluations_of_one_folder_are_refused_but_not_two_shards(tmp_path):
    with locked_folder(tmp_path), pytest.raises(RecordsError, match="in use by another evaluation"):
        with locked_folder(tmp_path):
            pass
    with locked_folder(tmp_path, "shard-0-of-2"), locked_folder(tmp_path, "shard-1-of-2"):
        pass


@pytest.mark.parametrize("stage", ["evaluate", "regrade", "make_benchmarks"])
def test_the_stages_import_neither_torch_nor_vllm_before_they_set_their_environment(stage):
    code = f"import sys, quads.{stage}; print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
