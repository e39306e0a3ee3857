r"""Whether two parsed answers are the same: exactly where arithmetic suffices, through `ask` where symbols are
needed.

    list      same values with the same counts, in any order (a set or brackets around them change nothing)
    set       same values, counts do not matter; a pair in round brackets is no set
    tuple     same brackets, values in order; x=3, y=5 is (3,5), sorted by name
    interval  same ends and brackets; an inequality is an interval with a name, two names must agree
    matrix    same shape, cell by cell, whatever the brackets
    equation  same left side and equal right sides, or left - right proportional to left - right
    number    equal Fractions. A plain decimal is exactly that decimal: 0.1736 is not 1/576 to any number of digits
    else      the symbolic worker: ask("expression" | "equation", gold, answer) -> bool

Ratios compare as proportions (6:8 is 3:4) unless they look like clock times; numbers with a base (1011_2) need the
same base, except that a decimal ground truth accepts any. Contract: `same` raises RefusedError (the answer broke a
guard or has no value: it is wrong) or GoldError (the ground truth did: nobody can be right). No torch, no sympy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Literal

from quads.rewards.math import exact, guard
from quads.rewards.math.structure import NAME, Equation, Interval, Items, Leaf, Matrix, Node, Union, Word, split

Operation = Literal["expression", "equation"]
Ask = Callable[[Operation, str, str], bool]

_BASE = re.compile(r"\(?([0-9][0-9A-Z]*)\)?_\{?(?:\\text\{)?([0-9]{1,2}|two|eight|ten|sixteen)\}*")
_BASES = {"two": 2, "eight": 8, "ten": 10, "sixteen": 16}
_BRACKETS = re.compile(r"\((.*)\)")


class RefusedError(Exception):
    """The answer cannot be compared, by its own fault: it is wrong."""


class GoldError(Exception):
    """The ground truth cannot be compared: a failure of the data, not of the answer."""


class Comparison:
    """`literal`: equal text is equal (off to validate a ground truth, which must also parse)."""

    def __init__(self, ask: Ask, literal: bool = True) -> None:
        self.ask = ask
        self.literal = literal

    def same(self, gold: Node, answer: Node) -> bool:
        """Whether `answer` is `gold`. Raises RefusedError, GoldError, and what `ask` raises."""
        if isinstance(answer, Items) and len(answer.items) == 1 and answer.kind != "tuple":
            if not (isinstance(gold, Items) and gold.kind != "tuple"):
                return self.same(gold, answer.items[0])
        if isinstance(gold, Items):
            return self._tuple(gold, answer) if gold.kind == "tuple" else self._collection(gold, answer)
        if isinstance(gold, Interval):
            other = _interval(answer)
            return other is not None and self._same_interval(gold, other)
        if isinstance(gold, Union):
            return isinstance(answer, Union) and self._multiset(gold.parts, answer.parts)
        if isinstance(gold, Matrix):
            return isinstance(answer, Matrix) and self._same_matrix(gold, answer)
        if isinstance(gold, Equation):
            return self._same_equation(gold, answer)
        if isinstance(answer, Equation):
            return self.same(gold, _value(answer))
        if isinstance(gold, Word) or isinstance(answer, Word):
            return same_words(gold, answer)
        if isinstance(gold, Leaf) and isinstance(answer, Leaf):
            return self.same_text(gold.text, answer.text)
        if isinstance(gold, Leaf) and _squeeze(gold.text) in ("\\mathbb{R}", "\\R"):
            return self.same(Interval("-\\infty", "\\infty", "()"), answer)
        return False

    def same_text(self, gold: str, answer: str) -> bool:
        """Two expressions without further shape."""
        g, a = _squeeze(gold), _squeeze(answer)
        if self.literal and g and g == a:
            return True
        if not a.isascii():
            raise RefusedError("characters outside ASCII")
        ratios = [split(text, lambda t: t == ":")[0] for text in (gold, answer)]
        if max(map(len, ratios)) > 1:
            return self._same_ratio(gold, answer)
        if (based := _same_base(g, a)) is not None:
            return based
        return self._same_number(gold, answer)

    def _same_number(self, gold: str, answer: str) -> bool:
        expected, value = _exact(gold, GoldError), _exact(answer, RefusedError)
        if expected is not None and value is not None:
            return expected == value
        return self._ask("expression", gold, answer)

    def _ask(self, operation: Operation, gold: str, answer: str) -> bool:
        if reason := guard.problem(gold, gold):
            raise GoldError(reason)
        if reason := guard.problem(answer, gold):
            raise RefusedError(reason)
        return self.ask(operation, gold, answer)

    def _collection(self, gold: Items, answer: Node) -> bool:
        if isinstance(answer, Items):
            # A pair is ordered, hence no set; a list may be written in any brackets.
            if gold.kind == "set" and answer.kind == "tuple":
                return False
            given: Sequence[Node] = answer.items
        else:
            given = answer.parts if isinstance(answer, Union) else (answer,)
        if gold.kind == "list":
            return self._multiset(gold.items, given)
        if not gold.items or not given:
            return not gold.items and not given and isinstance(answer, Items)
        return all(any(self.same(g, a) for a in given) for g in gold.items) and all(
            any(self.same(g, a) for g in gold.items) for a in given
        )

    def _multiset(self, gold: Sequence[Node], answer: Sequence[Node]) -> bool:
        if len(gold) != len(answer):
            return False
        left = list(answer)
        for expected in gold:
            match = next((index for index, given in enumerate(left) if self.same(expected, given)), None)
            if match is None:
                return False
            del left[match]
        return True

    def _tuple(self, gold: Items, answer: Node) -> bool:
        if isinstance(answer, Interval | Leaf):
            ours, theirs = _interval(gold), _interval(answer)
            return ours is not None and theirs is not None and self._same_interval(ours, theirs)
        if isinstance(answer, Equation):
            return self.same(gold, answer.right)
        if not isinstance(answer, Items) or answer.kind == "set":
            return False
        given = _by_name(answer.items) if answer.kind == "list" else answer.items
        if answer.kind == "tuple" and answer.brackets != gold.brackets:
            return False
        if answer.kind == "list" and gold.brackets != "()":
            return False
        return len(given) == len(gold.items) and all(map(self.same, gold.items, given))

    def _same_interval(self, gold: Interval, answer: Interval) -> bool:
        names = {_squeeze(name) for name in (gold.name, answer.name) if name}
        if gold.brackets != answer.brackets or len(names) > 1:
            return False
        return self.same_text(gold.low, answer.low) and self.same_text(gold.high, answer.high)

    def _same_matrix(self, gold: Matrix, answer: Matrix) -> bool:
        if [len(row) for row in gold.rows] != [len(row) for row in answer.rows]:
            return False
        cells = [pair for rows in zip(gold.rows, answer.rows, strict=True) for pair in zip(*rows, strict=True)]
        return all(self.same_text(g, a) for g, a in cells)

    def _same_equation(self, gold: Equation, answer: Node) -> bool:
        if not isinstance(answer, Equation):
            left = gold.sides[0]
            named = NAME.fullmatch(left) or (left.startswith("(") and not re.search("[0-9]", left))
            return bool(named or NAME.fullmatch(gold.sides[-1])) and self.same(_value(gold), answer)
        if _squeeze(gold.sides[0]) == _squeeze(answer.sides[0]) and self.same(gold.right, answer.right):
            return True
        if not isinstance(gold.right, Leaf) or not isinstance(answer.right, Leaf):
            return False
        left = f"{gold.sides[0]}={gold.sides[-1]}"
        return self._ask("equation", left, f"{answer.sides[0]}={answer.sides[-1]}")

    def _same_ratio(self, gold: str, answer: str) -> bool:
        g, a = (split(text, lambda t: t == ":")[0] for text in (gold, answer))
        if len(g) == 2 and len(a) == 1:
            return self.same_text(f"\\frac{{{g[0]}}}{{{g[1]}}}", answer)
        if len(a) == 2 and len(g) == 1:
            return self.same_text(gold, f"\\frac{{{a[0]}}}{{{a[1]}}}")
        if len(g) != len(a) or not all(g) or not all(a):
            return False
        clock = any(re.fullmatch("0[0-9]|0", part) for part in (*g[1:], *a[1:]))
        if clock:
            return all(self.same_text(x, y) for x, y in zip(g, a, strict=True))
        return all(self.same_text(f"({x})({a[0]})", f"({y})({g[0]})") for x, y in zip(g[1:], a[1:], strict=True))


def same_words(gold: Node, answer: Node) -> bool:
    """Words in any case, with or without brackets around a choice letter: \\text{(C)} is C."""
    if isinstance(gold, Word | Leaf) and isinstance(answer, Word | Leaf):
        g, a = (re.sub(r"\\text\{([^{}]*)\}", r"\1", n.text).strip(" .()").lower() for n in (gold, answer))
        return bool(g) and " ".join(g.split()) == " ".join(a.split())
    return False


def _squeeze(text: str) -> str:
    """Without spaces that mean nothing: words and numbers side by side keep theirs ("20 4" is not 204)."""
    text = re.sub(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])", "", text.strip())
    while (match := _BRACKETS.fullmatch(text)) and not re.search(r"[()]", match.group(1)):
        text = match.group(1)
    return text


def _exact(text: str, problem: type[Exception]) -> Fraction | None:
    try:
        return exact.evaluate(text)
    except exact.NotRationalError:
        return None
    except (exact.UndefinedError, exact.TooLargeError) as error:
        raise problem(str(error)) from None


def _same_base(gold: str, answer: str) -> bool | None:
    """Numbers with a base: None when neither has one."""
    g, a = _based(gold), _based(answer)
    if g is None and a is None:
        return None
    if g is None:
        value = _exact(gold, GoldError)
        return None if value is None else value == a[0] if a else False
    if a is None:
        return g[1] == 10 and _exact(answer, RefusedError) == g[0]
    return g == a


def _based(text: str) -> tuple[int, int] | None:
    match = _BASE.fullmatch(text)
    if not match:
        return None
    base = _BASES.get(match.group(2)) or int(match.group(2))
    try:
        return int(match.group(1), base), base
    except ValueError:
        return None


def _interval(node: Node) -> Interval | None:
    if isinstance(node, Interval):
        return node
    if isinstance(node, Leaf) and _squeeze(node.text) in ("\\mathbb{R}", "\\R"):
        return Interval("-\\infty", "\\infty", "()")
    if isinstance(node, Items) and node.kind == "tuple" and len(node.items) == 2 and node.brackets in ("()", "[]"):
        low, high = node.items
        if isinstance(low, Leaf) and isinstance(high, Leaf):
            return Interval(low.text, high.text, node.brackets)
    return None


def _value(equation: Equation) -> Node:
    """The last side, or the first where the last is only a name: 5 = x."""
    if NAME.fullmatch(equation.sides[-1]) and not NAME.fullmatch(equation.sides[0]):
        return Leaf(equation.sides[0])
    return equation.right


def _by_name(items: Sequence[Node]) -> Sequence[Node]:
    """x=3, y=5 in the order of its names, where they differ; other lists as they are."""
    names = [_squeeze(item.sides[0]) for item in items if isinstance(item, Equation)]
    if len(names) != len(items) or len(set(names)) != len(names):
        return items
    return [
        item.right
        for _, item in sorted(zip(names, items, strict=True), key=lambda p: p[0])
        if isinstance(item, Equation)
    ]
