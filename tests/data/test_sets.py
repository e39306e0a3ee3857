"""Training rows from pinned sets: what is drawn, what is held out, what is refused; made-up decontaminated sets."""

import hashlib
import json
from pathlib import Path

import pytest

from quads.config import Data
from quads.data import build, sets
from quads.files import ResultFileError
from quads.rewards.registry import grader


def write_set(fetched: Path, name: str, rows: list[dict]) -> None:
    folder = fetched / "decontaminated" / name
    folder.mkdir(parents=True)
    text = "".join(json.dumps(r) + "\n" for r in rows).encode()
    (folder / "rows.jsonl").write_bytes(text)
    report = {"kept": len(rows), "kept_sha256": hashlib.sha256(text).hexdigest()}
    (folder / "report.json").write_text(json.dumps(report))


def math_row(i: int) -> dict:
    return {"id": f"m{i}", "problem": f"What is {i} + {i}?", "answer": str(2 * i)}


def code_row(i: int) -> dict:
    tests = [{"input": f"{j}\n" * (j + 1), "output": f"{j + i}\n", "testtype": "stdin"} for j in range(9)]
    return {"id": f"c{i}", "question": f"Add {i}.", "starter_code": "", "func_name": None, "tests": tests}


@pytest.fixture
def fetched(tmp_path: Path) -> Path:
    write_set(tmp_path, "deepmath_103k", [math_row(i) for i in range(30)])
    write_set(tmp_path, "deepcoder_taco", [code_row(i) for i in range(10)])
    return tmp_path


def data(**changes: object) -> Data:
    values = {"sets": ("deepmath_103k", "deepcoder_taco"), "train_prompts": 20, "eval_prompts": 8}
    return Data.model_validate({**values, "calibration_prompts": 5, "tests_per_program": 4, **changes})


def key(row: dict) -> tuple[str, str]:
    origin = row.get("extra_info", row)
    return origin["set"], origin["id"]


def test_splits_are_disjoint_and_complete(fetched: Path) -> None:
    rows = sets.build(data(), fetched)
    assert {split: len(r) for split, r in rows.items()} == {"train": 20, "eval": 8, "calibration": 5}
    keys = [key(row) for split in rows.values() for row in split]
    assert len(set(keys)) == len(keys) == 33
    assert {name for name, _ in keys} == {"deepmath_103k", "deepcoder_taco"}


def test_a_longer_train_split_holds_out_the_same_rows(fetched: Path) -> None:
    short, long = sets.build(data(), fetched), sets.build(data(train_prompts=27), fetched)
    assert short["eval"] == long["eval"] and short["calibration"] == long["calibration"]
    assert long["train"][:20] == short["train"]
    assert sets.build(data(seed=7), fetched)["eval"] != short["eval"]


def test_rows_are_what_their_grader_reads(fetched: Path) -> None:
    rows = sets.build(data(), fetched)
    math = next(r for r in rows["train"] if r["data_source"] == "math")
    number = int(math["extra_info"]["id"][1:])
    assert math["reward_model"]["ground_truth"] == str(2 * number)
    assert f"What is {number} + {number}?" in math["prompt"][0]["content"]
    assert grader("math")(f"\\boxed{{{2 * number}}}", math["reward_model"]["ground_truth"], True).status == "correct"
    code = next(r for r in rows["train"] if r["data_source"] == "code")
    truth = json.loads(code["reward_model"]["ground_truth"])
    assert len(truth["tests"]) == 4 and truth["tests"][0]["input"] == "0\n"
    # the longest inputs are kept beside the first two
    assert max(len(t["input"]) for t in truth["tests"]) == 18


def test_rows_survive_the_parquet_file(fetched: Path, tmp_path: Path) -> None:
    rows = sets.build(data(), fetched)
    build.write(rows, tmp_path / "out")
    assert build.read(tmp_path / "out" / "train.parquet") == rows["train"]
    manifest = build.manifest(data(), rows, sets.sources(data(), fetched))
    assert set(manifest["sources"]) == {"deepmath_103k", "deepcoder_taco"} and "vocabulary" not in manifest


def test_too_few_rows_are_refused(fetched: Path) -> None:
    with pytest.raises(ValueError, match=r"asks for 53 prompts.*hold 40 \(deepmath_103k 30, deepcoder_taco 10\)"):
        sets.build(data(train_prompts=40), fetched)


def test_a_set_that_was_not_decontaminated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultFileError, match=r"decontamination report.*missing|missing"):
        sets.build(data(), tmp_path)


def test_changed_rows_are_refused(fetched: Path) -> None:
    rows = fetched / "decontaminated" / "deepmath_103k" / "rows.jsonl"
    rows.write_text(rows.read_text().replace('"answer": "2"', '"answer": "3"'))
    with pytest.raises(ValueError, match="its hash is not the report's"):
        sets.build(data(), fetched)


def test_a_problem_that_occurs_twice_is_drawn_once(tmp_path: Path) -> None:
    """A training set is public and its parts overlap: a held-out problem must not be trained on under another id."""
    twice = [{**math_row(i), "problem": f"  what IS {i}\n+ {i}? "} for i in range(30)]
    write_set(tmp_path, "deepmath_103k", [*(math_row(i) for i in range(30)), *twice])
    write_set(tmp_path, "dapo_math_17k", [math_row(i) for i in range(25, 40)])
    names = ("deepmath_103k", "dapo_math_17k")
    rows = sets.build(data(sets=names, train_prompts=27), tmp_path)
    texts = [" ".join(r["prompt"][0]["content"].casefold().split()) for split in rows.values() for r in split]
    assert len(texts) == 40 and len(set(texts)) == 40
    with pytest.raises(ValueError, match=r"hold 40 \(deepmath_103k 30, dapo_math_17k 10\)"):
        sets.build(data(sets=names, train_prompts=28), tmp_path)


def test_a_set_named_twice_or_unknown_is_refused(fetched: Path) -> None:
    with pytest.raises(ValueError, match="lists a set twice"):
        data(sets=("deepmath_103k", "deepmath_103k"))
    with pytest.raises(ValueError, match="no training set 'aime24'; known: "):
        sets.build(data(sets=("aime24",)), fetched)
