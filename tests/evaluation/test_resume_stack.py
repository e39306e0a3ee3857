"""SIGKILL in the middle of generation, then again: the same samples as an uninterrupted run, and regrading, and shards.

Real vLLM on a tiny random checkpoint, each stage in its own process, as `make toy` starts it.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tolerances import TOLERANCES

from quads.config import load_arm, load_experiment, resolve_run
from quads.evaluation.records import read_records
from quads.toy.model import make_model
from quads.toy.tokenizer import make_tokenizer

pytestmark = pytest.mark.stack

EXPERIMENT = """
name: tiny
title: Tiny
arms: [w4a4]
data: {train_prompts: 720, eval_prompts: 40, calibration_prompts: 8}
runtime: {max_sequences: 4}
evaluation:
  samples_per_problem: 8
  engines: [own]
  bootstrap: 50
  benchmarks: {names: [chain_depth6, chain_code], problems: 10, code_problems: 2}
"""
ARM = "name: w4a4\ntitle: W4A4\nrollout: {weight: nvfp4, activation: nvfp4}\n"


class Place:
    """A prepared experiment, and the stages run on it."""

    def __init__(self, folder):
        self.folder = folder
        self.configs = folder / "configs"
        (self.configs / "arms").mkdir(parents=True)
        (self.configs / "tiny.yaml").write_text(EXPERIMENT)
        (self.configs / "arms" / "w4a4.yaml").write_text(ARM)
        experiment = load_experiment("tiny", self.configs)
        make_model(experiment.model, seed=0).save_pretrained(folder / "model")
        make_tokenizer().save_pretrained(folder / "model")
        run = resolve_run(experiment, load_arm("w4a4", self.configs), 0)
        (folder / "train").mkdir()
        trained = {"run_id": run.id, "checkpoint": str(folder / "model"), "rac_masks": None}
        (folder / "train" / "result.json").write_text(json.dumps(trained))
        for stage, out in (("prepare", "data"), ("make_benchmarks", "benchmarks")):
            self.run(stage, "--out", str(folder / out))

    def command(self, stage, *words):
        return [sys.executable, "-m", f"quads.{stage}", "--experiment", str(self.configs / "tiny.yaml"), *words]

    def run(self, stage, *words):
        done = subprocess.run(self.command(stage, *words), capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stderr

    def words(self, name, stage="evaluate"):
        folders = {n: self.folder / n for n in ("data", "benchmarks")}
        folders |= {"cache": self.folder / name / "cache", "out": self.folder / name / "out"}
        if stage == "evaluate":
            folders["train"] = self.folder / "train"
        said = [w for n, path in folders.items() for w in (f"--{n}", str(path))]
        return [*said, *(["--arm", "w4a4", "--seed", "0"] if stage == "evaluate" else [])]

    def samples(self, name):
        return sum(max(0, p.read_bytes().count(b"\n") - 1) for p in (self.folder / name / "cache").glob("*.jsonl"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = Place(tmp_path_factory.mktemp("resume"))
    place.run("evaluate", *place.words("whole"))
    return place


def same_but_for_rounding(a, b):
    """Everything equal; log-prob means within the rounding of another batch composition."""
    (header_a, rows_a), (header_b, rows_b) = read_records(a), read_records(b)
    assert header_a == header_b and len(rows_a) == len(rows_b) == 52 * 8
    largest = 0.0
    for x, y in zip(rows_a, rows_b, strict=True):
        largest = max(largest, abs(x.logprob_mean - y.logprob_mean))
        assert {**vars(x), "logprob_mean": 0} == {**vars(y), "logprob_mean": 0}
    assert largest <= TOLERANCES["resumed_logprob_mean"].limit


def test_a_killed_evaluation_resumes_to_the_same_records(place):
    total = 52 * 8
    process = subprocess.Popen(
        place.command("evaluate", *place.words("killed")),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 300
    while not 0 < place.samples("killed") < total:
        assert process.poll() is None and time.monotonic() < deadline, "ended before it could be killed"
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    left = place.samples("killed")
    assert 0 < left < total and not (place.folder / "killed" / "out" / "result.json").exists()
    said = place.run("evaluate", *place.words("killed"))
    assert f"{left} samples are already finished" in said and f"/{total - left} samples" in said
    same_but_for_rounding(*(place.folder / name / "out" / "own.jsonl" for name in ("whole", "killed")))


def test_a_complete_cache_starts_no_engine_and_regrading_gives_the_same_bytes(place):
    out = place.folder / "whole" / "out"
    before = (out / "own.jsonl").read_bytes()
    result = json.loads((out / "result.json").read_text())
    assert "no engine starts" in place.run("evaluate", *place.words("whole"))
    assert (out / "own.jsonl").read_bytes() == before
    for _ in range(2):
        (out / "own.jsonl").unlink()
        place.run("regrade", *place.words("whole", "regrade"))
        assert (out / "own.jsonl").read_bytes() == before
        again = json.loads((out / "result.json").read_text())
        assert again["engines"] == result["engines"]
    assert (out / "receipt_own.json").is_file() and result["sandbox"] == "bwrap"


def test_two_shards_merge_to_the_same_records(place):
    for i in (1, 0):
        place.run("evaluate", *place.words("shards"), "--shard", f"{i}/2")
    out = place.folder / "shards" / "out"
    assert not (out / "result.json").exists() and (out / "shard-0-of-2.json").is_file()
    place.run("regrade", *place.words("shards", "regrade"))
    same_but_for_rounding(out / "own.jsonl", place.folder / "whole" / "out" / "own.jsonl")
