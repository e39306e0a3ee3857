"""What the benchmark of GRPO steps changes and reports; the steps themselves run in the training tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quads.bench import real_train
from quads.config import ConfigError, load_arm, load_experiment, resolve_run
from quads.diagnostics import during
from quads.integrations.verl.launch import TrainingError
from quads.integrations.verl.overrides import RunPaths, verl_overrides
from quads.layers.setup import Precision
from quads.layers.surgery import SurgeryReport

RUN = resolve_run(load_experiment("real_size"), load_arm("quads"), 0)


def test_runtime_settings_and_verl_words_are_told_apart() -> None:
    runtime, rest = real_train.with_runtime(RUN.runtime, ["runtime.gpus_per_node=4", "trainer.balance_batch=True"])
    assert runtime.gpus_per_node == 4 and rest == ["trainer.balance_batch=True"]
    assert real_train.with_runtime(RUN.runtime, [])[0] == RUN.runtime


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("runtime.gpus=4", "runtime has no gpus; known: device"),
        ("runtime.threads=0", "greater than 0"),
        ("runtime.threads=[1", "is no YAML value"),
    ],
)
def test_bad_settings_are_named(word: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        real_train.with_runtime(RUN.runtime, [word])


@pytest.mark.stack
def test_the_words_are_verls(tmp_path: Path) -> None:
    from quads.integrations.verl.main import compose

    words = [*verl_overrides(RUN, RunPaths(*[tmp_path] * 5)), *real_train.words(3, compare=False, profile=2)]
    config = compose(words)
    assert config.actor_rollout_ref.quads.profile_update == 2
    trainer = config.trainer
    assert (trainer.total_training_steps, trainer.save_freq, trainer.val_before_train) == (3, -1, False)
    assert trainer.v1.quads_sync.compare_weights is False


def test_medians_leave_the_first_step_out(tmp_path: Path) -> None:
    rows = [
        {"step": 0, "data": {"val-core/acc": 1.0}},
        *(
            {"step": s, "data": {"timing_s/step": t, "perf/x": t, "who": "text"}}
            for s, t in ((1, 90.0), (2, 5.0), (3, 7.0))
        ),
    ]
    (tmp_path / "verl_metrics.1.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    steps = real_train.measured(tmp_path)
    assert [s["step"] for s in steps] == [1, 2, 3] and "who" not in steps[0]
    assert real_train.medians(steps) == {"timing_s/step": 6.0, "perf/x": 6.0}
    assert real_train.medians(steps[:1])["timing_s/step"] == 90.0
    assert real_train.medians(steps, profiled=3)["timing_s/step"] == 5.0
    assert real_train.medians(steps[:2], profiled=2)["timing_s/step"] == 5.0  # and not with the first step's 90


def folders(tmp_path: Path) -> list[str]:
    """Arguments with folders that look finished."""
    for name in ("model", "data"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    return ["--experiment", "configs/real_size.yaml", "--arm", "quads", "--model", str(tmp_path / "model"), "--data",
            str(tmp_path / "data"), "--out", str(tmp_path / "out" / "quads.json")]  # fmt: skip


@pytest.mark.parametrize(("ending", "code"), [(None, 0), (TrainingError("engine died"), 1), (SystemExit(143), 1)])
def test_what_was_measured_is_kept_however_it_ends(tmp_path, monkeypatch, ending, code) -> None:
    def driver(run, paths, on_row, lock, more):
        assert "trainer.resume_mode=disable" in more and "trainer.save_freq=-1" in more
        record = {"step": 1, "data": {"timing_s/step": 3.0}}
        (paths.out / "verl_metrics.1.jsonl").write_text(json.dumps(record) + "\n")
        during.append_layers(paths.out, 1, [{"layer": "x", "total_mean": 0.5}])
        (paths.out / "train.log").write_text("log")
        (paths.out / "surgery.json").write_text(SurgeryReport(Precision(), []).to_json())
        if ending is not None:
            raise ending

    monkeypatch.setattr(real_train, "run_driver", driver)
    monkeypatch.setattr(real_train, "watch_parents", lambda: None)
    assert real_train.main([*folders(tmp_path), "--steps", "1"]) == code
    found = json.loads((tmp_path / "out" / "quads.json").read_text())
    assert found["decomposition_layers"] == [{"step": 1, "layer": "x", "total_mean": 0.5}]
    assert found["decomposition"] == [] and found["surgery"] == {"quantized": 0, "skipped": 0}
    assert [s["timing_s/step"] for s in found["steps"]] == [3.0] and bool(found["failed"]) == (code == 1)
    assert (tmp_path / "out" / "quads.log").read_text() == "log"


def test_fewer_steps_than_planned_is_a_failure_and_bad_input_starts_nothing(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(real_train, "watch_parents", lambda: None)
    monkeypatch.setattr(real_train, "run_driver", lambda *args: None)
    arguments = folders(tmp_path)
    assert real_train.main([*arguments, "--steps", "2"]) == 1
    monkeypatch.setattr(real_train, "run_driver", lambda *args: pytest.fail("started"))
    assert real_train.main([*arguments, "--steps", "0"]) == 1 and "at least one step" in caplog.text
    assert real_train.main([*arguments, "--profile", "9"]) == 1 and "--profile 9: there are steps 1 to" in caplog.text
    cpu = [*arguments, "--profile", "1", "--experiment", "configs/toy.yaml"]
    assert real_train.main(cpu) == 1 and "runtime.device is cpu" in caplog.text
    assert real_train.main([*arguments, "--out", str(tmp_path)]) == 1 and "it is a folder" in caplog.text
    (tmp_path / "data" / "manifest.json").unlink()
    assert real_train.main(arguments) == 1 and "quads.prepare" in caplog.text
    (tmp_path / "data" / "manifest.json").write_text("{}")
    arguments[arguments.index("quads")] = "fp8"
    words = ["--set", "runtime.rollout_graphs=true", "runtime.rollout_backend=reference"]
    assert real_train.main([*arguments, *words]) == 1 and "another rollout_backend than reference" in caplog.text
