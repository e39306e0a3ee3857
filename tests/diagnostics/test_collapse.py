"""The collapse detector on made-up curves: what must alarm, when, and what must not."""

from __future__ import annotations

import csv
import json
import math
import random
from pathlib import Path

import pytest

from quads.config import Collapse
from quads.diagnostics.collapse import STOPPING, Detector, judge, judge_series

STEPS = 150
FLAT_GAP = [0.1] * STEPS


def noisy(curve: list[float], seed: int, sigma: float = 0.05) -> list[float]:
    draw = random.Random(seed)
    return [min(1.0, max(0.0, value + draw.gauss(0, sigma))) for value in curve]


def learning(steps: int = STEPS) -> list[float]:
    """0.4 -> 0.9, saturating."""
    return [0.9 - 0.5 * math.exp(-t / 25) for t in range(steps)]


def collapse(at: int = 80, low: float = 0.2, over: int = 30) -> list[float]:
    """Learns until `at`, then falls to `low` within `over` steps and stays there."""
    top = learning()[at]
    return [r if t < at else max(low, top - (top - low) * (t - at) / over) for t, r in enumerate(learning())]


@pytest.mark.parametrize("seed", range(20))
def test_noisy_learning_is_healthy(seed: int) -> None:
    assert judge_series(noisy(learning(), seed), FLAT_GAP).alarms == []


def test_noise_around_a_constant_rarely_alarms() -> None:
    """0.3 with noise 0.05 for 150 steps: single steps lie far below the peak. At most 2 of 50 runs may alarm."""
    alarmed = [
        seed
        for seed in range(50)
        if judge_series(noisy([0.3] * STEPS, seed), noisy([0.1] * STEPS, seed + 100, sigma=0.02)).alarms
    ]
    assert len(alarmed) <= 2, alarmed


@pytest.mark.parametrize("seed", range(20))
def test_collapse_is_found_where_it_happens(seed: int) -> None:
    found = judge_series(noisy(collapse(at=80), seed), FLAT_GAP)
    assert found.verdict == "collapsed"
    # 0.88 x 0.75 is crossed ten steps after the fall begins; half a window and patience add another ten.
    assert 85 <= found.first("collapsed") <= 110


def halving(seed: int, sigma: float, lost: float = 0.5) -> list[float]:
    """0.36 for 20 steps, then over 20 steps down by `lost`, then 20 steps there; noise of a third of it hides it."""
    return noisy([0.36 * (1 - lost * min(1.0, max(0.0, (t - 20) / 20))) for t in range(60)], seed, sigma)


def test_a_reward_that_halves_under_noise_of_a_third_of_it_collapses() -> None:
    """A fall of 1.5 sigma of a single step, which the short median seldom shows for seven steps in a row."""
    found = [judge_series(halving(seed, 0.12), FLAT_GAP[:60]).verdict for seed in range(40)]
    assert found.count("collapsed") >= 36, found


def test_flat_rewards_with_that_noise_rarely_alarm() -> None:
    """The other side of the test above: over 60 steps at most 4 of 40 flat runs."""
    found = [judge_series(halving(seed, 0.12, lost=0.0), FLAT_GAP[:60]).verdict for seed in range(40)]
    assert found.count("collapsed") <= 4, found


def test_a_fall_that_is_over_is_not_reported_from_the_longer_mean() -> None:
    """A dip of six steps: too short for the medians' patience, still inside the mean when the reward is back."""
    rewards = [0.8] * 40 + [0.0] * 6 + [0.8] * 30
    assert judge_series(rewards, [0.1] * len(rewards)).alarms == []


def test_slow_decline_is_a_collapse() -> None:
    """0.8 -> 0.4 over 150 steps, 0.003 a step: no single difference is visible in noise of 0.05."""
    curve = noisy([0.8 - 0.4 * t / STEPS for t in range(STEPS)], 3)
    assert judge_series(curve, FLAT_GAP).verdict == "collapsed"


def test_slow_gap_growth_alarms_against_the_fixed_baseline() -> None:
    """1 % a step: within any window of 10 the gap grows by 10 %, over the run by 4.4 times."""
    gaps = [0.05 * 1.01**t for t in range(STEPS)]
    found = judge_series(noisy(learning(), 1), gaps)
    assert found.verdict == "gap_growing"
    # the median of the first ten is 0.05 x 1.01^4.5; doubled at t = 4.5 + 69.7, then window and patience
    assert 75 <= found.first("gap_growing") <= 90
    moving = [gaps[t] / (sum(gaps[t - 10 : t]) / 10) for t in range(10, STEPS)]
    assert max(moving) < 1.2, "a moving baseline would not have seen this curve: the test is about that"


@pytest.mark.parametrize("width", [1, 2])
def test_spikes_do_not_alarm(width: int) -> None:
    rewards, gaps = learning(), list(FLAT_GAP)
    for at in range(20, STEPS - 5, 12):
        rewards[at : at + width] = [0.0] * width
        gaps[at : at + width] = [50.0] * width
    assert judge_series(rewards, gaps).alarms == []


def test_without_median_and_patience_the_spikes_do_alarm() -> None:
    """The spikes above are large enough to matter: the test fails when the protection is taken away."""
    rewards, gaps = learning(), list(FLAT_GAP)
    rewards[60], gaps[60] = 0.0, 50.0
    bare = Collapse(window=1, patience=1, noise=0.0)
    assert judge_series(rewards, gaps, bare).first("collapsed") == 61


def test_recovery_and_second_collapse() -> None:
    dip = collapse(at=60, over=10)[:95] + [0.85] * 30
    found = judge_series(noisy(dip, 5, 0.02), FLAT_GAP[: len(dip)])
    assert found.verdict == "recovered"
    assert [a.kind for a in found.alarms] == ["collapsed", "recovered"]
    again = judge_series(noisy([*dip, *[0.2] * 30], 5, 0.02), [0.1] * (len(dip) + 30))
    assert [a.kind for a in again.alarms] == ["collapsed", "recovered", "collapsed"]
    assert again.verdict == "collapsed"


def test_alarm_says_since_when() -> None:
    s = Collapse(window=1, patience=5, noise=0.0)
    rewards = [0.8] * 20 + [0.1] * 10
    (alarm,) = judge_series(rewards, [0.1] * 30, s).alarms
    assert (alarm.since, alarm.step) == (21, 25)


@pytest.mark.parametrize(("reward", "gap"), [(math.nan, 0.1), (0.5, math.inf), (0.5, None)])
def test_not_finite_diverges_at_once_and_for_good(reward: float, gap: float | None) -> None:
    rows = [{"step": t, "reward": 0.5, "gap_mean": 0.1} for t in range(1, 30)]
    rows[9] = {"step": 10, "reward": reward, "gap_mean": gap}
    found = judge(rows)
    assert found.verdict == "diverged" and found.first("diverged") == 10 and len(found.alarms) == 1


def test_gap_alarm_ends_and_starts_again() -> None:
    gaps = [0.1] * 20 + [0.5] * 20 + [0.1] * 20 + [0.5] * 20
    found = judge_series([0.5] * 80, gaps)
    assert [a.kind for a in found.alarms] == ["gap_growing", "gap_growing"]
    assert judge_series([0.5] * 60, gaps[:60]).verdict == "healthy"


def test_few_steps_judge_nothing() -> None:
    assert judge_series([0.9, 0.0, 0.0], [0.1, 9.0, 9.0]).verdict == "healthy"


def test_rows_without_reward_are_passed_over() -> None:
    rows = [{"step": 0, "eval_accuracy": 0.5}, {"step": 1, "reward": 0.4, "gap_mean": 0.1}]
    found = judge(rows)
    assert found.to_dict()["steps"] == 1 and json.dumps(found.to_dict())


def test_step_by_step_equals_the_whole_series() -> None:
    rewards, gaps = noisy(collapse(), 7), [0.05 * 1.01**t for t in range(STEPS)]
    online = Detector()
    raised = [a for t, (r, g) in enumerate(zip(rewards, gaps, strict=True), 1) if (a := online.update(t, r, g))]
    assert raised == online.alarms == judge_series(rewards, gaps).alarms


def test_settings_must_be_ordered() -> None:
    with pytest.raises(ValueError, match=r"recover=0\.5 must exceed"):
        Collapse(recover=0.5)


def test_words_for_a_table() -> None:
    bare = Collapse(window=1, patience=5, noise=0.0, baseline=3)
    fall, back = [0.8] * 20 + [0.1] * 10, [0.8] * 10
    assert judge_series(fall, [0.1] * 30, bare).words == "collapsed at step 25"
    recovered = judge_series(fall + back, [0.1] * 40, bare)
    assert recovered.words == "recovered at step 35 from a collapse at step 25"
    assert judge_series([0.8] * 30, [0.1] * 20 + [0.5] * 10, bare).words == "gap alarm since step 25"
    assert judge_series([0.8] * 30, [0.1] * 30, bare).words == "healthy"
    assert judge_series([0.8, math.nan], [0.1, 0.1], bare).words == "diverged at step 2"


def test_first_and_kind_at() -> None:
    bare = Collapse(window=1, patience=5, noise=0.0)
    found = judge_series([0.8] * 20 + [0.1] * 10, [0.1] * 30, bare)
    assert found.first(*STOPPING) == 25 and found.first("diverged") is None and found.kind_at(25) == "collapsed"
    with pytest.raises(ValueError, match=r"no alarm at step 24; alarms at \[25\]"):
        found.kind_at(24)


RECORDED = Path(__file__).resolve().parents[2] / "docs/measured"


@pytest.mark.parametrize(
    ("folder", "collapsed"),
    [
        ("toy", {"nvfp4_naive/0": 33, "nvfp4_naive/1": 45, "nvfp4_naive/2": 47}),
        ("toy_3seeds", {"nvfp4_naive/0": 36, "nvfp4_naive/1": 36, "nvfp4_naive/2": 27}),
        ("toy_gpu", {"nvfp4_naive/0": 53, "nvfp4_naive/1": 53, "nvfp4_naive/2": 46, "qat_only/1": 42}),
        ("toy_gpu_more", {"rac_only/2": 48}),
        ("toy_s1", {}),
        ("toy_s8", {}),
    ],
)
def test_recorded_training_curves_give_the_documented_verdicts(folder: str, collapsed: dict[str, int]) -> None:
    """docs/diagnostics.md, section Collapse; the curves are those of real runs of 60 steps."""
    runs: dict[str, list[dict[str, float]]] = {}
    with open(RECORDED / folder / "curves.csv") as file:
        for line in csv.DictReader(file):
            row = {k: float(line[k]) for k in ("step", "reward", "gap_mean") if line[k]}
            runs.setdefault(f"{line['arm']}/{line['seed']}", []).append(row)
    count = {"toy": 12, "toy_3seeds": 12, "toy_gpu": 12, "toy_gpu_more": 15, "toy_s1": 4, "toy_s8": 4}[folder]
    assert len(runs) == count and all(len(rows) == 61 for rows in runs.values())
    found = {name: judge(rows) for name, rows in runs.items()}
    assert {n: d.first("collapsed") for n, d in found.items() if d.verdict == "collapsed"} == collapsed
    assert {d.words for n, d in found.items() if n not in collapsed} == {"healthy"}


def test_the_curves_of_80m_parameters_give_the_documented_verdicts() -> None:
    """docs/gpu.md: cut off after 43 to 47 of 60 steps; only QAT alone collapses."""
    found = {}
    for path in (RECORDED / "gpu_medium").glob("*.history.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.name.split("-")[0]] = (rows[-1]["step"], judge(rows).words)
    assert found == {
        "bf16": (45, "healthy"),
        "nvfp4_naive": (46, "healthy"),
        "qat_only": (43, "collapsed at step 30"),
        "quads": (47, "healthy"),
    }
