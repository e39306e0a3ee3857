"""The training stage's guards, without verl: lock, stamp, history, receipt, weight comparison."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from quads import train as stage
from quads.config import Collapse, ConfigError, config_hash, load_arm, load_experiment, resolve_run
from quads.diagnostics import during
from quads.diagnostics.collapse import judge
from quads.files import read_jsonl
from quads.integrations.verl.history import _REQUIRED
from quads.integrations.verl.launch import MetricsTail, Milestones, TrainingError
from quads.integrations.verl.overrides import RunPaths
from quads.lifeline import alive, descendants, end_processes

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


def test_the_driver_of_a_killed_attempt_still_holds_the_lock(tmp_path):
    """It may be writing a checkpoint; the next attempt waits until it has ended."""
    with stage.locked(tmp_path) as lock:
        driver = subprocess.Popen(["sleep", "1"], pass_fds=(lock,))
    with pytest.raises(TrainingError, match="in use"), stage.locked(tmp_path):
        pass
    with stage.locked(tmp_path, wait_s=10):
        assert driver.poll() is not None or driver.wait(1) == 0


STUBBORN_CHILD = """
import os, signal, subprocess, time
from quads.integrations.verl.launch import _terminate, descendants, end_processes
signal.signal(signal.SIGTERM, _terminate)
child = subprocess.Popen(["bash", "-c", "trap '' TERM; echo $$; while :; do sleep 0.1; done"])
try:
    time.sleep(60)
finally:
    end_processes(descendants(os.getpid()), grace_s=1.0)
"""


def test_a_second_sigterm_does_not_stop_the_unwinding():
    """The launcher's way out, told twice while it waits for a child that ignores SIGTERM."""
    with subprocess.Popen([sys.executable, "-c", STUBBORN_CHILD], stdout=subprocess.PIPE) as launcher:
        child = int(launcher.stdout.readline())
        before = descendants(launcher.pid)
        assert child in {p.pid for p in before}
        for _ in range(2):
            launcher.terminate()
            time.sleep(0.3)
        assert launcher.wait(10) == 128 + signal.SIGTERM
        left = {p for p in before if alive(p)}
        end_processes(left, grace_s=0.0)
        assert child not in {p.pid for p in left}


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


def test_milestones_are_said_once_and_those_of_an_earlier_attempt_not_at_all(tmp_path):
    (tmp_path / "receipt.json").write_text("{}")
    os.utime(tmp_path / "receipt.json", (1, 1))
    milestones = Milestones(tmp_path)
    assert milestones.read() == []
    (tmp_path / "surgery.json").write_text("{}")
    (said,) = milestones.read()
    assert said.startswith("the trainer's model is loaded") and said.endswith(" s after the start")
    assert milestones.read() == []
    (tmp_path / "receipt.json").write_text("{}")  # this attempt's own
    assert [words.split(",")[0] for words in milestones.read()] == ["the rollout engine has loaded its weights"]


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


BARE = Collapse(window=1, baseline=1, patience=1, noise=0.0, drop=0.9, recover=0.95)
FALL = [0.5, 0.5, 0.5, 0.5, 0.5, 0.1, 0.1, 0.1]


def with_collapse(stop):
    grpo = RUN.grpo.model_copy(update={"steps": len(FALL), "stop_on_collapse": stop})
    return RUN.model_copy(update={"grpo": grpo, "collapse": BARE})


def full_row(step, reward, gap=0.1):
    values = dict.fromkeys(("gap_max", "k3", "clipped_share", "tokens_per_s"), 0.1)
    return {"step": step, "reward": reward, "gap_mean": gap, **values}


def test_collapse_is_logged_once_and_the_history_stays_json(tmp_path, caplog):
    caplog.set_level("INFO")
    path = tmp_path / "history.jsonl"
    progress = stage.Progress(path, with_collapse(False), 0)
    for step, reward in enumerate(FALL, 1):
        progress(full_row(step, reward))
    told = [r.getMessage() for r in caplog.records if "collapsed" in r.getMessage()]
    assert len(told) == 1 and "quads collapsed at step 6: reward 0.100 below 0.9 x 0.500" in told[0]
    again = stage.Progress(path, with_collapse(False), len(FALL))
    assert again.detector.first("collapsed") == 6  # a resumed run knows what was seen
    progress(full_row(9, 0.1, gap=float("inf")))
    assert read_jsonl(path)[-1]["gap_mean"] is None and progress.detector.verdict == "diverged"


def test_only_a_run_that_may_stop_is_stopped():
    verdict = judge([full_row(s, r) for s, r in enumerate(FALL, 1)], BARE)
    assert stage.stopped_at(with_collapse(True), verdict) == 6
    assert stage.stopped_at(with_collapse(False), verdict) is None
    early = judge([full_row(s, r) for s, r in enumerate([0.5] * 8, 1)], BARE)
    assert stage.stopped_at(with_collapse(True), early) is None
    last = judge([full_row(s, r) for s, r in enumerate([0.5] * 7 + [0.1], 1)], BARE)
    assert stage.stopped_at(with_collapse(True), last) is None  # it ended anyway


def test_a_missing_decomposition_is_named(tmp_path):
    run = RUN.model_copy(update={"decompose_every": 2, "grpo": RUN.grpo.model_copy(update={"steps": 5})})
    for step in (1, 4):
        during.append(tmp_path, {"step": step})
    with pytest.raises(TrainingError, match=r"steps \[2, 5\] is missing"):
        stage.check_decomposition(run, tmp_path, 5)
    during.append(tmp_path, {"step": 2})
    assert stage.check_decomposition(run, tmp_path, 4) == "decomposition.jsonl"  # stopped at step 4
    assert stage.check_decomposition(run.model_copy(update={"decompose_every": 0}), tmp_path, 5) is None
    for step in (1, 2):
        during.append_layers(tmp_path, step, [{"layer": "x"}, {"layer": "y"}])
    with pytest.raises(
        TrainingError, match=r"decomposition_layers\.jsonl: the decomposition of steps \[4\] is missing"
    ):
        stage.check_decomposition(run, tmp_path, 4, during.LAYERS_FILE)


def test_detector_settings_move_a_run_only_where_they_may_stop_it():
    other = Collapse(window=3)
    for stop, moves in ((False, False), (True, True)):
        run = with_collapse(stop)
        assert (run.id != run.model_copy(update={"collapse": other}).id) == moves
    assert with_collapse(True).id != with_collapse(False).id
    assert RUN.model_copy(update={"decompose_every": 7}).id != RUN.id
