"""The benchmark section from synthetic results: pooled counts, tests against BF16, Holm, verdicts, and the page."""

import json
from dataclasses import replace

import pytest
from made_up_results import BENCHMARKS, MADE_UP, PROBLEMS, SAMPLES, made_up_arms, made_up_experiment, write_run

from quads.files import ResultFileError
from quads.paper.benchmarks import benchmark_records, comparisons
from quads.paper.render_benchmarks import section
from quads.paper.sources import load_sources


@pytest.fixture
def evaluation():
    return made_up_experiment().evaluation


def test_scores_are_the_sources_scores(made_up, evaluation):
    records = benchmark_records(load_sources(*made_up), evaluation)
    assert [(r["arm"], r["engine"], r["benchmark"]) for r in records[:4]] == [
        ("bf16", engine, name) for engine in ("own", "bf16") for name in BENCHMARKS
    ]
    first = records[0]
    assert first["avg_at_k"] == pytest.approx(0.905) and first["pass_k"] == 4
    assert first["decoding_low"] < first["avg_at_k"] < first["decoding_high"]
    assert first["problems_low"] < first["decoding_low"]
    assert first["statuses"] == "correct:362 no_answer:4 wrong:34"
    assert records[1]["official_share"] == 0.25 and first["official_share"] is None


def test_every_arm_is_tested_against_bf16(made_up, evaluation):
    own = {r["arm"]: r for r in comparisons(load_sources(*made_up), evaluation) if r["engine"] == "own"}
    assert own["bf16"]["difference_to_bf16"] is None and own["bf16"]["non_inferiority"] is None
    naive = own["nvfp4_naive"]
    assert naive["difference_to_bf16"] == pytest.approx((20.5 - 90.5) / PROBLEMS)
    assert naive["difference_low"] < naive["difference_to_bf16"] < naive["difference_high"]
    assert naive["non_inferiority"] == "inferior" and naive["p"] == pytest.approx(1 / 10_000)
    # Holm over three arms: the smallest is tripled
    assert naive["p_holm"] == pytest.approx(3 / 10_000)
    assert own["quads"]["difference_to_bf16"] == pytest.approx(-0.05)
    # six problems differ per benchmark, all in one direction: 2 of 2**12 sign patterns
    assert (own["quads"]["p"], own["quads"]["p_exact"]) == (2 / 2**12, True)
    assert own["quads"]["non_inferiority"] in ("inferior", "not shown")
    assert own["quads"]["macro_average"] == pytest.approx(0.855)


def test_the_same_results_are_non_inferior(tmp_path, evaluation):
    experiment, arms = made_up_experiment(), made_up_arms()
    for arm in arms:
        write_run(tmp_path, experiment, arm, 0, numbers=MADE_UP["bf16"])
    sources = load_sources(tmp_path, experiment, arms)
    rows = [r for r in comparisons(sources, evaluation) if r["arm"] != "bf16"]
    assert {r["non_inferiority"] for r in rows} == {"non-inferior"} and {r["p"] for r in rows} == {1.0}

    def after_few_steps(name):
        cut = [replace(s, steps=s.steps[:7]) if s.arm.name == name else s for s in sources]
        return {r["arm"]: r["non_inferiority"] for r in comparisons(cut, evaluation) if r["arm"] != "bf16"}

    # the arm alone, but everyone where it is the arm that all are compared with
    others = dict.fromkeys((r["arm"] for r in rows), "non-inferior")
    assert after_few_steps("quads") == {**others, "quads": "not shown"}
    assert set(after_few_steps("bf16").values()) == {"not shown"}


def test_seeds_are_pooled_and_their_spread_is_shown(tmp_path, evaluation):
    experiment, arms = made_up_experiment(seeds=(0, 1)), made_up_arms()[:2]
    for arm in arms:
        write_run(tmp_path, experiment, arm, 0)
        write_run(tmp_path, experiment, arm, 1, numbers=(0.5, 0.70, 0.1))
    sources = load_sources(tmp_path, experiment, arms)
    row = comparisons(sources, evaluation)[0]
    assert row["macro_average"] == pytest.approx((0.905 + 0.705) / 2)
    assert (row["seeds_low"], row["seeds_high"], row["seeds_seeds"]) == (0.705, 0.905, 2)
    assert row["seeds_sd"] == pytest.approx(0.2 / 2**0.5)
    record = benchmark_records(sources, evaluation)[0]
    assert record["seeds"] == 2 and record["samples_per_problem"] == SAMPLES


def test_without_a_bf16_arm_nothing_is_compared(tmp_path, evaluation):
    experiment, arms = made_up_experiment(), made_up_arms()[1:]
    for arm in arms:
        write_run(tmp_path, experiment, arm, 0)
    rows = comparisons(load_sources(tmp_path, experiment, arms), evaluation)
    assert all(r["difference_to_bf16"] is None and r["macro_average"] > 0 for r in rows)


def test_the_section_states_margin_sandbox_and_every_arm(made_up, evaluation):
    sources = load_sources(*made_up)
    text = section(benchmark_records(sources, evaluation), comparisons(sources, evaluation), evaluation, ["bwrap"])
    for said in ("loss of 2 points", "Isolation of programs: bwrap", "sandbox plumbing", "-70.0 [", "inferior"):
        assert said in text
    assert all(f"| {name} | own |" in text for name in MADE_UP)
    assert "None" not in text and "nan" not in text
    assert section([], [], evaluation, []) == ""


def test_a_missing_benchmark_stops_the_report(made_up):
    results, experiment, arms = made_up
    path = next((results / "made_up" / "eval").glob("quads-*/result.json"))
    said = json.loads(path.read_text())
    del said["engines"]["own"]["benchmarks"]["chain_code"]
    path.write_text(json.dumps(said))
    with pytest.raises(ResultFileError, match=r"engine 'own', benchmark 'chain_code' is missing"):
        load_sources(results, experiment, arms)
