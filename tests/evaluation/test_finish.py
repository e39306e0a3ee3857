"""From samples to result.json with an engine made of arithmetic: verdicts, counts, masks, idempotence, refusals."""

import json
from dataclasses import replace

import numpy as np
import pytest
from descriptors import open_below
from made_up_samples import SeededEngine, decode, prompts_of, question

from quads.config import Evaluation
from quads.evaluation import grading as grading_module
from quads.evaluation.finish import all_wanted, finish, questions_hash
from quads.evaluation.generations import Generation, RecordsError, Shard, Store, sample_seed
from quads.evaluation.grading import Graded, Grading
from quads.evaluation.problems import Question
from quads.evaluation.records import Record, read_records, score_matrix
from quads.evaluation.sampling import collect, missing
from quads.evaluation.summary import summarise
from quads.rewards.types import Grade

EVALUATION = Evaluation(bootstrap=200, seed=5)
QUESTIONS = [question("chain", i) for i in range(10)] + [question("sums", i, samples=3) for i in range(6)]
CONDITIONS = {"model": "made up"}


def drawn(cache, shard=None):
    prompts = prompts_of(QUESTIONS)
    requests = {i: p.request for i, p in prompts.items()}
    store = Store.open(cache, "w4a4", CONDITIONS, shard)
    todo = missing(store, all_wanted(requests, QUESTIONS), shard)
    collect(SeededEngine(), todo, prompts, store, seed=5, decode=decode, chunk=9, label="made up")
    return {
        "run_id": "made-up",
        "questions": questions_hash(QUESTIONS),
        "requests": requests,
        "engines": {"own": {"mode": "w4a4", "conditions": CONDITIONS, "receipt": "receipt_own.json"}},
    }


def done(generation, tmp_path, out="out", questions=QUESTIONS):
    grading = Grading("bwrap", None)
    return finish(generation, questions, EVALUATION, cache=tmp_path / "cache", grading=grading, out=tmp_path / out)


def expected(name, problems, samples):
    even = [[sample_seed(5, f"{name}/{p}", s) % 2 == 0 for s in range(samples)] for p in range(problems)]
    return np.array(even, dtype=float)


def test_result_counts_every_sample_of_every_benchmark(tmp_path):
    own = done(drawn(tmp_path / "cache"), tmp_path)["engines"]["own"]
    chains, sums = expected("chain", 10, 4), expected("sums", 6, 3)
    assert 0 < sums.mean() < 1
    assert own["pass_at_1"] == pytest.approx(chains.mean())
    assert own["per_problem"] == pytest.approx(chains.mean(axis=1).tolist())
    assert own["statuses"] == {"correct": chains.sum(), "wrong": 40 - chains.sum()}
    assert own["ci_low"] <= own["pass_at_1"] <= own["ci_high"]
    assert own["pass_at_k"].keys() == {"1", "2", "4"}
    assert own["pass_at_k"]["4"] == pytest.approx(chains.max(axis=1).mean())
    entry = own["benchmarks"]["sums"]
    assert entry["pass_at_1"] == pytest.approx(sums.mean()) and entry["samples_per_problem"] == 3
    # two answers are possible and one is right: the majority of three is right where two or three samples are
    assert entry["maj_at_k"] == pytest.approx((sums.sum(axis=1) >= 2).mean())
    assert own["macro"]["benchmarks"] == ["sums"]
    assert own["macro"]["average"] == pytest.approx(sums.mean())
    assert entry["tokens_median"] == 2.0 and entry["truncated_share"] == 0.0 and entry["failures"] == 0


def test_records_hold_what_was_graded(tmp_path):
    done(drawn(tmp_path / "cache"), tmp_path)
    header, records = read_records(tmp_path / "out" / "own.jsonl")
    assert header["engine"] == "own" and header["conditions"] == CONDITIONS
    assert [(r.benchmark, r.problem, r.sample) for r in records] == [
        (q.benchmark, q.index, s) for q in QUESTIONS for s in range(q.samples)
    ]
    last = records[-1]
    assert last.response == f"{last.text} \\boxed{{{last.text}}}" and last.extracted == last.text
    assert last.logprob_mean == -0.5


def test_grading_again_and_merging_shards_give_the_same_bytes(tmp_path):
    generation = drawn(tmp_path / "cache")
    first = done(generation, tmp_path, "a")
    assert done(generation, tmp_path, "a") == first == done(generation, tmp_path, "b")
    for i in (1, 0):
        shards = drawn(tmp_path / "sharded" / "cache", Shard(i, 2))
    merged = done(shards, tmp_path / "sharded")
    assert merged == first
    files = [tmp_path / "a", tmp_path / "b", tmp_path / "sharded" / "out"]
    assert len({(f / "own.jsonl").read_bytes() for f in files}) == 1


def test_a_shard_that_did_not_run_is_missed(tmp_path):
    generation = drawn(tmp_path / "cache", Shard(0, 2))
    with pytest.raises(RecordsError, match=r"of 58 samples are missing, the first of (chain|sums)/\d.*--shard"):
        done(generation, tmp_path)


def test_other_problems_are_refused(tmp_path):
    generation = drawn(tmp_path / "cache")
    changed = [*QUESTIONS[:-1], replace(QUESTIONS[-1], truth="7")]
    with pytest.raises(RecordsError, match="other problems of sums"):
        done(generation, tmp_path, questions=changed)


def test_failed_grading_is_tried_again_then_masked_and_counted(tmp_path, monkeypatch):
    """One sample's grader fails always, another's once: the first is masked, the second graded; neither is wrong."""
    real, tries = grading_module._text, {}

    def flaky(q, g):
        key = (q.id, g.sample)
        tries[key] = tries.get(key, 0) + 1
        if key == ("sums/0", 0) or (key == ("sums/1", 0) and tries[key] == 1):
            return Graded("", Grade(0.0, "grader_error", detail="made up"))
        return real(q, g)

    monkeypatch.setattr(grading_module, "_text", flaky)
    own = done(drawn(tmp_path / "cache"), tmp_path)["engines"]["own"]
    entry, sums = own["benchmarks"]["sums"], expected("sums", 6, 3)
    assert tries["sums/0", 0] == tries["sums/1", 0] == 2 and tries["sums/2", 0] == 1
    assert entry["failures"] == entry["statuses"]["grader_error"] == 1
    assert entry["graded_per_problem"] == [2, 3, 3, 3, 3, 3]
    sums[0, 0] = np.nan
    assert entry["pass_at_1"] == pytest.approx(np.nanmean(sums, axis=1).mean())


def test_a_problem_whose_every_grading_failed_stops(tmp_path, monkeypatch):
    real = grading_module._text
    broken = Graded("", Grade(0.0, "infra_error"))
    monkeypatch.setattr(grading_module, "_text", lambda q, g: broken if q.id == "sums/3" else real(q, g))
    with pytest.raises(RecordsError, match="sums: tally: problem 3 has no graded sample"):
        done(drawn(tmp_path / "cache"), tmp_path)


def record(problem, sample, status="correct", **changes):
    score = float(status == "correct")
    values = {
        "benchmark": "x",
        "problem": problem,
        "sample": sample,
        "seed": 1,
        "prompt": "",
        "text": "",
        "response": "",
    }
    values |= {"tokens": 5, "finish_reason": "stop", "logprob_mean": -1.0, "status": status, "score": score}
    return Record(**{**values, "extracted": "1", "official": None, "detail": "", **changes})


def test_rates_and_tokens_by_hand():
    rows = [
        record(0, 0, tokens=1),
        record(0, 1, "no_answer", tokens=8, finish_reason="length", extracted=None),
        record(1, 0, "wrong", tokens=3, extracted="2"),
        record(1, 1, "no_answer", tokens=4, extracted=None, logprob_mean=None),
    ]
    got = summarise("x", rows, 2, 2, EVALUATION)
    assert (got["truncated_share"], got["no_answer_share"]) == (0.25, 0.5)
    assert (got["tokens_mean"], got["tokens_median"]) == (4.0, 3.5)
    assert got["tokens_p95"] == pytest.approx(np.quantile([1, 3, 4, 8], 0.95))
    assert (got["tokens_mean_correct"], got["tokens_mean_rest"]) == (1.0, 5.0)
    assert got["statuses"] == {"correct": 1, "wrong": 1, "no_answer": 2}
    assert got["maj_at_k"] == 0.5 and got["official_share"] is None


def test_programs_report_the_official_share_and_no_vote():
    rows = [record(0, 0, official="pass"), record(0, 1, official="fail")]
    got = summarise("x", rows, 1, 2, EVALUATION)
    assert got["official_share"] == 0.5 and got["maj_at_k"] is None


def test_holes_and_extras_are_errors():
    rows = [record(0, 0), record(0, 1), record(1, 0)]
    with pytest.raises(RecordsError, match=r"1 missing \(first \[\(1, 1\)\]\)"):
        score_matrix("x", rows, 2, 2)
    with pytest.raises(RecordsError, match=r"1 unexpected \(first \[\(0, 1\)\]\)"):
        score_matrix("x", rows, 2, 1)


def test_reading_a_cut_or_missing_file_is_an_error(tmp_path):
    with pytest.raises(RecordsError, match="missing"):
        read_records(tmp_path / "own.jsonl")
    done(drawn(tmp_path / "cache"), tmp_path)
    path = tmp_path / "out" / "own.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(RecordsError, match="cut off"):
        read_records(path)
    lines = whole.decode().splitlines()
    lines[3] = json.dumps({"problem": 1})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordsError, match=r"own\.jsonl:4"):
        read_records(path)


def test_programs_run_in_the_sandbox_and_equal_ones_once(tmp_path):
    tests = json.dumps({"mode": "stdin", "tests": [{"input": "", "output": "869\n"}]})
    asked = Question("chain_code", 0, ({"role": "user", "content": "x"},), "code", tests, 1, "print_all")
    texts = [("869", "stop"), ("869", "stop"), ("86", "stop"), ("8^69", "stop"), ("8698698", "length")]
    samples = [Generation("chain_code/0", i, "r", 0, "x", t, 3, why, None) for i, (t, why) in enumerate(texts)]
    grading = Grading("bwrap", tmp_path)
    grading.close()  # nothing is open yet
    grading.check([asked])
    ran = []
    run = grading._programs._run
    grading._programs._run = lambda job, *rest: (ran.append(job.mode), run(job, *rest))[1]
    got = grading.grade([(asked, s) for s in samples])
    assert [g.grade.status for g in got] == ["correct", "correct", "wrong", "wrong", "no_answer"]
    assert [g.official for g in got[:3]] == ["pass", "pass", "fail"] and grading.level == "bwrap"
    assert sorted(ran) == ["official"] * 3 + ["stdin"] * 3
    broken = replace(asked, truth="{}")
    assert grading.grade([(broken, samples[0])])[0].grade.status == "grader_error"
    assert open_below(tmp_path) == ["verdicts.sqlite"]
    grading.close()
    assert open_below(tmp_path) == [] and grading.level == "bwrap"
