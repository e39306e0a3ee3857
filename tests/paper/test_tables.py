"""The table from synthetic results: numbers by hand, status by interval, and every way a source can be broken."""

import csv
import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from made_up_results import MADE_UP, PROBLEMS, STEPS, made_up_arms, made_up_experiment, write_run

from quads.files import ResultFileError
from quads.paper.assemble import Report
from quads.paper.claims import (
    CLAIMS,
    TABLE_2,
    claim_records,
    compare_rows,
    judge_claims,
    paper_average,
    recovered,
)
from quads.paper.sources import load_sources
from quads.paper.tables import build_rows, curve_records, record, to_csv


@pytest.fixture
def sources(made_up):
    return load_sources(*made_up)


@pytest.fixture
def evaluation():
    return made_up_experiment().evaluation


def test_numbers_of_a_row_are_the_sources_numbers(sources, evaluation):
    rows = {r.arm.name: r for r in build_rows(sources, evaluation)}
    assert list(rows) == list(MADE_UP)
    naive = rows["nvfp4_naive"]
    assert naive.own.estimate == pytest.approx((20 + 0.5) / PROBLEMS)
    assert naive.start.estimate == 0.45
    assert naive.difference_own.estimate == pytest.approx((20 - 90) / PROBLEMS)
    wave = 1 + 0.1 * np.sin(np.arange(STEPS - 9, STEPS + 1))
    assert naive.gap_mean.estimate == pytest.approx(0.24 * wave.mean())
    assert naive.gap_max == pytest.approx(2.4 * wave.max())
    assert naive.k3 == pytest.approx(0.012)
    assert naive.delta_weight_different == 0
    assert naive.seconds_per_step == 2.0
    assert naive.gap_resampled == "steps" and naive.last_steps == 10
    assert naive.own_sd_over_seeds is None
    assert rows["bf16"].difference_own is None


def test_status_follows_the_interval(sources, evaluation):
    rows = {r.arm.name: r for r in build_rows(sources, evaluation)}
    assert rows["nvfp4_naive"].status == "falls"
    assert rows["bf16"].status == "improves"
    assert rows["nvfp4_naive"].trend.high < 0 < rows["bf16"].trend.low


def test_no_visible_change_is_said_so(tmp_path, evaluation):
    experiment, arms = made_up_experiment(), made_up_arms()[:1]
    write_run(tmp_path, experiment, arms[0], 0, numbers=(0.50, 0.52, 0.001))
    (row,) = build_rows(load_sources(tmp_path, experiment, arms), evaluation)
    assert row.status == "no change seen"


def test_several_seeds_are_averaged_and_their_spread_is_shown(tmp_path, evaluation):
    experiment, arms = made_up_experiment(seeds=(0, 1)), made_up_arms()[:2]
    for arm in arms:
        write_run(tmp_path, experiment, arm, 0)
        write_run(tmp_path, experiment, arm, 1, numbers=(0.5, 0.70, MADE_UP[arm.name][2] * 2))
    rows = {r.arm.name: r for r in build_rows(load_sources(tmp_path, experiment, arms), evaluation)}
    bf16 = rows["bf16"]
    assert bf16.seeds == (0, 1) and len(bf16.run_ids) == 2
    assert bf16.own.estimate == pytest.approx((0.905 + 0.705) / 2)
    assert bf16.own_sd_over_seeds == pytest.approx(np.std([0.905, 0.705], ddof=1))
    assert bf16.gap_resampled == "seeds and steps"
    assert bf16.gap_mean.low < bf16.gap_mean.estimate < bf16.gap_mean.high


def test_arms_without_a_reference_have_no_difference(tmp_path, evaluation):
    experiment, arms = made_up_experiment(), made_up_arms()[1:]
    for arm in arms:
        write_run(tmp_path, experiment, arm, 0)
    rows = build_rows(load_sources(tmp_path, experiment, arms), evaluation)
    assert all(r.difference_own is None for r in rows)
    assert (
        compare_rows(load_sources(tmp_path, experiment, arms), evaluation)[0]["why"]
        == "no BF16 arm here to compare with"
    )


def test_null_metrics_leave_the_mean_and_are_counted(made_up, evaluation):
    results, experiment, arms = made_up
    path = next((results / "made_up" / "train").glob("nvfp4_naive-*/history.jsonl"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["k3"] = lines[-2]["k3"] = None
    path.write_text("".join(json.dumps(r) + "\n" for r in lines))
    row = build_rows(load_sources(results, experiment, arms), evaluation)[1]
    assert row.k3 == pytest.approx(0.012)
    assert row.nonfinite_steps == 2 and row.status == "falls, 2 steps not finite"


def test_csv_reads_back_and_every_row_names_its_run(sources, evaluation):
    rows = build_rows(sources, evaluation)
    read = list(csv.DictReader(io.StringIO(to_csv([record(r) for r in rows]))))
    for row, line in zip(rows, read, strict=True):
        assert line["run_ids"] == row.run_ids[0] and line["config_hashes"] in row.run_ids[0]
        assert float(line["pass_at_1_own"]) == row.own.estimate
        assert float(line["pass_at_1_own_low"]) <= row.own.estimate <= float(line["pass_at_1_own_high"])
    assert read[0]["difference_to_bf16_arm_own"] == ""
    assert read[3]["rollout"] == "W4A4 + RAC 0.5 block16 static" and read[3]["trainer"] == "W4A16"
    assert read[0]["old_log_probs"] == "rollout"


def test_curves_hold_every_step_of_every_run(sources):
    records = curve_records(sources)
    assert len(records) == 4 * (STEPS + 1)
    assert [r["step"] for r in records[: STEPS + 1]] == list(range(STEPS + 1))
    assert records[0]["eval_accuracy"] == 0.5 and records[0]["reward"] is None


def test_page_has_all_arms_runs_and_no_unfilled_field(sources, inputs):
    text = Report(inputs()).texts()["table.md"]
    for source in sources:
        assert f"| {source.arm.name} |" in text and f"`{source.run_id}`" in text
    assert "nvfp4_naive > qat_only > quads > bf16" in text
    assert "None" not in text and "nan" not in text


# --- the paper's numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "average"), [("BF16 RL", 73.15), ("FP8 RL", 72.88), ("naive NVFP4 RL", 51.37), ("QUADS", 72.86)]
)
def test_the_papers_averages_are_the_means_of_its_benchmarks(row, average):
    # the printed average, and the mean of the printed benchmarks to the 0.01 that rounding allows
    assert paper_average(row)[0] == average == pytest.approx(np.mean(TABLE_2[row][:4]), abs=0.011)


def test_claimed_differences_are_differences_of_the_papers_averages():
    row = {"bf16": "BF16 RL", "fp8": "FP8 RL", "nvfp4_naive": "naive NVFP4 RL", "quads": "QUADS"}
    row |= {"qat_only": "W4A16 QAT only"}
    for claim in CLAIMS:
        if claim.measure == "pass@1":
            expected = paper_average(row[claim.greater])[0] - paper_average(row[claim.smaller])[0]
            assert claim.paper == pytest.approx(expected, abs=0.06), claim


def judged(sources, experiment):
    """(measure, greater, smaller) -> "word: why"."""
    records = claim_records(judge_claims(sources, experiment))
    return {(c["measure"], c["greater"], c["smaller"]): f"{c['status']}: {c['why']}" for c in records}


def test_claims_are_judged_by_what_was_measured(sources):
    found = judged(sources, made_up_experiment())
    assert found["pass@1", "bf16", "nvfp4_naive"] == "reproduced: same direction"
    assert found["pass@1", "quads", "nvfp4_naive"] == "reproduced: same direction"
    assert found["pass@1", "bf16", "quads"] == "partly: differs, not shown to exceed 2"
    assert found["gap", "nvfp4_naive", "qat_only"] == "reproduced: same direction"
    assert found["gap", "qat_symmetric", "qat_only"] == "not run: no arm qat_symmetric in this experiment"
    assert found["pass@1", "bf16", "fp8"] == "not run: no arm fp8 in this experiment"
    without = [s for s in sources if s.arm.name != "quads"]
    assert (
        judged(without, made_up_experiment())["collapsed", "quads", "quads"]
        == "not run: no arm quads in this experiment"
    )
    # (60.5 - 20.5) / (90.5 - 20.5) = 0.57: the direction holds, "most" is not shown
    assert found["recovered", "qat_only", "nvfp4_naive"] == "partly: same direction, not shown to exceed 0.5"


def test_seeds_that_disagree_leave_a_claim_open(tmp_path):
    """Per seed 44.8, 2.9 and 18.5 points: every problem-wise interval is far from 0, three seeds are not."""
    experiment, arms = made_up_experiment(seeds=(0, 1, 2)), made_up_arms()
    ends = {"bf16": (0.95,) * 3, "nvfp4_naive": (0.20, 0.20, 0.20), "qat_only": (0.65, 0.23, 0.39)}
    ends["quads"] = (0.91, 0.90, 0.92)
    for arm in arms:
        for seed, end in enumerate(ends[arm.name]):
            numbers = (0.45, end, MADE_UP[arm.name][2] * (1 + 0.1 * seed))
            write_run(tmp_path, experiment, arm, seed, numbers=numbers)
    sources = load_sources(tmp_path, experiment, arms)
    records = {c["claim"]: c for c in claim_records(judge_claims(sources, experiment))}
    better = records["QAT alone is better than naive"]
    points = np.array([45.0, 3.0, 19.0])
    half = 4.302652729911275 * points.std(ddof=1) / 3**0.5  # t(0.975, 2 degrees of freedom), from a printed table
    assert better["here_low"] > 0 and better["status"] == "inconclusive"
    assert better["why"] == "interval over seeds holds 0"
    assert better["over_seeds_low"] == pytest.approx(points.mean() - half, rel=1e-5)
    assert better["over_seeds_high"] == pytest.approx(points.mean() + half, rel=1e-5)
    assert records["QUADS ends above naive NVFP4 RL"]["why"] == "same direction, over problems and over seeds"
    assert records["QAT alone recovers most of the loss"]["status"] == "inconclusive"
    row = {r["arm"]: r for r in compare_rows(sources, experiment.evaluation)}
    assert row["nvfp4_naive"]["status"] == "reproduced" and row["bf16"]["over_seeds_low"] is None
    made = {r.arm.name: r for r in build_rows(sources, experiment.evaluation)}
    assert made["qat_only"].status == "no change seen" and made["nvfp4_naive"].status == "falls"


def test_an_arm_rises_only_where_its_seeds_agree(tmp_path, evaluation):
    experiment, arms = made_up_experiment(seeds=(0, 1, 2)), made_up_arms()[:1]
    for seed, end in enumerate((0.95, 0.40, 0.95)):
        write_run(tmp_path, experiment, arms[0], seed, numbers=(0.45, end, 0.001))
    (row,) = build_rows(load_sources(tmp_path, experiment, arms), evaluation)
    assert row.trend.low > 0 > row.trend_over_seeds.low
    assert row.status == "inconclusive: interval over seeds holds 0"


def test_collapse_is_counted_over_seeds(tmp_path):
    """ "Collapses" is judged by the runs, not by a difference to another arm."""
    experiment, arms = made_up_experiment(seeds=(0, 1, 2)), [a for a in made_up_arms() if a.name != "qat_only"]
    ends = {"bf16": (0.9,) * 3, "nvfp4_naive": (0.2, 0.5, 0.2), "quads": (0.85, 0.85, 0.2)}
    for arm in arms:
        for seed, end in enumerate(ends[arm.name]):
            write_run(tmp_path, experiment, arm, seed, numbers=(0.5, end, MADE_UP[arm.name][2]))
    found = judged(load_sources(tmp_path, experiment, arms), experiment)
    assert found["collapsed", "nvfp4_naive", "nvfp4_naive"] == "reproduced: 2 of 3 seeds collapsed"
    assert found["collapsed", "quads", "quads"] == "partly: 1 of 3 seeds collapsed"


def test_an_arm_of_more_arms_is_named_with_its_command(sources):
    experiment = made_up_experiment().model_copy(update={"more_arms": ("fp8",)})
    assert judged(sources, experiment)["pass@1", "bf16", "fp8"] == "not run: snakemake made_up_all adds fp8"


def test_claims_turn_round_when_the_numbers_do(tmp_path):
    experiment, arms = made_up_experiment(), made_up_arms()
    swapped = {**MADE_UP, "bf16": MADE_UP["nvfp4_naive"], "nvfp4_naive": MADE_UP["bf16"]}
    swapped["quads"] = MADE_UP["nvfp4_naive"]
    for arm in arms:
        write_run(tmp_path, experiment, arm, 0, numbers=swapped[arm.name])
    found = judged(load_sources(tmp_path, experiment, arms), experiment)
    assert found["pass@1", "bf16", "nvfp4_naive"] == "contradicted: opposite direction"
    assert found["pass@1", "bf16", "quads"] == "reproduced: within 2"
    assert found["gap", "nvfp4_naive", "qat_only"] == "contradicted: opposite direction"
    assert found["gap", "quads", "bf16"] == "inconclusive: interval holds 0"
    # there is no loss to recover from
    assert found["recovered", "qat_only", "nvfp4_naive"].startswith("not run: no finite value")


def test_the_recovered_share_is_the_ratio_of_means(sources, evaluation):
    arms = {s.arm.name: [s] for s in sources}
    share = recovered(arms["qat_only"], arms["nvfp4_naive"], arms["bf16"], evaluation)
    assert share.estimate == pytest.approx((60.5 - 20.5) / (90.5 - 20.5)) and share.low < share.estimate < share.high


# --- broken sources ------------------------------------------------------------------------------------------------


def _find(results, kind, name, arm="quads"):
    (path,) = (results / "made_up" / kind).glob(f"{arm}-*/{name}")
    return path


@pytest.mark.parametrize(
    ("kind", "name"), [("train", "result.json"), ("train", "history.jsonl"), ("eval", "result.json")]
)
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
def test_a_broken_source_stops_with_its_name_and_the_command(made_up, tmp_path, monkeypatch, kind, name, damage):
    made, experiment, arms = made_up
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    results = Path("results")
    results.symlink_to(made)
    path = _find(results, kind, name)
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: 0 if damage == "empty" else -30])
    with pytest.raises(ResultFileError) as caught:
        load_sources(results, experiment, arms)
    target = path.with_name("result.json")
    assert str(path) in str(caught.value) and f"snakemake --forcerun {target} -- {target}" in str(caught.value)


def test_a_result_of_another_run_is_refused(made_up):
    results, experiment, arms = made_up
    path = _find(results, "eval", "result.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "run_id": "quads-seed7-0000000000"}))
    with pytest.raises(ResultFileError, match="is of run 'quads-seed7-0000000000'"):
        load_sources(results, experiment, arms)


def test_an_evaluation_with_other_settings_names_both(made_up):
    results, experiment, arms = made_up
    path = _find(results, "eval", "result.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "eval_hash": "0123456789"}))
    with pytest.raises(ResultFileError, match=r"with settings '0123456789', this experiment's are '[0-9a-f]{10}'"):
        load_sources(results, experiment, arms)


def test_an_evaluation_of_another_training_result_names_both(made_up):
    results, experiment, arms = made_up
    path, trained = _find(results, "eval", "result.json"), _find(results, "train", "result.json")
    own = hashlib.sha256(trained.read_bytes()).hexdigest()
    said = json.loads(path.read_text())
    path.write_text(json.dumps({**said, "train_result_sha256": own}))
    load_sources(results, experiment, arms)
    trained.write_text(trained.read_text() + " ")
    with pytest.raises(ResultFileError, match=f"evaluated the training result {own[:12]}, .* is [0-9a-f]{{12}}"):
        load_sources(results, experiment, arms)


@pytest.mark.parametrize("change", [lambda rows: rows[:-1], lambda rows: [*rows[:5], rows[4], *rows[5:]]])
def test_a_history_with_lost_or_repeated_steps_is_refused(made_up, change):
    results, experiment, arms = made_up
    path = _find(results, "train", "history.jsonl")
    rows = path.read_text().splitlines()
    path.write_text("\n".join(change(rows)) + "\n")
    with pytest.raises(ResultFileError, match=f"expected 0 to {STEPS} once each"):
        load_sources(results, experiment, arms)


def test_an_engine_that_was_not_evaluated_is_refused(made_up):
    results, experiment, arms = made_up
    path = _find(results, "eval", "result.json")
    content = json.loads(path.read_text())
    del content["engines"]["bf16"]
    path.write_text(json.dumps(content))
    with pytest.raises(ResultFileError, match="engine 'bf16' is missing"):
        load_sources(results, experiment, arms)
