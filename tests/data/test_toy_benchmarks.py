"""The toy's benchmarks: what their names promise, new problems only, adapters that add nothing."""

import json

import numpy as np
import pytest

from quads import make_benchmarks
from quads.config import Benchmarks, Data
from quads.data import build, chain
from quads.data.toy_benchmarks import ADAPTERS, build_rows, is_toy
from quads.rewards import code, math

DATA = Data(train_prompts=50, eval_prompts=20, calibration_prompts=10)
NAMES = ("chain_depth2", "chain_depth4", "chain_depth6", "chain_code")
BENCHMARKS = Benchmarks(names=NAMES, problems=40, code_problems=10)


@pytest.fixture(scope="module")
def rows():
    return build_rows(DATA, BENCHMARKS)


def prompts(rows):
    return [r["prompt"][0]["content"] for r in rows]


def result(prompt, drop=0, start=None):
    """The last digit by Python's own arithmetic; the first `drop` operations left out, beginning with `start`."""
    value = int(prompt[1]) if start is None else start
    operations = prompt[2:-1]
    for i in range(2 * drop, len(operations), 2):
        value = {"+": value + int(operations[i + 1]), "-": value - int(operations[i + 1])}.get(
            operations[i], value * int(operations[i + 1])
        )
    return value % 10


@pytest.mark.parametrize("depth", [2, 4, 6])
def test_the_result_depends_on_the_last_operations_only(rows, depth):
    own = rows[f"chain_depth{depth}"]
    assert len(own) == 40
    forgotten = depends = 0
    for row, prompt in zip(own, prompts(own), strict=True):
        assert len(prompt) == 3 + 2 * DATA.operations and row["answer"] == str(result(prompt))
        first = DATA.operations - depth
        if depth < DATA.operations:
            assert prompt[2 + 2 * (first - 1) : 2 + 2 * first] == "*0"
            # whatever stood before the last `depth` operations, the value there was 0
            forgotten += all(result(prompt, drop=first, start=0) == int(row["answer"]) for _ in range(1))
        assert "*0" not in prompt[2 + 2 * first : -1]
        depends += len({result(prompt, drop=first, start=s) for s in range(10)}) > 1
    assert forgotten == (40 if depth < DATA.operations else 0)
    assert depends > 20  # the value before them would matter, were it not for the *0


def test_no_problem_is_known_or_twice(rows):
    seen = {chain.text_of(p) for s in build.draw_splits(DATA).values() for p in chain.prompt_ids(s)}
    own = [p for name in NAMES for p in prompts(rows[name])]
    assert len(set(own)) == len(own) == 130 and not seen & set(own)


def test_the_same_settings_give_the_same_rows_and_names_are_independent(rows):
    assert build_rows(DATA, BENCHMARKS) == rows
    alone = build_rows(DATA, BENCHMARKS.model_copy(update={"names": ("chain_depth4",)}))
    assert alone["chain_depth4"] == rows["chain_depth4"]
    other = build_rows(DATA, BENCHMARKS.model_copy(update={"seed": 1}))
    assert all(other[n] != rows[n] for n in NAMES)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("chain_depth7", DATA, r"chain_depth7: data\.operations=6"),
        ("chain_depth2", DATA.model_copy(update={"operators": "+-"}), r"needs '\*'"),
        ("chain_depth1", DATA.model_copy(update={"operations": 1}), "found .* of 40"),
    ],
)
def test_impossible_depths_say_why(name, data, said):
    small = data.model_copy(update={"train_prompts": 12, "eval_prompts": 5, "calibration_prompts": 3})
    with pytest.raises(ValueError, match=said):
        build_rows(small, BENCHMARKS.model_copy(update={"names": (name,), "problems": 400 if "1" in name else 40}))


def test_names():
    assert is_toy("chain_code") and is_toy("chain_depth12")
    assert not any(is_toy(n) for n in ("chain", "aime25", "chain_depth0", "chain_depth2x", "chain_depth"))


def test_boxed_answers_go_through_the_mathematical_grader(rows):
    row = rows["chain_depth6"][0]
    wrong = str((int(row["answer"]) + 1) % 10)
    for text, finished, status in (
        ("12345" + row["answer"], True, "correct"),
        ("12345" + wrong, True, "wrong"),
        ("12345" + row["answer"], False, "no_answer"),
        ("", True, "no_answer"),
        ("123+5", True, "no_answer"),
    ):
        response = ADAPTERS["boxed_last"](text, finished)
        assert math.grade(response, row["answer"], finished).status == status, response


def test_programs_go_through_extraction(rows):
    task = code.Task.parse(rows["chain_code"][0]["answer"])
    digits = task.tests[0].output.strip()
    assert len(digits) == DATA.operations and task.kind == "stdin"
    program = code.extract_program(ADAPTERS["print_all"](digits, True))
    assert program == f'print("{digits}")'
    assert code.extract_program(ADAPTERS["print_all"](digits, False)) == ""
    # nothing a response holds can leave the string
    for symbol in chain.SYMBOLS:
        assert json.loads(code.extract_program(ADAPTERS["print_all"](symbol, True))[6:-1]) == symbol


def test_stage_writes_files_and_manifest(tmp_path):
    (tmp_path / "tiny.yaml").write_text(
        "name: tiny\ntitle: Tiny\narms: [bf16]\ndata: {eval_prompts: 10}\n"
        "evaluation: {benchmarks: {names: [chain_depth2, chain_code], problems: 5, code_problems: 3}}\n"
    )
    out = tmp_path / "out"
    assert make_benchmarks.main(["--experiment", str(tmp_path / "tiny.yaml"), "--out", str(out)]) == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["rows"] == {"chain_depth2": 5, "chain_code": 3}
    for name, digest in manifest["sha256"].items():
        assert build.content_hash(build.read(out / f"{name}.parquet")) == digest
    assert np.all([len(d) == 64 for d in manifest["sha256"].values()])
