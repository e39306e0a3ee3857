"""Collecting samples with an engine made of arithmetic: seeds, chunks, kills, and what the summary counts."""

from dataclasses import dataclass

import numpy as np
import pytest

from quads.config import Evaluation
from quads.evaluation.records import Records, sample_seed
from quads.evaluation.sampling import Problem, Sample, collect, summarise

PROBLEMS = [Problem(f"^{i}+1=", (42, i, 11, 40), str((i + 1) % 10), "chain") for i in range(10)]
HEADER = {"checkpoint": "made up"}


class SeededEngine:
    """Right where the seed is even; records what it was asked; dies at call `dies_at`."""

    def __init__(self, dies_at=None):
        self.calls, self.dies_at = [], dies_at

    def generate(self, prompts, seeds):
        self.calls.append((list(prompts), list(seeds)))
        if len(self.calls) == self.dies_at:
            raise KeyboardInterrupt
        right = [(p[1] + 1) % 10 for p in prompts]
        return [
            Sample([r if s % 2 == 0 else (r + 1) % 10, 41], [-0.25, -0.75], "stop")
            for r, s in zip(right, seeds, strict=True)
        ]


@dataclass
class Verdict:
    score: float
    status: str
    extracted: str | None


def grade(problem, text, finished):
    right = finished and text == problem.ground_truth
    return Verdict(float(right), "correct" if right else "wrong", text)


def draw(engine, path, evaluation, chunk=7, problems=PROBLEMS):
    records = Records.open(path, HEADER)
    collect(
        engine,
        problems,
        records,
        evaluation,
        grade=grade,
        decode=lambda ids: str(ids[0]),
        chunk=chunk,
        label="made up",
    )
    return records


def expected(evaluation):
    return np.array([[float(sample_seed(evaluation.seed, p, s) % 2 == 0) for s in range(4)] for p in range(10)])


def test_every_sample_has_its_own_seed_and_the_summary_counts_them(tmp_path):
    evaluation, engine = Evaluation(bootstrap=200, seed=5), SeededEngine()
    records = draw(engine, tmp_path / "own.jsonl", evaluation)
    assert [len(prompts) for prompts, _ in engine.calls] == [7, 7, 7, 7, 7, 5]
    assert len({s for _, seeds in engine.calls for s in seeds}) == 40
    scores = records.scores(10, 4)
    assert (scores == expected(evaluation)).all() and 0 < scores.mean() < 1
    summary = summarise(records, 10, evaluation, mode="w4a4")
    right = int(scores.sum())
    assert summary["pass_at_1"] == pytest.approx(right / 40)
    assert summary["statuses"] == {"correct": right, "wrong": 40 - right}
    assert summary["ci_low"] <= summary["pass_at_1"] <= summary["ci_high"]
    assert summary["per_problem"] == pytest.approx(scores.mean(axis=1).tolist())
    assert summary["pass_at_k"].keys() == {"1", "2", "4"}
    assert summary["pass_at_k"]["4"] == pytest.approx((scores.max(axis=1)).mean())
    assert (summary["tokens_mean"], summary["truncated_share"], summary["logprob_mean"]) == (2.0, 0.0, -0.5)


@pytest.mark.parametrize("dies_at", [1, 3, 6])
def test_a_killed_evaluation_repeats_no_finished_chunk(tmp_path, dies_at):
    evaluation, path = Evaluation(), tmp_path / "own.jsonl"
    first, second = SeededEngine(dies_at), SeededEngine()
    with pytest.raises(KeyboardInterrupt):
        draw(first, path, evaluation)
    records = draw(second, path, evaluation)
    finished = {s for _, seeds in first.calls[:-1] for s in seeds}
    again = [s for _, seeds in second.calls for s in seeds]
    assert not finished & set(again) and len(finished) + len(again) == 40
    assert (records.scores(10, 4) == expected(evaluation)).all()
    third = SeededEngine()
    draw(third, path, evaluation)
    assert third.calls == []


def test_an_engine_that_loses_a_sample_stops(tmp_path):
    class Lossy(SeededEngine):
        def generate(self, prompts, seeds):
            return super().generate(prompts, seeds)[:-1]

    with pytest.raises(RuntimeError, match="6 samples for 7 requests"):
        draw(Lossy(), tmp_path / "own.jsonl", Evaluation())


def test_non_finite_log_probs_stop_with_the_sample(tmp_path):
    class Broken(SeededEngine):
        def generate(self, prompts, seeds):
            return [Sample(s.token_ids, [float("nan"), -1.0], "stop") for s in super().generate(prompts, seeds)]

    with pytest.raises(ValueError, match=r"problem 0, sample 0: log-prob mean is nan"):
        draw(Broken(), tmp_path / "own.jsonl", Evaluation())


def test_cut_responses_are_counted(tmp_path):
    class Endless(SeededEngine):
        def generate(self, prompts, seeds):
            return [Sample([1] * 8, [-1.0] * 8, "length") for _ in prompts]

    records = draw(Endless(), tmp_path / "own.jsonl", Evaluation(bootstrap=10))
    summary = summarise(records, 10, Evaluation(bootstrap=10), mode="bf16")
    assert summary["truncated_share"] == 1.0 and summary["pass_at_1"] == 0.0
