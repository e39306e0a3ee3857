"""Raw rows of any layout to normalised rows.

    mathematics   {id, problem, answer, source, answer_type}
    code          {id, question, starter_code, func_name, tests, date, platform, difficulty}

Ids of mathematics are "<set>-<id field or row number>"; LiveCodeBench keeps its question ids, by which papers name
problems. answer_type "int": the answer went through the integer check; None: the grader reads the type off its form.
Contract: raises a RowError that names the set and the row; never repairs an answer except leading zeros. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quads.data.benchmarks import checks, livecodebench
from quads.data.benchmarks.errors import AnswerError, SchemaError
from quads.data.benchmarks.spec import Spec
from quads.data.training_sets import deepcoder

Row = dict[str, Any]


def columns(spec: Spec) -> list[str] | None:
    """Top-level columns that normalising needs, None for all."""
    if spec.fields is None:
        return None
    wanted = [spec.fields.id, spec.fields.problem, spec.fields.answer]
    return sorted({path.split(".")[0] for path in wanted if path is not None})


def normaliser(spec: Spec) -> Callable[[Row, int], Row]:
    """The function (raw row, its number in the set) -> normalised row. It raises RowError."""
    if spec.layout == "livecodebench":
        return lambda raw, number: livecodebench.normalise(raw, f"{spec.name} {raw.get('question_id', number)}")
    if spec.layout == "deepcoder":
        return lambda raw, number: deepcoder.normalise(raw, f"{spec.name}-{number}")
    return lambda raw, number: math_row(spec, raw, number)


def math_row(spec: Spec, raw: Row, number: int) -> Row:
    """One mathematical row. Raises RowError."""
    assert spec.fields is not None, "layout math has fields: Spec checks it"
    own = _at(raw, spec.fields.id, spec.name) if spec.fields.id else number
    row = f"{spec.name}-{own}"
    answer = _at(raw, spec.fields.answer, row)
    if spec.answer_type == "int":
        answer = checks.integer_answer(answer, row, spec.answer_range)
    elif isinstance(answer, bool) or not isinstance(answer, str | int) or not str(answer).strip():
        raise AnswerError(
            f"{row}: the answer is {answer!r:.60} of type {type(answer).__name__}; expected text that is not empty"
        )
    return {
        "id": row,
        "problem": checks.clean_text(_at(raw, spec.fields.problem, row), "problem", row),
        "answer": checks.clean_text(str(answer).strip(), "answer", row),
        "source": spec.hub_id,
        "answer_type": spec.answer_type,
    }


def _at(raw: Row, path: str, row: str) -> Any:
    value: Any = raw
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            has = ", ".join(sorted(value)) if isinstance(value, dict) else type(value).__name__
            raise SchemaError(f"{row}: no field {path!r}; it has: {has}")
        value = value[key]
    return value
