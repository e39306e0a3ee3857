r"""Exact rational value of a numeric LaTeX expression: fractions.Fraction, bounded work, no floats, no sympy.

    sum      := product (('+' | '-') product)*
    product  := power (('\cdot' | '\times' | '*' | '/' | '\div' | nothing) power)*
    power    := sign* primary ('^' exponent | '!' | '\%')*
    primary  := number | group | \frac a b | \sqrt[n] a | \binom a b

    numbers  12, .5, 2.50, 149.\overline{3}, 149.(3)       all exact: 2.50 is 5/2, 149.\overline{3} is 448/3
    mixed    149\frac{1}{3} and 149 1/3 are sums when the fraction is proper; 2\frac{3}{2} is a product, 3
    percent  25\% is 1/4
    roots    only where they are rational: \sqrt{49}, 8^{1/3}

Raises NotRationalError for everything else (symbols, \pi, \sqrt{2}, syntax it does not know): the caller then asks
the symbolic worker; UndefinedError for 0/0 and its kind, which equal nothing; TooLargeError before a number passes
2^18 bits, a factorial 3000 or a nesting 64 levels. Differs from sympify, which evaluates 9^{9^9} eagerly. No torch.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

MAX_BITS = 1 << 18
MAX_FACTORIAL = 3000
MAX_DEPTH = 64

_TOKEN = re.compile(
    r"\s*(?:(?P<repeating>[0-9]*\.[0-9]*(?:\\(?:overline|bar|dot)\{[0-9]+\}|\([0-9]+\)))"
    r"|(?P<number>[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
    r"|(?P<command>\\[A-Za-z]+|\\%)"
    r"|(?P<char>[-+*/^!(){}\[\]]))"
)
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)[^0-9]+([0-9]+)[})]")
_OPEN = {"(": ")", "{": "}", "[": "]"}
_TIMES = {"\\cdot", "\\times", "*", "\\ast"}
_OVER = {"/", "\\div"}


class NotRationalError(Exception):
    """Not a rational number in the known syntax; it may still have a value."""


class UndefinedError(Exception):
    """Division by zero: has no value."""


class TooLargeError(Exception):
    """Evaluating would take unbounded time or memory."""


def evaluate(text: str) -> Fraction:
    """The value of `text`. Raises NotRationalError, UndefinedError or TooLargeError."""
    parser = _Parser(_tokens(text))
    try:
        value = parser.sum()
    except RecursionError:
        raise TooLargeError("nesting of too many levels") from None
    if parser.position != len(parser.tokens):
        raise NotRationalError(f"{parser.tokens[parser.position]!r} was not expected")
    return value


def bounded(value: Fraction) -> Fraction:
    """`value`, or TooLargeError past 2^18 bits."""
    if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
        raise TooLargeError(f"a number of more than {MAX_BITS} bits")
    return value


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    position, text = 0, text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise NotRationalError(f"{text[position]!r} is not part of a number")
        tokens.append(match.group().strip())
        position = match.end()
    if not tokens:
        raise NotRationalError("nothing to evaluate")
    return tokens


def _number(token: str) -> Fraction:
    if len(token) > 4000:
        raise TooLargeError(f"a literal of {len(token)} characters")
    match = _REPEATING.fullmatch(token)
    if not match:
        whole, _, part = token.partition(".")
        return Fraction(int(whole + part or "0"), 10 ** len(part))
    whole, fixed, period = match.groups()
    head = Fraction(int(whole + fixed or "0"), 10 ** len(fixed))
    return head + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))


def _is_number(token: str) -> bool:
    return token[0] in "0123456789."


def integer_root(value: int, n: int) -> int | None:
    """The n-th root of value >= 0 if it is an integer. Newton from above, all in integers."""
    if value < 2 or n == 1:
        return value
    guess = 1 << -(-value.bit_length() // n)
    while True:
        better = ((n - 1) * guess + value // guess ** (n - 1)) // n
        if better >= guess:
            break
        guess = better
    return guess if guess**n == value else None


def power(base: Fraction, exponent: Fraction) -> Fraction:
    """base ** exponent, exactly. Irrational roots: NotRationalError; 0^0 and 0^-1: UndefinedError; or TooLargeError."""
    if exponent.denominator != 1:
        if base < 0 or exponent.denominator > 64:
            raise NotRationalError("a root without a rational value")
        top, bottom = (integer_root(part, exponent.denominator) for part in base.as_integer_ratio())
        if top is None or bottom is None:
            raise NotRationalError("an irrational root")
        base = Fraction(top, bottom)
    times = exponent.numerator
    if base == 0 and times <= 0:
        raise UndefinedError("zero to a power that is not positive")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length()) if abs(base) != 1 else 1
    if abs(times) * bits > MAX_BITS and abs(base) not in (0, 1):
        raise TooLargeError(f"a power of about {abs(times).bit_length()}-bit exponent")
    return base ** (times % 2 if abs(base) == 1 else times)


class _Parser:
    """Recursive descent over tokens; every result passes `bounded`."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0
        self.depth = 0

    def peek(self, offset: int = 0) -> str:
        at = self.position + offset
        return self.tokens[at] if at < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        if not token:
            raise NotRationalError("the expression ends too early")
        self.position += 1
        return token

    def sum(self) -> Fraction:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLargeError(f"nesting of more than {MAX_DEPTH} levels")
        value = self.product()
        while self.peek() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            value = bounded(value + sign * self.product())
        self.depth -= 1
        return value

    def product(self) -> Fraction:
        value = self.signed()
        while token := self.peek():
            if token in _OVER:
                self.take()
                value = bounded(_divide(value, self.signed()))
            elif token in _TIMES:
                self.take()
                value = bounded(value * self.signed())
            elif token in _OPEN or token.startswith("\\"):
                value = bounded(value * self.power())
            elif _is_number(token):
                # Two numbers side by side are a typo or a list, not a product (sympy's LaTeX reader adds them).
                raise NotRationalError("two numbers side by side")
            else:
                break
        return value

    def signed(self) -> Fraction:
        sign = 1
        while self.peek() in ("+", "-"):
            sign = -sign if self.take() == "-" else sign
        mixed = self.mixed()
        return sign * (self.power() if mixed is None else mixed)

    def mixed(self) -> Fraction | None:
        """A mixed number standing here: an integer, then a proper fraction of literals."""
        ahead = self.tokens[self.position : self.position + 8]
        if not ahead or not ahead[0].isdecimal():
            return None
        if len(ahead) > 3 and ahead[2] == "/" and ahead[1].isdecimal() and ahead[3].isdecimal():
            top, bottom, used = ahead[1], ahead[3], 4
        elif len(ahead) == 8 and ahead[1] == "\\frac" and ahead[2] + ahead[4] + ahead[5] + ahead[7] == "{}{}":
            top, bottom, used = ahead[3], ahead[6], 8
        else:
            return None
        if not (top.isdecimal() and bottom.isdecimal() and _number(top) < _number(bottom)):
            return None
        self.position += used
        return _number(ahead[0]) + _number(top) / _number(bottom)

    def power(self) -> Fraction:
        value = self.primary()
        while True:
            token = self.peek()
            if token == "^":
                self.take()
                value = bounded(power(value, self.exponent()))
                if self.peek() == "^":
                    raise NotRationalError("two exponents in a row")
            elif token == "!":
                self.take()
                if self.peek() == "!" or value < 0 or value.denominator != 1:
                    raise NotRationalError("not a plain factorial")
                value = Fraction(_factorial(value.numerator))
            elif token == "\\%":
                self.take()
                value /= 100
            else:
                return value

    def exponent(self) -> Fraction:
        sign = 1
        while self.peek() in ("+", "-"):
            sign = -sign if self.take() == "-" else sign
        return sign * self.primary()

    def primary(self) -> Fraction:
        token = self.take()
        if _is_number(token):
            return _number(token)
        if token in _OPEN:
            value = self.sum()
            if self.take() != _OPEN[token]:
                raise NotRationalError("brackets do not match")
            return value
        if token == "\\frac":
            top = self.primary()
            return bounded(_divide(top, self.primary()))
        if token == "\\binom":
            n, k = self.primary(), self.primary()
            if n.denominator != 1 or k.denominator != 1 or n < 0 or k < 0:
                raise NotRationalError("a binomial of other than natural numbers")
            if n > MAX_FACTORIAL:
                raise TooLargeError(f"a binomial above {MAX_FACTORIAL}")
            return Fraction(math.comb(n.numerator, k.numerator))
        if token == "\\sqrt":
            n = self.primary() if self.peek() == "[" else Fraction(2)
            if n.denominator != 1 or n < 1:
                raise NotRationalError("a root of other than natural order")
            return power(self.primary(), 1 / n)
        raise NotRationalError(f"{token!r} has no rational value here")


def _divide(top: Fraction, bottom: Fraction) -> Fraction:
    if bottom == 0:
        raise UndefinedError("division by zero")
    return top / bottom


def _factorial(n: int) -> int:
    if n > MAX_FACTORIAL:
        raise TooLargeError(f"a factorial above {MAX_FACTORIAL}")
    return math.factorial(n)
