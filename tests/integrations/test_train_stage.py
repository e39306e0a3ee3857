"""The training stage's guards, without verl: lock, stamp, history, receipt, weight comparison."""

import json

import pytest

from quads import train as stage
from quads.config import load_arm, load_experiment, resolve_run
from quads.integrations.verl.launch import MetricsTail, TrainingError

RUN = resolve_run(load_experiment("smoke"), load_arm("quads"), 0)


def test_checkpoints_of_other_code_are_moved_aside_not_deleted(tmp_path):
    assert stage.claim_checkpoints(RUN, "code-a", tmp_path) == 0
    (tmp_path / "global_step_2").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert stage.claim_checkpoints(RUN, "code-a", tmp_path) == 2
    assert stage.claim_checkpoints(RUN, "code-b", tmp_path) == 0
    assert len(list(tmp_path.glob("stale-*/global_step_2"))) == 1
    assert not (tmp_path / "global_step_2").exists()


def test_a_second_trainer_of_the_same_run_is_refused(tmp_path):
    with stage.locked(tmp_path), pytest.raises(TrainingError, match="in use"), stage.locked(tmp_path):
        pass


def test_missing_steps_are_named(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text("".join(json.dumps({"step": s, "reward": 0.5}) + "\n" for s in (0, 1, 3)))
    with pytest.raises(TrainingError, match=r"steps \[2\] are missing"):
        stage.check_history(path, 3)


def test_missing_plugin_and_wrong_mode_stop_the_run(tmp_path):
    with pytest.raises(TrainingError, match="plugin `quads` was not loaded"):
        stage.check_receipt(RUN, tmp_path / "receipt.json")
    (tmp_path / "receipt.json").write_text(json.dumps({"mode": "bf16"}))
    with pytest.raises(TrainingError, match=r"'bf16', the arm asks for 'w4a4\+rac'"):
        stage.check_receipt(RUN, tmp_path / "receipt.json")


def test_different_weights_stop_a_qat_arm_only(tmp_path):
    path = tmp_path / "delta_weight.json"
    path.write_text(json.dumps({"elements": 10, "different": 1, "max_abs": 0.5}))
    with pytest.raises(TrainingError, match="1 of 10 weights differ"):
        stage.check_delta_weight(RUN, path)
    naive = resolve_run(load_experiment("smoke"), load_arm("nvfp4_naive"), 0)
    assert stage.check_delta_weight(naive, path)["different"] == 1


def test_tail_waits_for_a_whole_line(tmp_path):
    path = tmp_path / "m.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    path.write_bytes(b'{"step": 1}\n{"ste')
    assert tail.read() == [{"step": 1}]
    with path.open("ab") as file:
        file.write(b'p": 2}\n')
    assert tail.read() == [{"step": 2}]
