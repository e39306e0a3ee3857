r"""Equality of symbolic expressions, only ever run inside the worker process: the one module here that imports sympy.

Reading is math-verify's LaTeX reader (latex2sympy2_extended) with case-sensitive symbols, after decimals became
fractions (0.5\pi is exactly \pi/2) and degrees radians. An expression that is not read to its end is unparsed, never
half of it.

    constants    different iff gold - answer has a significant digit at 400 digits of working precision: no tolerance,
                 so 2^{-99} differs from 2^{-98} and 10^{60}\sqrt2 from 10^{60}\sqrt2+1
    with symbols gold - answer at rational points of all sign patterns, compared where both are real (complex where i
                 occurs); equal at every such point is equal, and simplify() decides when no point is usable
    equations    (left - right) / (left' - right') is the same nonzero constant at those points
    the rest     math_verify.verify(gold, answer): sets, unions, relations, functions of unknown name

Differs from math-verify's own comparison: no rounding to 6 digits (1/576 = 0.001736), no absolute tolerance, no
lower case (A = a), and two equations are not equal because both end in 0. No torch.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import sympy  # type: ignore[import-untyped]
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy  # type: ignore[import-untyped]
from math_verify import LatexExtractionConfig, verify  # type: ignore[import-untyped]
from math_verify import parse as math_verify_parse

DIGITS = 15
WORKING_DIGITS = 400
POINT_DIGITS = 60
_CONFIG = ConversionConfig(lowercase_symbols=False)
_DECIMAL = re.compile(r"([0-9]*)\.([0-9]+)")
_DEGREES = re.compile(r"([0-9]+|\\frac\{[0-9]+\}\{[0-9]+\})\s*\^\s*\\circ")
# Coordinates of the test points: distinct, no integers, no special values; signs vary from point to point.
_VALUES = ("17/13", "23/11", "31/19", "41/29", "53/37", "61/47", "71/59", "83/67", "97/73", "103/89")
_SIGNS = ((1, 1, 1), (-1, -1, -1), (1, -1, 1), (-1, 1, 1), (1, 1, -1), (1, 1, 1))


class UnparsedError(Exception):
    """math-verify's reader does not understand the text."""


@lru_cache(maxsize=512)
def read(text: str) -> Any:
    """The sympy object of an expression or equation in LaTeX. Raises UnparsedError."""
    text = re.sub(r"\\text\{\s*([A-Za-z])\s*\}", r"\1", text)
    text = _DECIMAL.sub(lambda m: f"\\frac{{{int(m.group(1) + m.group(2))}}}{{{10 ** len(m.group(2))}}}", text)
    text = _DEGREES.sub(r"(\\frac{\1 \\pi}{180})", text)
    text = re.sub(r"\\log\s*_\s*(?:e|\{\s*e\s*\})(?![A-Za-z])", r"\\ln ", text)
    text = text.replace("\\%", "\\cdot\\frac{1}{100}")
    # The reader adds numbers that stand side by side.
    if re.search(r"(?<![_0-9])[0-9]+\s+[0-9]", text):
        raise UnparsedError("two numbers side by side")
    try:
        value = latex2sympy(text, normalization_config=None, conversion_config=_CONFIG)
    except MemoryError:
        raise
    except Exception as error:
        raise UnparsedError(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}") from None
    if value is None or isinstance(value, list | tuple | str):
        raise UnparsedError("no expression")
    return value


def same_expression(gold: str, answer: str) -> bool:
    """Whether two expressions are equal. Raises UnparsedError."""
    g, a = _evaluated(read(gold)), _evaluated(read(answer))
    if not (isinstance(g, sympy.Expr) and isinstance(a, sympy.Expr)) or _has_unknown_function(g, a):
        return _verify(gold, answer)
    g, a = _imaginary(g), _imaginary(a)
    if sympy.nan in (g, a) or g.has(sympy.zoo) or a.has(sympy.zoo):
        return False
    if g == a:
        return True
    if g.is_infinite or a.is_infinite:
        return False
    symbols = sorted(g.free_symbols | a.free_symbols, key=str)
    verdict = _same_at_points(g, a, symbols) if symbols else _zero(g - a)
    if verdict is None:
        return bool(sympy.simplify(g - a) == 0)
    return verdict


def same_equation(gold: str, answer: str) -> bool:
    """Whether two equations have proportional left - right. Raises UnparsedError."""
    g, a = read(gold), read(answer)
    if not (isinstance(g, sympy.Eq) and isinstance(a, sympy.Eq)) or _has_unknown_function(g, a):
        return _verify(gold, answer)
    difference, other = (_imaginary(_evaluated(e.lhs) - _evaluated(e.rhs)) for e in (g, a))
    symbols = sorted(difference.free_symbols | other.free_symbols, key=str)
    ratios = []
    for point in _points(symbols):
        top, bottom = (_number(e.subs(point)) for e in (difference, other))
        if top is None or bottom is None or _zero(bottom, POINT_DIGITS) is not False:
            continue
        ratios.append(top / bottom)
    if len(ratios) < 2:
        return bool(sympy.simplify(difference - other) == 0)
    return all(_zero(r - ratios[0], POINT_DIGITS) for r in ratios[1:]) and _zero(ratios[0], POINT_DIGITS) is False


def _evaluated(value: Any) -> Any:
    return value.doit() if hasattr(value, "doit") else value


def _imaginary(value: Any) -> Any:
    return value.subs(sympy.Symbol("i"), sympy.I)


def _has_unknown_function(*values: Any) -> bool:
    return any(value.atoms(sympy.core.function.AppliedUndef) for value in values)


def _points(symbols: list[Any]) -> list[dict[Any, Any]]:
    points = []
    for trial, signs in enumerate(_SIGNS):
        point = {}
        for index, symbol in enumerate(symbols):
            value = sympy.Rational(_VALUES[(index + 3 * trial) % len(_VALUES)]) + index // len(_VALUES)
            point[symbol] = signs[index % len(signs)] * value
        points.append(point)
    return points


def _same_at_points(gold: Any, answer: Any, symbols: list[Any]) -> bool | None:
    """Equal at every usable point; None without a usable one."""
    usable = 0
    complex_values = gold.has(sympy.I) or answer.has(sympy.I)
    for point in _points(symbols):
        g, a = _number(gold.subs(point)), _number(answer.subs(point))
        if g is None or a is None:
            continue
        if not complex_values and not (_real(g) and _real(a)):
            continue
        usable += 1
        if _zero(g - a, POINT_DIGITS) is False:
            return False
    return True if usable else None


def _number(value: Any) -> Any:
    """`value` if it is a finite constant, else None."""
    finite = value.is_number and not value.has(sympy.zoo, sympy.nan, sympy.oo, -sympy.oo)
    return value if finite else None


def _real(value: Any) -> bool:
    return value.is_real is True or _zero(sympy.im(value), POINT_DIGITS) is True


def _zero(value: Any, digits: int = WORKING_DIGITS) -> bool | None:
    """Whether a constant has no significant digit at that many digits; None when it cannot be evaluated."""
    value = sympy.sympify(value)
    if value.is_Rational:
        return bool(value == 0)
    real, imaginary = value.evalf(DIGITS, maxn=digits).as_real_imag()
    parts = [part for part in (real, imaginary) if part != 0]
    if not all(part.is_Number for part in parts):
        return None
    # evalf returns one bit of precision when cancellation left no digit.
    return not any(getattr(part, "_prec", 2) > 1 for part in parts)


def _verify(gold: str, answer: str) -> bool:
    """math-verify's own comparison, for what is neither a number nor an expression."""
    config = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
    options = {"fallback_mode": "no_fallback", "extraction_mode": "first_match", "parsing_timeout": None}
    g, a = (math_verify_parse(f"$\\boxed{{{text}}}$", config, **options) for text in (gold, answer))
    if not g or not a:
        raise UnparsedError("math-verify reads no answer")
    return bool(verify(g, a, strict=True, allow_set_relation_comp=True, timeout_seconds=None))
