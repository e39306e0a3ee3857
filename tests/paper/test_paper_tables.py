"""The paper's tables from synthetic results: every number from a source, every status from its interval."""

import csv
import io
import json
import math

import pytest
from made_up_results import made_up_arms, made_up_experiment, write_run
from made_up_studies import FLOOR, LARGEST, bench_file, decomposition_rows, fig7_rows, k_sweep_rows, write_study

from quads import report
from quads.evaluation.stats import Interval
from quads.paper.assemble import Report
from quads.paper.cells import Cell
from quads.paper.sources import load_sources
from quads.paper.status import Verdict
from quads.paper.summary_tables import all_tables


def by_row(table):
    """(row, start of the measure) -> cell."""
    return {(c.row, c.measure): c for c in table.cells}


def tables(inputs):
    return {t.name: t for t in all_tables(inputs())}


def claims(inputs):
    return {c.row: c for c in tables(inputs)["claims"].cells}


def test_a_number_needs_a_source_and_a_source_a_number():
    one = Interval(1.0, 0.0, 2.0)
    with pytest.raises(ValueError, match="a number needs a source"):
        Cell("r", "m", "nats", Verdict("reproduced"), here=one)
    with pytest.raises(ValueError, match="a source a number"):
        Cell("r", "m", "nats", Verdict("not run", "x"), sources=("k",))
    with pytest.raises(ValueError, match="nothing measured, but 'reproduced'"):
        Cell("r", "m", "nats", Verdict("reproduced"))


def test_without_studies_the_cells_name_the_command(inputs):
    found = claims(inputs)
    for row in ("the largest gap falls with every step of k (Table 3)", "RAC on all channels reaches the BF16 gap"):
        assert str(found[row].verdict) == "not run: snakemake diagnose_made_up" and found[row].here is None
    assert str(found["QUADS rollouts are faster than FP8's"].verdict) == "not run: needs Blackwell: native NVFP4"
    sweep = [c for c in tables(inputs)["table3"].cells if "step 0" in c.measure]
    assert {str(c.verdict) for c in sweep} == {"not run: snakemake diagnose_made_up"}
    assert [c.paper for c in sweep[:7]] == [1.3, 0.923, 0.901, 0.854, 0.812, 0.759, 0.74]


def test_every_cell_leads_to_run_config_and_commit_in_two_steps(made_up, inputs):
    """Step one: the CSV's source key is in sources.json; step two: that entry names file, run and commit."""
    results = made_up[0]
    write_study(results / "diagnose", "k_sweep", k_sweep_rows())
    texts = Report(inputs()).texts()
    known = {e["key"]: e for e in json.loads(texts["sources.json"])}
    numbers = 0
    for name, text in texts.items():
        if not (name.startswith("tables/") and name.endswith(".csv")):
            continue
        for line in csv.DictReader(io.StringIO(text)):
            measured = bool(line["here"] or line["here_difference"])
            assert measured == bool(line["sources"]), line
            for key in line["sources"].split():
                entry = known[key]
                assert (results / entry["link"]).is_file() and entry["link"] in line["source_files"]
                assert entry["commit"] in line["commits"] and entry["run_id"] in [*line["run_ids"].split(), ""]
                numbers += 1
                if entry["kind"] == "run":
                    assert entry["config"]["arm"]["name"] == entry["run_id"].partition("-seed")[0]
                    assert entry["config_hash"] in line["config_hashes"]
    assert numbers > 40


def test_a_cell_that_cites_an_unread_source_stops_the_report(inputs):
    with pytest.raises(KeyError, match="cites the source 'study-x', which was not read"):
        inputs().ledger.columns(["study-x"])


def test_table_2_holds_the_papers_numbers_and_ours(inputs):
    found = by_row(tables(inputs)["table2"])
    cell = found["naive NVFP4 RL", "pass@1 on the held-out task, own engine"]
    assert (cell.paper, cell.paper_difference, cell.against) == (51.37, -21.78, "BF16")
    assert cell.here.estimate == pytest.approx(20.5) and cell.here_difference.estimate == pytest.approx(-70.0)
    assert cell.verdict.word == "reproduced" and len(cell.sources) == 2
    aime = found["QUADS", "AIME24"]
    assert aime.paper == 83.33 and str(aime.verdict) == "not run: aime24 is not among this experiment's benchmarks"


def test_a_benchmark_of_the_paper_is_filled_in_where_it_was_evaluated(tmp_path):
    experiment, arms = made_up_experiment(), made_up_arms()
    benchmarks = experiment.evaluation.benchmarks.model_copy(update={"names": ("aime24",)})
    update = {"evaluation": experiment.evaluation.model_copy(update={"benchmarks": benchmarks})}
    experiment = experiment.model_copy(update=update)
    for arm in arms:
        _, folder = write_run(tmp_path, experiment, arm, 0)
        said = json.loads((folder / "result.json").read_text())
        for engine in said["engines"].values():
            engine["benchmarks"] = {"aime24": engine["benchmarks"]["chain_depth2"]}
        (folder / "result.json").write_text(json.dumps(said))
    sources = load_sources(tmp_path, experiment, arms)
    x = report.read_inputs(experiment, sources, tmp_path, diagnose=tmp_path / "d", throughput=tmp_path / "t")
    found = by_row(next(t for t in all_tables(x) if t.name == "table2"))
    cell = found["naive NVFP4 RL", "AIME24 (aime24)"]
    assert cell.here.estimate == pytest.approx(20.5) and cell.here_difference.estimate == pytest.approx(-70.0)
    assert cell.paper_difference == pytest.approx(66.67 - 83.54) and cell.verdict.word == "reproduced"


def test_a_falling_sweep_reproduces_table_3_and_a_flat_end_does_not_reach_the_floor(made_up, inputs):
    write_study(made_up[0] / "diagnose", "k_sweep", k_sweep_rows())
    found = claims(inputs)
    falls = found["the largest gap falls with every step of k (Table 3)"]
    assert str(falls.verdict) == "reproduced: all 6 parts" and falls.here.estimate == pytest.approx(0.3 - 4.0)
    reaches = found["RAC on all channels reaches the BF16 gap"]
    share = (LARGEST[0.0] - LARGEST[1.0]) / (LARGEST[0.0] - FLOOR)
    assert reaches.here.estimate == pytest.approx(share) and reaches.verdict.word == "reproduced"
    cell = by_row(tables(inputs)["table3"])["k = 25 %", "largest token, channel masks, step 0"]
    assert cell.paper_difference == pytest.approx(0.901 - 0.923) and cell.here_difference.estimate == pytest.approx(
        -1.0
    )


def test_a_rising_step_is_said_so(made_up, inputs):
    write_study(made_up[0] / "diagnose", "k_sweep", k_sweep_rows({**LARGEST, 0.5: 2.5}))
    falls = claims(inputs)["the largest gap falls with every step of k (Table 3)"]
    assert str(falls.verdict) == "partly: 6 parts: 5 reproduced, 1 contradicted"


@pytest.mark.parametrize(("factor", "word"), [(2.0, "reproduced"), (0.5, "contradicted"), (1.0, "inconclusive")])
def test_fig_7_follows_the_study(made_up, inputs, factor, word):
    write_study(made_up[0] / "diagnose", "fig7", fig7_rows(factor))
    found = claims(inputs)
    for rollout in ("w4a4", "w4a4+rac"):
        row = f"symmetric QAT mismatches more in every layer (Fig. 7), rollout {rollout}"
        assert found[row].verdict.word == word
    measure = "built-up mismatch, trainer w4a4, rollout w4a4+rac, step 0"
    cell = by_row(tables(inputs)["layers"])["layer 0: stream", measure]
    assert cell.here_difference.estimate == pytest.approx(0.1 * (factor - 1)) and cell.verdict.word == word


def test_one_seed_separates_nothing(made_up, inputs):
    rows = [r for r in k_sweep_rows() if r["seed"] == 0]
    write_study(made_up[0] / "diagnose", "k_sweep", rows)
    cell = claims(inputs)["the largest gap falls with every step of k (Table 3)"]
    assert cell.verdict.word == "inconclusive" and math.isinf(cell.here.high)


def test_native_speeds_are_compared_and_others_only_shown(made_up, inputs):
    (made_up[0] / "throughput").mkdir()
    (made_up[0] / "throughput" / "card.json").write_text(json.dumps(bench_file()))
    found = by_row(tables(inputs)["throughput"])
    quads = found["QUADS rollouts are faster than FP8's", "w4a4+rac / fp8, decode, native"]
    assert quads.here.estimate == pytest.approx(1.1) and quads.verdict.word == "reproduced"
    cost = found["RAC costs 5 to 9 % of rollout speed", "w4a4 / w4a4+rac, decode, native"]
    assert cost.here.estimate == pytest.approx(12 / 11) and cost.verdict.word == "partly"
    assert found["QUADS rollouts are faster than FP8's", "w4a4+rac / fp8, prefill, native"].verdict.word == "not run"
    emulated = [c for c in found.values() if "emulated, batch" in c.measure]
    assert emulated and all(str(c.verdict) == "no claim: emulation, no speed claim" for c in emulated)
    assert next(c for c in found.values() if c.measure.startswith("sync")).unit == "seconds"


def test_rounds_of_one_measurement_are_one_row(made_up, inputs):
    (made_up[0] / "throughput").mkdir()
    row = {
        "mode": "fp8",
        "backend": "emulated",
        "phase": "decode",
        "batch": 8,
        "prompt_tokens": 4,
        "response_tokens": 4,
    }
    row |= {"rollout_backend": "triton", "rollout_graphs": True}
    rows = [{**row, "tokens_per_s": speed} for speed in (30.0, 10.0, 11.0)] + [
        {**row, "rollout_graphs": False, "tokens_per_s": 5.0}
    ]
    (made_up[0] / "throughput" / "card.json").write_text(json.dumps(bench_file(rows=rows)))
    found = [c for c in tables(inputs)["throughput"].cells if c.row == "rollout fp8"]
    assert [(c.here.estimate, c.here.low, c.here.high) for c in found] == [(11.0, 10.0, 30.0), (5.0, 5.0, 5.0)]
    assert "emulated (triton, CUDA graphs), batch 8" in found[0].measure and "(triton, eager)" in found[1].measure
    assert found[0].interval_over == "lowest and highest of 3 rounds"


def test_weights_that_differ_contradict_the_shared_path(made_up, inputs):
    path = next((made_up[0] / "made_up" / "train").glob("quads-*/result.json"))
    said = json.loads(path.read_text())
    assert claims(inputs)["one shared QDQ path: weight error exactly 0"].verdict.why == "0 of 20"
    path.write_text(json.dumps({**said, "delta_weight": {"elements": 10, "different": 1, "max_abs": 0.1}}))
    assert str(claims(inputs)["one shared QDQ path: weight error exactly 0"].verdict) == "contradicted: 1 of 20"


def test_the_decomposition_is_taken_over_from_its_study(made_up, inputs):
    write_study(made_up[0] / "diagnose", "decomposition", decomposition_rows())
    (_, (header, body), key) = Report(inputs())._study_grids()[0]
    assert header == ["arm", "total", "delta_weight", "delta_act", "delta_num"] and key == "study-decomposition"
    assert body[1] == ["quads", "0.3", "0", "0.2", "0.1"]
