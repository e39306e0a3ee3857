"""The training stage's guards, without verl: lock, stamp, history, receipt, weight comparison."""

import json

import pytest

from quads import train as stage
from quads.config import ConfigError, config_hash, load_arm, load_experiment, resolve_run
from quads.files import read_jsonl
from quads.integrations.verl.history import _REQUIRED
from quads.integrations.verl.launch import MetricsTail, TrainingError
from quads.integrations.verl.overrides import RunPaths

RUN = resolve_run(load_experiment("smoke"), load_arm("quads"), 0)


def make_checkpoint(folder):
    actor = folder / "actor"
    (actor / "huggingface").mkdir(parents=True)
    names = [f"actor/{s}_world_size_1_rank_0.pt" for s in ("model", "optim", "extra_state")]
    for name in [*names, "data.pt", "actor/huggingface/model.safetensors", "actor/huggingface/config.json"]:
        (folder / name).write_text("x")


def test_a_second_trainer_of_the_same_run_is_refused(tmp_path):
    with stage.locked(tmp_path), pytest.raises(TrainingError, match="in use"), stage.locked(tmp_path):
        pass


def test_missing_steps_are_named(tmp_path):
    path = tmp_path / "history.jsonl"
    rows = [{"step": 0}, {"step": 1, "reward": 0.5}, {"step": 2, "eval_accuracy": 0.5}, {"step": 3, "reward": 0.5}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
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


def test_a_missing_weight_comparison_stops_the_run(tmp_path):
    with pytest.raises(TrainingError, match="were not compared"):
        stage.check_delta_weight(RUN, tmp_path / "delta_weight.json")


def test_history_is_rebuilt_from_all_attempts_and_old_reports_go(tmp_path):
    paths = RunPaths(*(tmp_path / n for n in ("data", "model", "ckpt", "out", "ray")))
    paths.out.mkdir()
    paths.checkpoints.mkdir()
    records = [{"step": s, "data": {v: 0.5 for v in _REQUIRED.values()}} for s in (1, 2, 3)]
    text = "".join(json.dumps(r) + "\n" for r in [{"step": 0, "data": {"val-core/chain/acc/mean@1": 0.5}}, *records])
    (paths.out / "verl_metrics.1.jsonl").write_text(text + '{"step": 4, "da')
    (paths.out / "delta_weight.json").write_text('{"different": 0}')
    make_checkpoint(paths.checkpoints / "global_step_2")
    make_checkpoint(paths.checkpoints / "global_step_4")  # its metrics were never logged
    (paths.checkpoints / "stamp.json").write_text(json.dumps({"config_hash": config_hash(RUN), "code_hash": "c"}))
    assert stage.start_history(RUN, "c", paths) == 2
    assert [r["step"] for r in read_jsonl(paths.out / "history.jsonl", ["step"])] == [0, 1, 2]
    assert not (paths.out / "delta_weight.json").exists()
    assert stage.start_history(RUN, "other code", paths) == 0
    assert (paths.out / "history.jsonl").read_text() == ""
    assert list(paths.out.glob("verl_metrics.*.jsonl")) == []


def test_data_of_another_experiment_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"config_hash": "other"}))
    with pytest.raises(ConfigError, match="config hash other, this run needs abc"):
        stage.check_made_for(tmp_path, "abc")
    (tmp_path / "manifest.json").write_text(json.dumps({"config_hash": "abc"}))
    stage.check_made_for(tmp_path, "abc")


def test_metrics_of_other_code_do_not_stop_every_retry(tmp_path):
    (tmp_path / "verl_metrics.1.jsonl").write_text(json.dumps({"step": 1, "data": {"timing_s/step": 1.0}}) + "\n")
    assert stage.logged_rows(tmp_path) == []
