"""Figures of the studies: nearly empty bins, a single run without a start."""

from __future__ import annotations

from quads.diagnostics import figures, figures_arms


def test_bins_of_a_few_tokens_are_left_out() -> None:
    rows = [{"bin": i, "tokens": n} for i, n in enumerate((256, 250, 13, 12, 2))]
    assert [r["bin"] for r in figures.filled(rows)] == [0, 1, 2]
    assert figures.filled([]) == []


def test_a_run_alone_has_no_empty_place_for_the_start_and_room_for_its_legend() -> None:
    row = {"engine": "own", "arm": "quads", "mean_token_abs_total": 0.0125, "mean_token_abs_delta_weight": 0.0,
           "mean_token_abs_delta_act": 0.0157, "mean_token_abs_delta_num": 0.0074}  # fmt: skip
    left, right = figures_arms.trained([row], []).axes
    assert [t.get_text() for t in left.get_legend().get_texts()] == ["after training"]
    for ax in (left, right):
        low, high = ax.get_xlim()
        (x0, x1), top = ax.patches[0].get_bbox().intervalx, max(bar.get_height() for bar in ax.patches)
        assert low < x0 and x1 < high and ax.get_ylim()[1] > 1.9 * top
    start = [{"arm": "quads", "level": "total", "mean_token_abs": 0.05}]
    left, _ = figures_arms.trained([row], start).axes
    assert [t.get_text() for t in left.get_legend().get_texts()] == ["warm checkpoint", "after training"]
