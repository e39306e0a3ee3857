"""The evaluation stage without an engine: which mode it asks for, what it refuses, and the receipt it insists on."""

import json
import subprocess
import sys

import pytest

from quads import evaluate
from quads.config import Arm, ConfigError, Evaluation, Experiment, resolve_run
from quads.data import build
from quads.evaluation.records import RecordsError
from quads.integrations.vllm.generate import EngineError, check_receipt
from quads.toy.tokenizer import make_tokenizer

A4 = {"weight": "nvfp4", "activation": "nvfp4"}


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "model"
    make_tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"made up")
    return folder


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


def test_problems_are_tokenized_and_decoded_without_losing_marks(tmp_path, checkpoint):
    experiment = Experiment(name="tiny", title="", arms=("bf16",))
    data = experiment.data.model_copy(update={"train_prompts": 4, "eval_prompts": 3, "calibration_prompts": 2})
    build.write(build.build(data), tmp_path / "data")
    problems, decode = evaluate.load_problems(tmp_path / "data" / "eval.parquet", checkpoint, max_prompt_tokens=16)
    assert len(problems) == 3
    assert all(len(p.token_ids) == data.operations + 3 and p.text.startswith("^") for p in problems)
    assert all(len(p.ground_truth) == data.operations for p in problems)
    assert decode([8, 6, 9, 41]) == "869"
    assert decode([8, 6, 9]) == "869"
    # a start mark in the middle must stay visible: without it this wrong answer would read as a right one
    assert decode([8, 42, 6, 9, 41]) == "8^69"
    with pytest.raises(ConfigError, match=r"problem 0: 9 prompt tokens, grpo\.max_prompt_tokens is 8"):
        evaluate.load_problems(tmp_path / "data" / "eval.parquet", checkpoint, max_prompt_tokens=8)


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


def test_a_training_result_of_another_run_is_refused(tmp_path):
    experiment = Experiment(name="tiny", title="", arms=("bf16",), evaluation=Evaluation(bootstrap=10))
    arm = Arm(name="bf16", title="")
    wrong = {"run_id": resolve_run(experiment, arm, 1).id, "checkpoint": "x", "rac_masks": None}
    (tmp_path / "result.json").write_text(json.dumps(wrong))
    with pytest.raises(ConfigError, match="is of run 'bf16-seed1"):
        evaluate.evaluate(experiment, arm, 0, data=tmp_path, train=tmp_path, out=tmp_path / "out")


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


def test_two_evaluations_of_one_folder_are_refused(tmp_path):
    with evaluate.locked(tmp_path), pytest.raises(RecordsError, match="in use by another evaluation"):
        with evaluate.locked(tmp_path):
            pass
    with evaluate.locked(tmp_path):
        pass


def test_the_stage_imports_neither_torch_nor_vllm_before_it_sets_their_environment():
    code = "import sys, quads.evaluate; print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
