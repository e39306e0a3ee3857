r"""What an expression must look like before it may cost CPU time in the symbolic worker.

    at most 512 characters, 64 levels of brackets, 2 nested exponents, exponents of 4 digits, factorials of 3000
    no \int, \sum, \prod, \lim unless the ground truth has them; no `__`; no run of more than 12 letters
    ASCII only: what the unicode table of `normalize` does not know is not mathematics

Contract: linear time; returns the reason in words, "" for fine. An answer that fails is wrong (with the reason in the
detail); a ground truth that fails is a grader_error, because nothing could ever match it. Differs from a timeout
alone: verdicts on such answers do not depend on the speed of the machine. No torch, no sympy.
"""

from __future__ import annotations

import re

MAX_CHARACTERS = 512
MAX_DEPTH = 64
MAX_POWERS = 2
MAX_EXPONENT_DIGITS = 4
MAX_FACTORIAL = 3000
MAX_LETTERS = 12

_HEAVY = re.compile(r"\\(?:i+nt|oint|sum|prod|lim|limsup|liminf|coprod)(?![A-Za-z])")
_EXPONENT = re.compile(rf"\^\s*[{{(]*\s*[+-]?\s*[0-9]{{{MAX_EXPONENT_DIGITS + 1}}}")
_FACTORIAL = re.compile(r"([0-9]{1,20})\s*[)}]*\s*!|\\binom\s*\{\s*([0-9]{1,20})|([0-9]{1,20})\s*[)}]*\s*\\choose")
_STACKED = re.compile(r"!\s*[)}]+\s*!")
_LETTERS = re.compile(rf"(?<![\\A-Za-z])[A-Za-z]{{{MAX_LETTERS + 1}}}")
_BRACKET = re.compile(r"\\[{}]|[(){}\[\]^]")


def problem(text: str, gold: str | None = None) -> str:
    """Why `text` is refused, or "". `gold`: the ground truth, whose sums and integrals are then allowed."""
    if len(text) > MAX_CHARACTERS:
        return f"{len(text)} characters, at most {MAX_CHARACTERS}"
    if not text.isascii() or not text.isprintable():
        return "characters outside ASCII"
    if "__" in text:
        return "two underscores"
    if _LETTERS.search(re.sub(r"\\text\{[^{}]*\}", "", text)):
        return f"more than {MAX_LETTERS} letters in a row"
    if (heavy := _HEAVY.search(text)) and (gold is None or heavy.group() not in gold):
        return f"{heavy.group()} is not evaluated"
    if _EXPONENT.search(text):
        return f"an exponent of more than {MAX_EXPONENT_DIGITS} digits"
    if any(int(next(filter(None, groups))) > MAX_FACTORIAL for groups in _FACTORIAL.findall(text)):
        return f"a factorial or binomial above {MAX_FACTORIAL}"
    return "factorial of a factorial" if _STACKED.search(text) else _nesting(text)


def _nesting(text: str) -> str:
    """Depth of brackets, and of exponents: those opened inside an exponent count one more."""
    depth, deepest, stack, powers, pending = 0, 0, [], 0, 0
    for match in _BRACKET.finditer(text):
        token = match.group()
        if token == "^":
            pending = 1
            deepest = max(deepest, powers + 1)
        elif token in ("(", "{", "[", "\\{"):
            stack.append(pending if text[: match.start()].rstrip().endswith("^") else 0)
            powers += stack[-1]
            pending = 0
            depth = max(depth, len(stack))
        elif stack:
            powers -= stack.pop()
        if depth > MAX_DEPTH:
            return f"more than {MAX_DEPTH} levels of brackets"
        if deepest > MAX_POWERS:
            return f"more than {MAX_POWERS} nested exponents"
    return ""
