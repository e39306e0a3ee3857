"""Collecting samples with an engine made of arithmetic: seeds, chunks, kills, shards."""

import pytest
from made_up_samples import SeededEngine, decode, prompts_of, question

from quads.evaluation.generations import Shard, Store, sample_seed
from quads.evaluation.sampling import Sample, collect, missing, wanted

QUESTIONS = [question("chain", i) for i in range(10)]
PROMPTS = prompts_of(QUESTIONS)
ALL = wanted({i: p.request for i, p in PROMPTS.items()}, {q.id: q.samples for q in QUESTIONS})


def draw(engine, folder, shard=None, chunk=7):
    store = Store.open(folder, "w4a4", {"model": "made up"}, shard)
    todo = missing(store, ALL, shard)
    collect(engine, todo, PROMPTS, store, seed=5, decode=decode, chunk=chunk, label="made up")
    return store


def test_every_sample_has_its_own_seed_and_chunk(tmp_path):
    engine = SeededEngine()
    store = draw(engine, tmp_path)
    assert [len(prompts) for prompts, _ in engine.calls] == [7, 7, 7, 7, 7, 5]
    assert len({s for _, seeds in engine.calls for s in seeds}) == 40
    for (problem, sample, _), g in store.done.items():
        assert g.seed == sample_seed(5, problem, sample)
        right = g.text == str((int(problem.split("/")[1]) + 1) % 10)
        assert right == (g.seed % 2 == 0)
        assert (g.tokens, g.finish_reason, g.logprob_mean) == (2, "stop", -0.5)


@pytest.mark.parametrize("dies_at", [1, 3, 6])
def test_a_killed_evaluation_repeats_no_finished_chunk(tmp_path, dies_at):
    whole = draw(SeededEngine(), tmp_path / "whole")
    first, second = SeededEngine(dies_at), SeededEngine()
    with pytest.raises(KeyboardInterrupt):
        draw(first, tmp_path / "killed")
    store = draw(second, tmp_path / "killed")
    finished = {s for _, seeds in first.calls[:-1] for s in seeds}
    again = [s for _, seeds in second.calls for s in seeds]
    assert not finished & set(again) and len(finished) + len(again) == 40
    assert store.path.read_bytes() == whole.path.read_bytes()
    third = SeededEngine()
    draw(third, tmp_path / "killed")
    assert third.calls == []


def test_shards_together_draw_what_one_run_draws(tmp_path):
    whole = draw(SeededEngine(), tmp_path / "whole")
    engines = [SeededEngine() for _ in range(3)]
    for i, engine in enumerate(engines):
        draw(engine, tmp_path / "parts", Shard(i, 3))
    assert sum(len(seeds) for e in engines for _, seeds in e.calls) == 40
    assert Store.read(tmp_path / "parts", "w4a4", {"model": "made up"}).done == whole.done


def test_more_samples_draw_only_the_new_ones(tmp_path):
    draw(SeededEngine(), tmp_path)
    more = wanted({i: p.request for i, p in PROMPTS.items()}, {q.id: 6 for q in QUESTIONS})
    store = Store.open(tmp_path, "w4a4", {"model": "made up"})
    assert [(w.problem, w.sample) for w in missing(store, more)] == [(q.id, s) for q in QUESTIONS for s in (4, 5)]


def test_an_engine_that_loses_a_sample_stops(tmp_path):
    class Lossy(SeededEngine):
        def generate(self, prompts, seeds):
            return super().generate(prompts, seeds)[:-1]

    with pytest.raises(RuntimeError, match="6 samples for 7 requests"):
        draw(Lossy(), tmp_path)


def test_non_finite_log_probs_stop_with_the_sample(tmp_path):
    class Broken(SeededEngine):
        def generate(self, prompts, seeds):
            return [Sample(s.token_ids, [float("nan"), -1.0], "stop") for s in super().generate(prompts, seeds)]

    with pytest.raises(ValueError, match=r"problem chain/0, sample 0: log-prob mean is nan"):
        draw(Broken(), tmp_path)
