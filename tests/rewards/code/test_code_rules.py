"""Extraction, comparison, task formats, LiveCodeBench rows, the verdict cache and the small interfaces."""

from __future__ import annotations

import base64
import json
import pickle
import time
import zlib
from contextlib import closing
from pathlib import Path

import pytest
from descriptors import open_below
from hypothesis import given
from hypothesis import strategies as st

from quads.rewards import grader as registered
from quads.rewards.code import (
    CodeGrader,
    Example,
    Limits,
    Sandbox,
    Task,
    as_ground_truth,
    extract_program,
    grade_stdin_program,
    grade_text,
)
from quads.rewards.code import grade as grade_module
from quads.rewards.code.compare import decode, same_output, same_value
from quads.rewards.code.rows import UnsafePickleError, decode_tests, task_from_row
from quads.rewards.code.runner import encode

ROWS = [json.loads(line) for line in (Path(__file__).parent / "lcb_like_sample.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("a\n```python\nx\n```\nb", "x"),
        ("```\n1\n```\ntext\n```py\n2\n\n3\n```", "2\n\n3"),
        ("```python\nx\n```\nand\n```python\ncut off", "and"),
        ("```python\nx", ""),
        ("x ``` y\nz\n   ```", "z"),
        ("``` ```", ""),
        ("", ""),
        ("```python\r\nx\r\n```\r\n", "x\r"),
    ],
)
def test_extraction(response: str, program: str) -> None:
    assert extract_program(response) == program


@given(st.lists(st.sampled_from(["a", "```", "```python", "", "` ``"]), max_size=12))
def test_extraction_is_what_stands_between_the_last_two_fences(lines: list[str]) -> None:
    fences = [i for i, line in enumerate(lines) if line.startswith("```")]
    want = "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) >= 2 else ""
    assert extract_program("\n".join(lines)) == want


def test_extraction_of_megabytes_is_fast() -> None:
    start = time.process_time()
    extract_program("```\n" * 2_000_000)
    extract_program("`" * 5_000_000)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3\n\n", "1 2\n3", True),
        (" 1   2 \n3", "1 2\n3", True),
        ("1.0 2e0\n3", "1 2\n3", True),
        ("1_000", "1000", True),
        ("inf", "Infinity", True),
        ("nan", "nan", True),
        ("nan", "NaN", False),
        ("0.30000000000000004", "0.3", False),
        ("50000000000000000", "50000000000000001", False),
        ("1 2 3", "1 2\n3", False),
        ("Yes", "YES", False),
        ("a  b", "a b", False),
        ("1 a", "1.0 a", False),
        ("1\n\n2", "1\n2", False),
        ("", "", True),
        ("", "0", False),
        ("5\r\n6", "5\n6", True),
        ("9" * 300_000, "1", False),
        ("-0", "0", True),
        ("snan", "1", False),
    ],
)
def test_output_rules(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=12,
)


@given(JSON, JSON)
def test_encoded_values_compare_as_in_python(ours: object, theirs: object) -> None:
    sent = json.dumps(encode(ours))
    assert decode(json.loads(sent)) == ours
    assert same_value(sent, json.dumps(theirs)) is bool(ours == theirs)
    assert same_value(sent, json.dumps(ours))


class AlwaysEqual(list):  # type: ignore[type-arg]
    """Equal to everything, where its own `__eq__` is asked."""

    def __eq__(self, other: object) -> bool:
        return True


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ((1, 2), "[1, 2]", True),
        ([(1, 2)], "[[1, 2]]", False),
        (AlwaysEqual(), "[1]", False),
        ({1: 2}, '{"1": 2}', False),
        (True, "1", True),
        ({1, 2}, "[1, 2]", False),
        (object(), "null", False),
    ],
)
def test_values_without_a_json_form(value: object, expected: str, same: bool) -> None:
    assert same_value(json.dumps(encode(value)), expected) is same


@pytest.mark.parametrize("sent", ["", "[", '["z", 1]', '["i", "x"]', '["d", [[["l", []], 1]]]', "[" * 100_000, '["l"]'])
def test_forged_encodings_are_wrong_and_not_an_error(sent: str) -> None:
    assert same_value(sent, "1") is False


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"mode": "stdin", "tests": []}, "without tests"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs but 0 outputs"),
        ({"something": 1}, "expected 'tests'"),
        ({"mode": "functional", "tests": [{"input": "1", "output": "1"}]}, "need a name"),
        ({"fn_name": "f", "tests": [{"input": "x", "output": "1"}]}, "not JSON"),
        ({"fn_name": "a b", "tests": [{"input": "1", "output": "1"}]}, "not a Python name"),
        ([{"input": "1", "output": "1", "testtype": "functional"}], "functional"),
    ],
)
def test_broken_tasks_are_refused(data: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Task.parse(json.dumps(data))


def test_task_formats_agree_and_come_back_from_ground_truth() -> None:
    want = Task("functional", (Example("1\n2", "3"),), "add")
    row = {"input": "1\n2", "output": "3", "testtype": "functional"}
    assert Task.parse([row], "add") == want
    assert Task.parse({"mode": "functional", "fn_name": "add", "tests": [row]}) == want
    assert Task.parse({"inputs": ["1\n2"], "outputs": ["3"], "fn_name": "add"}) == want
    assert Task.parse(as_ground_truth(want)) == want


def test_bounded_keeps_the_public_tests_and_the_longest() -> None:
    task = Task("stdin", tuple(Example("x" * n, "") for n in (1, 2, 3, 9, 4, 8)))
    assert [len(t.input) for t in task.bounded(4).tests] == [1, 2, 9, 8]
    assert len(task.bounded(1).tests) == 1 and task.bounded(6) == task


def test_rows_decode_and_their_tests_accept_a_right_program(grader: CodeGrader) -> None:
    tasks = {row["question_id"]: task_from_row(row) for row in ROWS}
    assert sorted(task.kind for task in tasks.values()) == ["functional"] * 3 + ["stdin"] * 5
    scale = "class Solution:\n    def scaleList(self, a, k): return [x * k for x in a]"
    even = "input()\nprint(sum(x for x in map(int, input().split()) if x % 2 == 0))"
    for name, program in (("toy_006", scale), ("toy_001", even)):
        task = tasks[name].bounded(5)
        result = grader.grade_program(program, task)
        assert (result.strict, result.official, result.passed) == ("pass", "pass", len(task.tests))


def payload(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_a_malicious_pickle_does_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return (Path.write_text, (tmp_path / "ran", "x"))  # type: ignore[return-value]

    with pytest.raises(UnsafePickleError, match="only text is accepted"):
        decode_tests(payload(Evil()))
    with pytest.raises(UnsafePickleError, match=r"builtins\.print"):
        task_from_row({**ROWS[0], "private_test_cases": payload(print)})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", ["", "no base64!", base64.b64encode(b"x").decode(), payload(["a list"])])
def test_undecodable_rows_are_an_error_and_not_an_empty_task(text: str) -> None:
    with pytest.raises(ValueError, match="toy_001"):
        task_from_row({**ROWS[0], "private_test_cases": text})


def test_cache_answers_only_what_it_was_asked(sandbox: Sandbox, tmp_path: Path) -> None:
    task, program = Task("stdin", (Example("", "ok"),)), "print('ok')"
    with (
        closing(CodeGrader(sandbox, cache_dir=tmp_path)) as first,
        closing(CodeGrader(sandbox, cache_dir=tmp_path)) as second,
        closing(CodeGrader(sandbox, cache_dir=tmp_path, official=False)) as strict,
    ):
        result = first.grade_program(program, task)
        assert not result.cached
        again = second.grade_program(program, task)
        assert again.cached and (again.strict, again.official) == ("pass", "pass")
        other = [
            first.grade_program(program + " ", task),
            first.grade_program(program, Task("stdin", (Example("", "ok"), Example("", "ok")))),
            first.grade_program(program, task, Limits(seconds=5)),
            strict.grade_program(program, task),
        ]
        assert not any(result.cached for result in other)
        assert open_below(tmp_path) == ["verdicts.sqlite"] * 3
    assert open_below(tmp_path) == []
    CodeGrader(sandbox).close()  # without a cache there is nothing to close


def test_failures_are_not_cached(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quads.rewards.code.sandbox import Outcome

    task = Task("stdin", (Example("", "ok"),))
    with closing(CodeGrader(sandbox, cache_dir=tmp_path, official=False)) as grader:
        with monkeypatch.context() as patch:
            patch.setattr(sandbox, "run", lambda *_: Outcome("infra", "made to fail"))
            assert grader.grade_program("print('ok')", task).grade.status == "infra_error"
        assert grader.grade_program("print('ok')", task).strict == "pass"


def test_the_small_interfaces(grader: CodeGrader, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "a, b = map(int, input().split())\nprint(a + b)"
    assert grade_stdin_program(program, [("1 2\n", "3\n"), ("4 5\n", "9\n")], grader).status == "correct"
    assert grade_stdin_program(program, [("1 2\n", "4\n")], grader).status == "wrong"
    monkeypatch.setattr(grade_module, "default_grader", lambda: grader)
    truth = as_ground_truth(Task("stdin", (Example("1 2", "3"),)))
    grade = registered("code")(f"```python\n{program}\n```", truth, finished=True)
    assert (grade.score, grade.status, grade.extracted) == (1.0, "correct", program)
    assert grade_text("no program", truth, finished=False).status == "no_answer"
    assert grade_text(program, "{}", finished=True).status == "grader_error"
