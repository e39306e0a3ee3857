"""What the benchmark of GRPO steps changes and reports; the steps themselves run in the training tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quads.bench import real_train
from quads.config import ConfigError, load_arm, load_experiment, resolve_run
from quads.integrations.verl.overrides import RunPaths, verl_overrides

RUN = resolve_run(load_experiment("real_size"), load_arm("quads"), 0)


def test_runtime_settings_and_verl_words_are_told_apart() -> None:
    run, rest = real_train.with_runtime(RUN, ["runtime.gpus_per_node=4", "trainer.balance_batch=True"])
    assert run.runtime.gpus_per_node == 4 and rest == ["trainer.balance_batch=True"]
    assert real_train.with_runtime(RUN, [])[0] is RUN


@pytest.mark.parametrize(
    ("word", "why"), [("runtime.gpus=4", "runtime has no gpus; known: device"), ("runtime.threads=0", "greater than 0")]
)
def test_bad_settings_are_named(word: str, why: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=why):
        real_train.with_runtime(RUN, [word])


@pytest.mark.stack
def test_the_words_are_verls(tmp_path: Path) -> None:
    from quads.integrations.verl.main import compose

    words = [*verl_overrides(RUN, RunPaths(*[tmp_path] * 5)), *real_train.words(3, compare=False)]
    trainer = compose(words).trainer
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
