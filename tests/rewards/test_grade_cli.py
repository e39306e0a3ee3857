"""`python -m quads.rewards.grade`: verdict lines, order, summary, exit status, bad input."""

import json
from pathlib import Path

import pytest

from quads.rewards.grade import main

MATH = Path(__file__).parent / "math" / "cases.jsonl"


def run(tmp_path, capsys, kind, lines):
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    status = main([kind, str(path)])
    captured = capsys.readouterr()
    return status, [json.loads(line) for line in captured.out.splitlines()], captured.err


def test_every_math_case_gets_its_verdict_in_order(capsys):
    assert main(["math", str(MATH)]) == 0
    captured = capsys.readouterr()
    got = [json.loads(line) for line in captured.out.splitlines()]
    want = [json.loads(line) for line in MATH.read_text().splitlines()]
    assert [v["id"] for v in got] == [c["id"] for c in want]
    assert [v["id"] for v, c in zip(got, want, strict=True) if (v["score"] == 1) != c["correct"]] == []
    assert set(got[0]) == {"id", "score", "status", "extracted", "detail"}
    assert captured.err.startswith("150 responses, mean score 0.5600: correct 84")


def test_an_unreadable_gold_is_counted_and_changes_the_exit_status(tmp_path, capsys):
    status, got, summary = run(tmp_path, capsys, "math", [{"id": 1, "gold": "\\frac{", "response": "\\boxed{2}"}])
    assert (status, got[0]["status"]) == (3, "grader_error")
    assert "grader_error 1" in summary


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{\n"], "line 1: not JSON"),
        ([{"id": 1, "gold": "2"}], "line 1: lacks response"),
        ([], "no cases"),
        (
            [{"id": 1, "gold": "2", "response": "", "answer_type": "number"}],
            "answer_type 'number' is unknown; known: int",
        ),
    ],
)
def test_bad_input_is_named(tmp_path, capsys, lines, words):
    status, _, error = run(tmp_path, capsys, "math", lines)
    assert status == 2
    assert words in error


def test_code_cases_carry_both_verdicts_and_the_sandbox(tmp_path, capsys):
    case = {"mode": "stdin", "tests": [{"input": "2\n", "output": "4\n"}]}
    right, wrong = "```python\nprint(int(input()) * 2)\n```", "```python\nprint(5)\n```"
    lines = [{"id": "a", "response": right, **case}, {"id": "b", "response": wrong, **case}]
    status, got, _ = run(tmp_path, capsys, "code", lines)
    assert status == 0
    assert [(v["status"], v["official"], v["sandbox"]) for v in got] == [
        ("correct", "pass", "bwrap"),
        ("wrong", "fail", "bwrap"),
    ]
