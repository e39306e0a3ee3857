"""Decomposition during training: cadence, the row of a step against sums done by hand, and the file on resume."""

from __future__ import annotations

import pytest
import torch

from quads.diagnostics import during
from quads.diagnostics.decompose import Rungs
from quads.files import read_jsonl


def test_cadence() -> None:
    assert [s for s in range(1, 61) if during.due(s, 20, 60)] == [1, 20, 40, 60]
    assert [s for s in range(1, 8) if during.due(s, 4, 7)] == [1, 4, 7]
    assert [s for s in range(1, 5) if during.due(s, 20, 3)] == [1, 3]
    assert not any(during.due(s, 0, 60) for s in range(1, 61))


def test_row_by_hand() -> None:
    """Two sequences of two and one tokens; the last column is padding with values that must not count."""
    p = torch.tensor([[-1.0, -2.0], [-3.0, 99.0]])
    q = torch.tensor([[-1.5, -2.0], [-3.0, 7.0]])
    r = torch.tensor([[-1.5, -2.25], [-3.0, 8.0]])
    e = torch.tensor([[-1.0, -2.25], [-2.0, torch.nan]])
    mask = torch.tensor([[1, 1], [1, 0]])
    row = during.row(5, Rungs(p, q, r, e), mask)
    assert (row["step"], row["tokens"], row["sequences"]) == (5, 3, 2)
    assert set(during.COLUMNS) <= set(row)
    assert row["delta_weight_mean"] == pytest.approx(-0.5 / 3) and row["delta_weight_max_abs"] == 0.5
    assert row["delta_act_mean"] == pytest.approx(-0.25 / 3)
    assert row["delta_num_mean"] == pytest.approx(1.5 / 3) and row["delta_num_mean_abs"] == pytest.approx(1.5 / 3)
    assert row["total_mean"] == pytest.approx(0.75 / 3) and row["total_mean_abs"] == pytest.approx(1.25 / 3)
    assert sum(row[f"{t}_mean"] for t in ("delta_weight", "delta_act", "delta_num")) == pytest.approx(
        row["total_mean"], abs=1e-15
    )


def test_a_log_prob_that_is_not_finite_stops(tmp_path) -> None:
    p = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="1 of 2 response tokens"):
        during.row(1, Rungs(p, p, p, torch.tensor([[0.0, torch.inf]])), torch.ones(1, 2))


def test_resume_drops_what_will_be_measured_again(tmp_path) -> None:
    during.keep_until(tmp_path, 0)  # nothing there yet
    for step in (1, 20, 40):
        during.append(tmp_path, {"step": step})
    during.keep_until(tmp_path, 20)
    during.append(tmp_path, {"step": 40})
    assert [r["step"] for r in read_jsonl(tmp_path / during.FILE)] == [1, 20, 40]
    during.keep_until(tmp_path, 0)
    assert read_jsonl(tmp_path / during.FILE) == []
