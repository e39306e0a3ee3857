r"""Checks on one row's text, answer and id.

    clean_text      \r\n becomes \n; then no control character but the allowed ones, no U+FFFD, no lone surrogate, no
                    line that begins with the rest of a LaTeX command whose \n was read as a line break
    integer_answer  "025" -> "25", 25 -> "25"; anything else than ASCII digits with a sign is refused
    Unique          ids and texts that were seen

Why: JSON files in circulation hold \frac, \triangle, \beta, \rightarrow and \neq with ONE backslash. They decode to
form feed, TAB, backspace, carriage return and line feed, look almost right, and change the problem. No torch.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from typing import Any

from quads.data.benchmarks.errors import AnswerError, ControlCharacterError, DuplicateError, SchemaError

# What is left of \neq, \nabla, \notin, \nexists, \ngeq, \nleq after "\n" became a line break. Words that English
# lines can begin with (\not, \nu, \nmid) are not in the list.
_BROKEN_LINE = re.compile(r"\n(?=(?:eq|abla|otin|exists|geq|leq)(?![A-Za-z]))")
_ESCAPES = {"\f": "\\f", "\t": "\\t", "\b": "\\b", "\r": "\\r", "\v": "\\v", "\a": "\\a"}
_COMMANDS = {
    "\f": "\\frac",
    "\t": "\\times or \\triangle",
    "\b": "\\beta",
    "\r": "\\rightarrow",
    "\v": "\\vec",
    "\a": "\\alpha",
}
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
TEXT_CONTROLS = "\n"
CODE_CONTROLS = "\n\t"


def clean_text(value: Any, field: str, row: str, allowed: str = TEXT_CONTROLS) -> str:
    """The text with Unix line ends. Raises SchemaError on an empty one, ControlCharacterError naming the character."""
    if not isinstance(value, str) or not value.strip():
        raise SchemaError(f"{row}: {field} is {value!r:.60}; expected text that is not empty")
    text = value.replace("\r\n", "\n")
    for position, character in enumerate(text):
        bad = unicodedata.category(character) in ("Cc", "Cs") or character == "\ufffd"
        if bad and character not in allowed:
            raise ControlCharacterError(_control_message(text, position, field, row))
    if broken := _BROKEN_LINE.search(text):
        raise ControlCharacterError(
            f"{row}: {field} has a line that begins with {text[broken.start() + 1 :][:8]!r}: LaTeX such as \\neq "
            "was written with one backslash and its \\n became a line break; use another copy of the set"
        )
    return text


def _control_message(text: str, position: int, field: str, row: str) -> str:
    character = text[position]
    shown = repr(text[max(0, position - 15) : position + 15])
    why = "the text is damaged"
    if character in _ESCAPES:
        why = f"LaTeX like {_COMMANDS[character]} had one backslash and was read as the escape {_ESCAPES[character]}"
    return (
        f"{row}: {field} holds the control character U+{ord(character):04X} at position {position}, around {shown}: "
        f"{why}; use another copy of the set"
    )


def integer_answer(value: Any, row: str, bounds: tuple[int, int] | None = None) -> str:
    """An integer answer without leading zeros. Raises AnswerError."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise AnswerError(
            f"{row}: the answer is {value!r} of type {type(value).__name__}; expected an integer or its digits"
        )
    text = str(value).strip()
    if not _INTEGER.fullmatch(text):
        raise AnswerError(f"{row}: the answer is {text[:60]!r}; expected an integer in ASCII digits")
    number = int(text)
    if bounds is not None and not bounds[0] <= number <= bounds[1]:
        raise AnswerError(f"{row}: the answer is {number}; expected {bounds[0]} to {bounds[1]}")
    return str(number)


class Unique:
    """Ids and texts of the rows so far."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._texts: dict[bytes, str] = {}

    def add(self, row_id: str, text: str | None) -> None:
        """Take one row in. Raises DuplicateError naming what it repeats; such a row is not taken in."""
        digest = hashlib.sha256(" ".join(text.split()).encode()).digest() if text is not None else None
        if row_id in self._ids:
            raise DuplicateError(f"id {row_id!r} occurs twice; ids must be unique, the copy repeats or mixes rows")
        if digest is not None and digest in self._texts:
            raise DuplicateError(f"{row_id!r} repeats the text of {self._texts[digest]!r}; the copy repeats its rows")
        self._ids.add(row_id)
        if digest is not None:
            self._texts[digest] = row_id
