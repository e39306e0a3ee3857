"""LiveCodeBench's rules for "the same output". They run in the grading process, never beside the program.

stdin (`same_output`): strip both texts, split at "\\n", strip every line; equal numbers of lines; each pair of lines is
equal as text, or equal token by token as `Decimal`. So 1.0 = 1, 1_000 = 1000, "1   2" = "1 2", but YES != Yes and
0.30000000000000004 != 0.3: there is no tolerance.
functional (`same_value`): prediction == expected in Python, after the outermost tuple became a list. The prediction
arrives as text in the encoding below, so an object of the program (with an `__eq__` that is always true) never takes
part in a comparison; only plain values do.

    value   := null | bool | float | string | ["i", hex text] | ["l", [value...]] | ["t", [value...]]
             | ["d", [[value, value]...]] | ["q", hex numerator, hex denominator] | ["x", type name]

"t" is a nested tuple, which equals no JSON value; "q" is an exact rational (Decimal, Fraction); "x" anything else.
Source: lcb_runner/evaluation/testing_util.py at 28fef95, rules only.
"""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

# Converting text to Decimal costs more than linear time in the digits; no answer of a test needs more.
LONGEST_TOKEN = 200_000


class Foreign:
    """A value without a JSON counterpart: equal to nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"


def same_output(printed: str, expected: str) -> bool:
    """Whether standard output `printed` counts as `expected`."""
    ours, theirs = _lines(printed), _lines(expected)
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def same_value(encoded: str, expected: str) -> bool:
    """Whether the encoded prediction equals the JSON text `expected`. False if `encoded` cannot be decoded.

    Raises ValueError if `expected` is not JSON: a fault of the test, not of the program.
    """
    want = load_json(expected)
    try:
        got = decode(json.loads(encoded))
        return bool((list(got) if isinstance(got, tuple) else got) == want)
    except (ValueError, RecursionError, TypeError, IndexError, KeyError, OverflowError):
        return False


def load_json(text: str) -> Any:
    """json.loads without Python's 4300-digit limit, which answers of big-number problems exceed."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 4000 else int(Decimal(digits)))


def decode(value: Any) -> Any:
    """A plain value from its encoding. Raises ValueError or RecursionError on what a forging program sends."""
    if not isinstance(value, list):
        return value
    kind = value[0]
    if kind == "i":
        return int(value[1], 16)
    if kind == "l":
        return [decode(v) for v in value[1]]
    if kind == "t":
        return tuple(decode(v) for v in value[1])
    if kind == "d":
        return {decode(k): decode(v) for k, v in value[1]}
    if kind == "q":
        return Fraction(int(value[1], 16), int(value[2], 16) or 1)
    if kind == "x":
        return Foreign(str(value[1]))
    raise ValueError(f"unknown tag {kind!r} in an encoded value")


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_line(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    a, b = ours.split(), theirs.split()
    if len(a) != len(b):
        return False
    try:
        return all(_number(x) == _number(y) for x, y in zip(a, b, strict=True))
    except InvalidOperation:
        return False


def _number(token: str) -> Decimal:
    if len(token) > LONGEST_TOKEN:
        raise InvalidOperation
    return Decimal(token)
