"""Targets of the pinned data sets: what they plan, that nothing else plans them, and a fetch from a local copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from workflow_box import Box

from quads.data.benchmarks import load_spec, names


def test_plans(box: Box) -> None:
    assert box.count("fetch_benchmarks") == {"fetch_set": len(names("test"))}
    planned = [out for rule, out in box.plan("fetch_data") if rule == "fetch_set"]
    assert "results/data/deepmath_103k/manifest.json" in planned
    assert not any("lcbv5" in out for out in planned), "DeepCoder's lcbv5 is LiveCodeBench: never fetched unasked"
    assert box.count("decontaminate_data")["decontaminate"] == len(names("train")) - 1
    assert "fetch_set" not in box.count("toy_all")


def test_fetch_from_a_local_copy(box: Box) -> None:
    """hmmt_feb25 has no pinned file hash, so that made-up rows in its schema pass; a JSONL stands for the parquet."""
    copy = box.folder / "copy" / "hmmt_feb25" / "train-00000-of-00001.jsonl"
    copy.parent.mkdir(parents=True)
    rows = [{"problem_idx": i, "problem": f"Compute {i}/7.", "answer": f"\\frac{{{i}}}{{7}}"} for i in range(1, 31)]
    copy.write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = "results/data/hmmt_feb25/manifest.json"
    done = box.run(target, "--config", "local=copy")
    manifest = json.loads((box.folder / target).read_text())
    assert manifest["rows"] == 30 and manifest["gold_checked"]
    assert (
        box.folder / "configs/data_locks/hmmt_feb25.json"
    ).is_file() and "commit that file" in done.stdout + done.stderr
    # A local copy is where the rows came from, not what they are: without it nothing is fetched again.
    assert box.count(target) == {}


@pytest.mark.parametrize("name", names())
def test_documentation_names_every_pin(name: str) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md").read_text()
    spec = load_spec(name)
    assert f"`{name}`" in text and spec.revision in text and str(spec.rows) in text
