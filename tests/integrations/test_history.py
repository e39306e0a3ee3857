"""verl log records -> history rows, and the merge of attempts."""

import pytest

from quads.integrations.verl.history import _REQUIRED, history_row, merge


def record(step: int, **extra: float) -> dict:
    return {"step": step, "data": {verl: float(i) for i, verl in enumerate(_REQUIRED.values())} | extra}


def test_row_holds_every_metric_under_its_own_name():
    row = history_row(record(3))
    assert row["step"] == 3
    assert {k: row[k] for k in _REQUIRED} == {ours: float(i) for i, ours in enumerate(_REQUIRED)}
    assert "eval_accuracy" not in row


def test_initial_validation_is_step_zero():
    row = history_row({"step": 0, "data": {"val-core/chain/acc/mean@1": 0.5}})
    assert row == {"step": 0, "eval_accuracy": 0.5}


def test_a_missing_metric_is_named():
    broken = record(2)
    del broken["data"]["actor/quads/gap_max"]
    with pytest.raises(KeyError, match="actor/quads/gap_max"):
        history_row(broken)


def test_resumed_steps_replace_the_lost_ones():
    first = [{"step": 0, "eval_accuracy": 0.5}, {"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2}]
    second = [{"step": 1, "eval_accuracy": 0.6}, {"step": 2, "reward": 0.25}]
    assert merge(first + second) == [first[0], first[1], second[1]]
