"""Rows in each set's real schema, all of them written for these tests: no row of a published set is in here."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from quads.data.benchmarks.spec import FilePin, Spec, Window, load_spec

Row = dict[str, Any]
SAMPLE = Path(__file__).with_name("lcb_like_sample.jsonl")
NOUNS = "pears kites coins tiles boats lamps drums maps nails ropes".split()


def problem(number: int) -> str:
    noun = NOUNS[number % len(NOUNS)]
    price = f"$\\frac{{{number + 3}}}{{7}}$"
    return f"Shop {number} sells {number + 2} {noun} a day at {price} each. How much is that?\nSimplify."


def aime24_row(number: int) -> Row:
    """Columns of HuggingFaceH4/aime_2024: the answer is text with leading zeros."""
    answer = f"{number * 7 % 1000:03d}"
    return {
        "id": 60 + number,
        "problem": problem(number),
        "solution": "...",
        "answer": answer,
        "url": "",
        "year": "2024",
    }


def matharena_row(number: int, answer: Any) -> Row:
    """Columns of the MathArena sets: problem_idx from 1, answer an integer (AIME) or text (HMMT)."""
    return {"problem_idx": number + 1, "answer": answer, "problem": problem(number), "problem_type": ["Algebra"]}


def hmmt_answer(number: int) -> str:
    return ["103", "\\frac{1}{576}", "2^{25} \\cdot 26!", "-984, 4", "\\frac{9 \\sqrt{23}}{23}"][number % 5]


def deepmath_row(number: int) -> Row:
    more = dict.fromkeys(("r1_solution_1", "r1_solution_2", "r1_solution_3"), "long")
    return {"question": problem(number), "final_answer": "\\dfrac{1}{3}", "difficulty": 7.0, "topic": "Algebra", **more}


def dapo_row(number: int) -> Row:
    """Columns of open-r1/DAPO-Math-17k-Processed."""
    truth = {"ground_truth": str(number), "style": "rule-lighteval/MATH_v2"}
    return {
        "prompt": problem(number),
        "solution": str(number),
        "data_source": "math_dapo",
        "source_prompt": [{"content": problem(number), "role": "user"}],
        "ability": "MATH",
        "reward_model": truth,
        "extra_info": {"index": f"uuid-{number}"},
    }


def taco_row(number: int) -> Row:
    tests = {"inputs": [f"{number}\n", ["1", "2"]], "outputs": [f"{number}\n", ["3", ""]]}
    return {"problem": f"Read a number and print it {number} times.", "solutions": ["pass"], "tests": json.dumps(tests)}


def lcb_rows() -> list[Row]:
    """Eight rows in LiveCodeBench's exact schema and encoding."""
    return [json.loads(line) for line in SAMPLE.read_text().splitlines()]


def packed(tests: Any) -> str:
    """Tests as LiveCodeBench packs private ones."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


RAW = {
    "aime24": [aime24_row(i) for i in range(30)],
    "aime25": [matharena_row(i, i * 33) for i in range(30)],
    "hmmt_feb25": [matharena_row(i, hmmt_answer(i)) for i in range(30)],
    "deepmath_103k": [deepmath_row(i) for i in range(40)],
    "dapo_math_17k": [dapo_row(i) for i in range(40)],
    "deepcoder_taco": [taco_row(i) for i in range(12)],
}


def made_up(name: str, rows: list[Row] | None = None, **changes: Any) -> Spec:
    """The pin of a real set with the counts of made-up rows and without hashes of real files."""
    spec = load_spec(name)
    count = len(RAW[name] if rows is None else rows) if name in RAW or rows is not None else 8
    pins = (FilePin(path=spec.files[-1].path, rows=count),)
    return spec.model_copy(update={"files": pins, "rows": count, **changes})


def lcb_spec(**changes: Any) -> Spec:
    """Release 6 with the eight sample rows in test6.jsonl."""
    return made_up("livecodebench_v6", **{"window": Window(release="release_v6"), **changes})


def write_raw(folder: Path, spec: Spec, rows: list[Row]) -> Path:
    """The rows as the hub holds them: parquet or JSONL, a pattern as two shards."""
    pin = spec.files[0].path
    parts = [rows[: len(rows) // 2], rows[len(rows) // 2 :]] if "*" in pin else [rows]
    for number, part in enumerate(parts):
        path = folder / pin.replace("*", f"{number:05d}-of-00002")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder
