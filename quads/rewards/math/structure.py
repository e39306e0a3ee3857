r"""The shape of an answer: list, set, tuple, interval, matrix, equation, word or plain expression.

    parse(r"x=1, x=2")            Items("list", (Equation("x", Leaf("1")), Equation("x", Leaf("2"))))
    parse(r"\frac{-1\pm\sqrt{17}}{2}")   a list of two: plus-minus stands for both signs
    parse(r"0 \le x < 1")         Interval(0, 1, closed left, open right, of x)
    parse(r"[0,1)")               the same without a name

Splitting looks only at top-level signs (outside every bracket), in one pass each. A pair in round or square brackets
stays Items("tuple") with its brackets: a point and an open interval look the same and compare the same, end by end.
Leaves are strings for `exact` or the symbolic worker. Differs from math-verify, which reads (3,5) as an interval,
3,5 as a set, and equal lists as equal sets. No torch, no sympy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Literal

from quads.rewards.math.normalize import strip_braces

Kind = Literal["list", "set", "tuple"]
MAX_ITEMS = 64
MAX_LEVELS = 8


@dataclass(frozen=True)
class Leaf:
    """An expression without further shape."""

    text: str


@dataclass(frozen=True)
class Word:
    """Plain words, lower case, without brackets and full stop; `letter`: one choice letter in its own case."""

    text: str


@dataclass(frozen=True)
class Items:
    """Several answers: a bare list, a set, or a tuple with its brackets."""

    kind: Kind
    items: tuple[Node, ...]
    brackets: str = ""


@dataclass(frozen=True)
class Interval:
    """Ends as text, "(" or "[" on the left, ")" or "]" on the right; `name` of the bounded symbol, "" without one."""

    low: str
    high: str
    brackets: str
    name: str = ""


@dataclass(frozen=True)
class Union:
    """Intervals or sets joined by \\cup, order without meaning."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of expressions."""

    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Equation:
    """left = ... = right; `sides` has all of them, `right` is parsed."""

    sides: tuple[str, ...]
    right: Node


Node = Leaf | Word | Items | Interval | Union | Matrix | Equation


class TooComplexError(Exception):
    """More than 64 items or 8 levels of structure."""


_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPENERS = {"(", "[", "{", "\\{", "\\langle", "\\lfloor", "\\lceil", "\\begin"}
_CLOSERS = {")", "]", "}", "\\}", "\\rangle", "\\rfloor", "\\rceil", "\\end"}
_COMPARE = {"<": "<", "\\le": "<=", ">": ">", "\\ge": ">="}
# Brackets around an array are the brackets of the matrix.
_MATRIX = re.compile(
    r"[(\[|]?\s*\\begin\{([pbvBV]?matrix|smallmatrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\}\s*[)\]|]?", re.DOTALL
)
_ROW = re.compile(r"\\\\(?:\[[^\]]*\])?")
_WORD = re.compile(r"\(?\s*\\text\{([^{}]*)\}\s*\)?[.:]?")
NAME = re.compile(
    r"\\?[A-Za-z]+(?:_(?:[0-9A-Za-z]|\{[0-9A-Za-z]+\}))?'*(?:\s*\(\s*[a-z0-9](?:\s*,\s*[a-z0-9])*\s*\))?|\\text\{[^{}]*\}"
)
# {x | 0 <= x < 1}: the condition is the answer.
_BUILDER = re.compile(
    r"[A-Za-z](?:\s*\\in\s*\\mathbb\{R\})?\s*(?:\\mid|\\vert|\||:)(?![A-Za-z])\s*(.*(?:[<>]|\\[lg]e(?![A-Za-z])).*)",
    re.DOTALL,
)


def tokens(text: str) -> list[str]:
    """LaTeX commands as one token each, everything else by character."""
    return _TOKEN.findall(text)


def split(text: str, is_separator: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """Pieces between top-level separators, and the separators. Half-open brackets count as a pair: [0,1)."""
    depth = 0
    pieces: list[str] = []
    found: list[str] = []
    current: list[str] = []
    for token in tokens(text):
        if token in _OPENERS:
            depth += 1
        elif token in _CLOSERS:
            depth -= 1
        elif not depth and is_separator(token):
            pieces.append("".join(current).strip())
            found.append(token)
            current = []
            continue
        current.append(token)
    return [*pieces, "".join(current).strip()], found


def parse(text: str, levels: int = MAX_LEVELS) -> Node:
    """The shape of normalised text. Raises TooComplexError past 64 items or 8 levels."""
    if not levels:
        raise TooComplexError(f"more than {MAX_LEVELS} levels of lists")
    text = strip_braces(text)
    if text in ("\\emptyset", "\\{\\}", "\\{ \\}"):
        return Items("set", (), "\\{\\}")
    if (word := _WORD.fullmatch(text)) and word.group(1).strip():
        return Word(word.group(1).strip(" .()"))
    pieces, separators = split(text, lambda t: t in (",", ";", "\\lor", "\\land", "\\vee", "\\wedge"))
    if separators:
        return _list(pieces, separators, levels)
    pieces, separators = split(text, lambda t: t == "\\cup")
    if separators:
        return Union(tuple(parse(piece, levels - 1) for piece in pieces))
    return _relation(text, levels) or _bracketed(text, levels) or _plus_minus(text, levels) or Leaf(text)


def _list(pieces: list[str], separators: list[str], levels: int) -> Node:
    items = _items([piece for piece in pieces if piece], levels)
    # "x < 0 or x > 1" is a union; "and" between bounds would be an intersection, which no answer needs.
    if len(items) > 1 and all(isinstance(item, Interval) for item in items) and "\\land" not in separators:
        return Union(items)
    return Items("list", items)


def _items(pieces: list[str], levels: int) -> tuple[Node, ...]:
    """Parsed pieces; one with plus-minus gives its two values here, side by side with the others."""
    found: list[Node] = []
    for piece in pieces:
        node = parse(piece, levels - 1)
        spread = isinstance(node, Items) and node.kind == "list"
        found.extend(node.items if isinstance(node, Items) and spread else [node])
        if len(found) > MAX_ITEMS:
            raise TooComplexError(f"more than {MAX_ITEMS} items")
    return tuple(found)


def _relation(text: str, levels: int) -> Node | None:
    if text.startswith("\\{"):
        return None
    sides, signs = split(text, lambda t: t in _COMPARE or t in ("=", "\\equiv", "\\in", "\\approx"))
    if not signs:
        return None
    if all(sign in ("=", "\\equiv") for sign in signs):
        if not all(sides):
            return parse(sides[1], levels - 1) if len(sides) == 2 and sides[1] else Leaf(text)
        expanded = _plus_minus(text, levels)
        return expanded or Equation(tuple(sides), parse(sides[-1], levels - 1))
    if signs == ["\\in"] and NAME.fullmatch(sides[0]):
        return parse(sides[1], levels - 1)
    return _bounds(sides, [_COMPARE.get(sign, "") for sign in signs]) or Leaf(text)


def _bounds(sides: list[str], signs: list[str]) -> Interval | None:
    """x < a, a < x, a < x <= b and their mirror images."""
    if not all(signs) or not all(sides):
        return None
    if len(sides) == 3 and signs[0][0] == signs[1][0] and NAME.fullmatch(sides[1]):
        low, name, high = sides
        if signs[0][0] == ">":
            low, high, signs = high, low, signs[::-1]
        return Interval(low, high, ("[" if "=" in signs[0] else "(") + ("]" if "=" in signs[1] else ")"), name)
    if len(sides) != 2 or not (NAME.fullmatch(sides[0]) or NAME.fullmatch(sides[1])):
        return None
    name, bound, sign = sides[0], sides[1], signs[0]
    if not NAME.fullmatch(name) or name in ("\\pi", "\\infty", "e"):
        name, bound, sign = sides[1], sides[0], sign.translate(str.maketrans("<>", "><"))
    if sign[0] == "<":
        return Interval("-\\infty", bound, "(" + ("]" if "=" in sign else ")"), name)
    return Interval(bound, "\\infty", ("[" if "=" in sign else "(") + ")", name)


def _bracketed(text: str, levels: int) -> Node | None:
    if match := _MATRIX.fullmatch(text):
        rows = [row for row in _ROW.split(match.group(2)) if row.strip()]
        return Matrix(tuple(tuple(strip_braces(cell) for cell in row.split("&")) for row in rows))
    parts = tokens(text)
    opener, closer = (parts[0], parts[-1]) if len(parts) > 1 else ("", "")
    if opener == "\\{" and closer == "\\}" and _closes_at_end(parts):
        if match := _BUILDER.fullmatch("".join(parts[1:-1]).strip()):
            return parse(match.group(1), levels - 1)
        inner, _ = split("".join(parts[1:-1]), lambda t: t in (",", ";"))
        return Items("set", _items([piece for piece in inner if piece], levels), "\\{\\}")
    angle = opener == "\\langle" and closer == "\\rangle"
    # [0,1[ and ]0,1[ are half-open and open in French writing.
    french = opener + closer in ("[[", "]]", "][")
    if not angle and not french and not (opener in ("(", "[") and closer in (")", "]") and _closes_at_end(parts)):
        return None
    inner, separators = split("".join(parts[1:-1]), lambda t: t in (",", ";"))
    if not separators or not all(inner):
        return None
    if french and len(inner) == 2:
        return Interval(inner[0], inner[1], ("[" if opener == "[" else "(") + ("]" if closer == "]" else ")"))
    if opener + closer in ("[)", "(]") and len(inner) == 2:
        return Interval(inner[0], inner[1], opener + closer)
    expanded = _plus_minus(text, levels)
    return expanded or Items("tuple", tuple(parse(p, levels - 1) for p in inner), "()" if angle else opener + closer)


def _closes_at_end(parts: list[str]) -> bool:
    depth = 0
    for index, token in enumerate(parts):
        depth += (token in _OPENERS) - (token in _CLOSERS)
        if depth == 0:
            return index == len(parts) - 1
    return False


def _plus_minus(text: str, levels: int) -> Node | None:
    r"""Both readings of \pm: all upper signs and all lower signs when \mp occurs, else every combination (<= 8)."""
    count = len(re.findall(r"\\pm(?![A-Za-z])", text))
    tied = "\\mp" in text
    if not count and not tied:
        return None
    if count > 3:
        raise TooComplexError("more than 3 plus-minus signs")
    choices = [(sign,) * max(count, 1) for sign in "+-"] if tied else list(product("+-", repeat=count))
    readings: list[str] = []
    for choice in choices:
        signs = iter(choice)
        reading = re.sub(r"\\pm(?![A-Za-z])", lambda _, signs=signs: next(signs), text)  # type: ignore[misc]
        reading = re.sub(r"\\mp(?![A-Za-z])", "-" if choice[0] == "+" else "+", reading)
        readings.append(reading)
    return Items("list", _items(readings, levels))
