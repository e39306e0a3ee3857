"""The tests of one coding problem, and the three formats in which they come.

    kind       "stdin" (a whole program, text in and out) or "functional" (a method, JSON arguments and JSON result)
    tests      (input, output) pairs; functional input holds one JSON value a line, one line an argument
    function   name of the method for functional tasks, None for stdin

Formats read by `Task.parse` (JSON text or the decoded object):
    {"mode": "stdin" | "functional", "tests": [{"input", "output"}...], "fn_name"}   case files, ground_truth columns
    [{"input", "output", "testtype"}...]                                             LiveCodeBench's test lists
    {"inputs": [...], "outputs": [...], "fn_name"}                                   LCB runner, PRIME, TACO

A task without tests is refused: "all of none passed" would be right for every program (a public bug of graders that
take np.all of an empty list). No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from quads.rewards.code.compare import load_json

Kind = Literal["stdin", "functional"]


@dataclass(frozen=True)
class Example:
    """One test: the text given, the text expected."""

    input: str
    output: str


@dataclass(frozen=True)
class Task:
    """Tests of one problem. Raises ValueError on an empty or contradictory one."""

    kind: Kind
    tests: tuple[Example, ...]
    function: str | None = None

    def __post_init__(self) -> None:
        if not self.tests:
            raise ValueError("a task without tests: every program would pass; check how its rows were decoded")
        if self.kind not in ("stdin", "functional"):
            raise ValueError(f"kind={self.kind!r}: expected 'stdin' or 'functional'")
        if (self.kind == "functional") != (self.function is not None):
            raise ValueError(f"kind={self.kind!r} with function={self.function!r}: functional tasks need a name")
        if self.function is not None and not self.function.isidentifier():
            raise ValueError(f"function={self.function!r} is not a Python name")
        if self.kind == "functional":
            for i, test in enumerate(self.tests):
                for text in [*argument_lines(test.input), test.output]:
                    _check_json(text, i)

    @classmethod
    def parse(cls, source: str | Mapping[str, Any] | Sequence[Any], function: str | None = None) -> Task:
        """Read one of the formats above. Raises ValueError naming what is missing."""
        data: Any = json.loads(source) if isinstance(source, str) else source
        if isinstance(data, Mapping):
            function = data.get("fn_name") or data.get("func_name") or function
            kind: Kind = data.get("mode") or ("functional" if function else "stdin")
            if "tests" in data:
                rows = data["tests"]
            elif "inputs" in data and "outputs" in data:
                rows = _pairs(data["inputs"], data["outputs"])
            else:
                raise ValueError(f"tests with fields {sorted(data)}: expected 'tests', or 'inputs' and 'outputs'")
        else:
            rows, kind = data, "functional" if function else "stdin"
        kinds = {row["testtype"] for row in rows if "testtype" in row}
        if kinds - {kind}:
            raise ValueError(f"tests of type {sorted(kinds)} in a {kind} task (method name: {function!r})")
        tests = tuple(Example(_text(row["input"]), _text(row["output"])) for row in rows)
        return cls(kind, tests, function if kind == "functional" else None)

    def bounded(self, count: int) -> Task:
        """At most `count` tests, for training rewards: the first two (public ones come first), then the longest."""
        if count < 1:
            raise ValueError(f"count={count}: expected at least one test")
        if len(self.tests) <= count:
            return self
        rest = sorted(range(2, len(self.tests)), key=lambda i: (-len(self.tests[i].input), i))
        chosen = sorted([0, 1][:count] + rest[: max(0, count - 2)])
        return replace(self, tests=tuple(self.tests[i] for i in chosen))


def argument_lines(text: str) -> list[str]:
    """The JSON lines of a functional input (trailing blank lines dropped: they are no argument)."""
    lines = text.split("\n")
    while len(lines) > 1 and not lines[-1].strip():
        lines.pop()
    return lines


def _pairs(inputs: Sequence[Any], outputs: Sequence[Any]) -> list[dict[str, Any]]:
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs but {len(outputs)} outputs")
    return [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise ValueError(f"a test holds {type(value).__name__}: expected text or a list of lines")


def _check_json(text: str, test: int) -> None:
    try:
        load_json(text)
    except ValueError as error:
        raise ValueError(f"test {test} of a functional task is not JSON ({error}): {text[:80]!r}") from error
