"""Exact values against Python's own integers and fractions; integers, guards and normalisation by property."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from quads.rewards.math import exact, guard
from quads.rewards.math.integer import parse_integer
from quads.rewards.math.normalize import normalize, strip_braces

# A machine shared with others stretches wall time.
PATIENT = settings(deadline=None)

INTEGERS = st.integers(-(10**18), 10**18)
SPACES = st.sampled_from(["", " ", "  ", "\\,", "\\;", "\\ ", "\u202f", "\u200b", "~"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("149.\\overline{3}", Fraction(448, 3)),
        ("0.1\\overline{6}", Fraction(1, 6)),
        (".(3)", Fraction(1, 3)),
        ("149\\frac{1}{3}", Fraction(448, 3)),
        ("149 1/3", Fraction(448, 3)),
        ("-149\\frac{1}{3}", Fraction(-448, 3)),
        ("2\\frac{3}{2}", Fraction(3)),
        ("25\\%", Fraction(1, 4)),
        ("2^{10}", Fraction(1024)),
        ("2^{-3}", Fraction(1, 8)),
        ("-2^{2}", Fraction(-4)),
        ("8^{1/3}", Fraction(2)),
        ("\\sqrt{\\frac{49}{4}}", Fraction(7, 2)),
        ("\\sqrt[3]{27}", Fraction(3)),
        ("5!", Fraction(120)),
        ("3!\\cdot 2", Fraction(12)),
        ("\\binom{10}{3}", Fraction(120)),
        ("6/2(1+2)", Fraction(9)),
        ("1.25\\cdot 10^{6}", Fraction(1_250_000)),
        ("(1+2)(3-5)", Fraction(-6)),
    ],
)
def test_values(text: str, value: Fraction) -> None:
    assert exact.evaluate(text) == value


@pytest.mark.parametrize(
    "text", ["", "x", "\\sqrt{2}", "\\pi", "1+", "(1", "1)", "2 3", "1..2", "4!!", "(-1)^{1/2}", "2^3^4"]
)
def test_not_rational(text: str) -> None:
    with pytest.raises(exact.NotRationalError):
        exact.evaluate(text)


@pytest.mark.parametrize("text", ["0/0", "1/0", "\\frac{1}{2-2}", "0^{0}", "0^{-1}"])
def test_undefined(text: str) -> None:
    with pytest.raises(exact.UndefinedError):
        exact.evaluate(text)


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^{9}}}",
        "10^{10^{10}}",
        "(10^9)!",
        "4000!",
        "\\binom{1000000}{5}",
        "(" * 100 + "1" + ")" * 100,
        "{" * 5000,
    ],
)
def test_too_large(text: str) -> None:
    with pytest.raises((exact.TooLargeError, exact.NotRationalError)):
        exact.evaluate(text)


@PATIENT
@given(INTEGERS, INTEGERS, st.integers(1, 10**9))
def test_arithmetic_is_pythons(a: int, b: int, c: int) -> None:
    text = f"\\frac{{({a})\\cdot({b})-({a})}}{{{c}}}+({b})"
    assert exact.evaluate(text) == Fraction(a * b - a, c) + b


@PATIENT
@given(st.decimals(allow_nan=False, allow_infinity=False, places=8, min_value=-(10**6), max_value=10**6))
def test_decimals_are_exact(value: Decimal) -> None:
    assert exact.evaluate(f"{value:f}") == Fraction(value)


@PATIENT
@given(st.integers(0, 10**6), st.integers(0, 999), st.integers(1, 99))
def test_repeating_decimals(whole: int, fixed: int, period: int) -> None:
    value = exact.evaluate(f"{whole}.{fixed:03d}\\overline{{{period:02d}}}")
    # x = 0.fff pp pp ...: 10^5 x - 10^3 x has no repeating part left.
    assert value * (10**5 - 10**3) == int(f"{whole}{fixed:03d}{period:02d}") - int(f"{whole}{fixed:03d}")


@PATIENT
@given(st.integers(0, 10**40), st.integers(1, 9))
def test_integer_root(root: int, n: int) -> None:
    assert exact.integer_root(root**n, n) == root
    assert n == 1 or root == 0 or exact.integer_root(root**n + 1, n) is None


@PATIENT
@given(st.integers(-(10**19), 10**19))
def test_integers_are_pythons(n: int) -> None:
    for text in (str(n), f"{n}.", f"{n}.000", f"  {n}\n", f"{n:+d}"):
        assert parse_integer(text) == n


@PATIENT
@given(st.text(max_size=8))
def test_integers_are_ascii_only(text: str) -> None:
    value = parse_integer(text)
    if value is not None:
        assert text.isascii() and int(text.strip(" \n\t").rstrip("0").rstrip(".") or "0") is not None
        assert value == Decimal(text.strip(" \n\t"))


@pytest.mark.parametrize("text", ["²", "１２", "١٢", "1_000", "0x10", "1e3", "1.5", "--1", "", "12 3", "9" * 21])
def test_other_forms_are_no_integers(text: str) -> None:
    assert parse_integer(text) is None


@PATIENT
@given(st.integers(1000, 10**15), SPACES, SPACES)
def test_thousands_and_spaces(n: int, left: str, right: str) -> None:
    for separator in (",", "{,}", "\\,", " ", ",\\!", "\u202f"):
        text = left + f"{n:,}".replace(",", separator) + right
        assert normalize(text).text == str(n)


@PATIENT
@given(st.integers(1, 999), st.integers(100, 999))
def test_a_bracketed_pair_is_no_number(a: int, b: int) -> None:
    assert "," in normalize(f"({a},{b})").text
    assert "," in normalize(f"{a},{b}", thousands=False).text


@PATIENT
@given(st.text(max_size=200))
def test_normalize_never_raises(text: str) -> None:
    guard.problem(normalize(text).text)


@PATIENT
@example("{ }")
@example("{ \t{a}\n}")
@given(st.text("{}\\ab \t", max_size=40))
def test_strip_braces_is_idempotent(text: str) -> None:
    once = strip_braces(text)
    assert strip_braces(once) == once


@pytest.mark.parametrize(
    ("raw", "text", "unit"),
    [
        ("25\\,\\mathrm{cm}", "25", "cm"),
        ("25\\text{ square inches}", "25", "in2"),
        ("25\\text{ cm}^2", "25", "cm2"),
        ("3\\text{ m}/\\text{s}", "3", "m/s"),
        ("60 degrees", "60", "degree"),
        ("60^{\\circ}", "60", "degree"),
        ("12\\text{ apples}", "12", None),
        ("204\\text{ or more}", "204\\text{or more}", None),
        ("x=\\text{east}", "x=\\text{east}", None),
        ("\\$25", "25", None),
        ("204 \\pmod{1000}", "204", None),
        ("\\frac{1}{2} \\approx 0.5", "\\frac{1}{2}", None),
        ("8√10", "8\\sqrt{10}", None),
        ("4\\sqrt37", "4\\sqrt{37}", None),
        ("\\dfrac12", "\\frac{1}{2}", None),
        ("x²", "x^{2}", None),
        ("1.25e6", "1.25\\cdot 10^{6}", None),
    ],
)
def test_normalize(raw: str, text: str, unit: str | None) -> None:
    clean = normalize(raw)
    assert (clean.text.replace(" ", ""), clean.unit) == (text.replace(" ", ""), unit)


@pytest.mark.parametrize(
    "text",
    [
        "x" * 13,
        "1" * 600,
        "a__b",
        "\\int_0^1 x",
        "10^{10000}",
        "3001!",
        "x^{x^{x^x}}",
        "((3!)!)!",
        "１",
        "(" * 65 + ")" * 65,
    ],
)
def test_guards(text: str) -> None:
    assert guard.problem(text)


def test_guard_allows_what_the_ground_truth_has() -> None:
    assert guard.problem("\\sum_{k=1}^n k", gold="\\sum_{j=1}^n j") == ""
    assert guard.problem("\\int x", gold="\\sum_{j=1}^n j")


@PATIENT
@given(st.integers(0, 400), st.integers(0, 400))
def test_factorials_and_binomials(n: int, k: int) -> None:
    assume(k <= n)
    assert exact.evaluate(f"{n}!") == math.factorial(n)
    assert exact.evaluate(f"\\binom{{{n}}}{{{k}}}") == math.comb(n, k)
