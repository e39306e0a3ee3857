"""Rows of DeepCoder-Preview: one `problem` and `tests` as JSON text, in a format per source.

    primeintellect   [{"type": "stdin_stdout", "input", "output"}, ...]
    taco             {"inputs": [...], "outputs": [...]}
    lcbv5            [{"input", "output", "testtype": "stdin", ...}, ...]

Only programs that read standard input are taken. Functional tests are refused (SchemaError, so listed as dropped): two
of the sources wrap results in lists of one and the others do not, and guessing would reward wrong programs.
Contract: raises RowError; a list of lines becomes one text. No torch.
"""

from __future__ import annotations

import json
from typing import Any

from quads.data.benchmarks.checks import CODE_CONTROLS, clean_text
from quads.data.benchmarks.errors import EmptyTestsError, SchemaError

Row = dict[str, Any]
_STDIN = ("stdin", "stdin_stdout")


def normalise(raw: Row, row: str) -> Row:
    """One normalised row. Raises RowError."""
    if "problem" not in raw or "tests" not in raw:
        raise SchemaError(f"{row}: expected the fields problem and tests; it has {', '.join(sorted(raw))}")
    tests = _tests(raw["tests"], row)
    if not tests:
        raise EmptyTestsError(f"{row}: no tests; every program would pass")
    return {
        "id": row,
        "question": clean_text(raw["problem"], "problem", row, CODE_CONTROLS),
        "starter_code": raw.get("starter_code") or "",
        "func_name": None,
        "tests": tests,
        "date": _date(raw),
        "platform": None,
        "difficulty": None,
    }


def _tests(value: Any, row: str) -> list[Row]:
    try:
        tests = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise SchemaError(f"{row}: tests are not JSON ({error.msg})") from None
    if isinstance(tests, dict):
        if tests.get("fn_name"):
            raise SchemaError(f"{row}: functional tests ({tests['fn_name']}); only standard input is taken")
        inputs, outputs = tests.get("inputs"), tests.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise SchemaError(f"{row}: inputs and outputs are not two lists of one length")
        tests = [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]
    if not isinstance(tests, list):
        raise SchemaError(f"{row}: tests are {type(tests).__name__}; expected a list, or inputs and outputs")
    return [_test(test, row) for test in tests]


def _test(test: Any, row: str) -> Row:
    if not isinstance(test, dict) or "input" not in test or "output" not in test:
        raise SchemaError(f"{row}: a test is {test!r:.80}; expected input and output")
    kind = test.get("testtype") or test.get("type") or "stdin"
    if kind not in _STDIN or test.get("fn_name"):
        raise SchemaError(f"{row}: functional tests ({kind}); only standard input is taken")
    return {"input": _text(test["input"], row), "output": _text(test["output"], row), "testtype": "stdin"}


def _text(value: Any, row: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise SchemaError(f"{row}: a test holds {type(value).__name__}; expected text or a list of lines")


def _date(raw: Row) -> str | None:
    metadata = raw.get("metadata")
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except json.JSONDecodeError:
            metadata = None  # only the date is looked for, and a missing date is the strict case
    for place in (raw, metadata):
        if isinstance(place, dict) and isinstance(place.get("contest_date"), str):
            return str(place["contest_date"])
    return None
