"""The public grader: kinds beyond cases.jsonl, statuses, ground truths, properties, and what it must not import."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quads.rewards import math
from quads.rewards.math import compare, grade, grade_aime, structure, validate_gold
from quads.rewards.math.normalize import normalize
from quads.rewards.math.pool import FAILED, Reply

# A machine shared with others stretches wall time.
PATIENT = settings(deadline=None)

ROOT = Path(__file__).resolve().parents[3]
PAIRS: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parent / "pairs.jsonl").read_text().splitlines()
]
ATOMS = ["1", "-2", "\\frac{1}{2}", "0.5", "x", "y+1", "\\sqrt{2}", "(1,2)", "\\pm 3", "x=4", "[0,1)", "\\text{even}"]
ATOMS += [
    ",",
    "\\{",
    "\\}",
    "(",
    ")",
    "=",
    "<",
    "^",
    "!",
    "\\%",
    "\\cup ",
    "\\text{ or }",
    "\\begin{pmatrix}1&2\\end{pmatrix}",
]


def boxed(answer: str) -> str:
    return f"So the result is $\\boxed{{{answer}}}$."


@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p['gold'][:24]}|{p['answer'][:24]}")
def test_pair(pair: dict[str, Any]) -> None:
    result = grade(boxed(pair["answer"]), pair["gold"], answer_type=pair["answer_type"])
    assert (result.status == "correct") == pair["correct"], result
    assert result.status in ("correct", "wrong", "no_answer"), result


@pytest.mark.parametrize("gold", sorted({p["gold"] for p in PAIRS}))
def test_every_ground_truth_equals_itself(gold: str) -> None:
    assert grade(boxed(gold), gold).status == "correct"
    assert validate_gold(gold) == ""


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        ("\\boxed{7", "not closed"),
        ("7", "no \\boxed"),
        ("\\boxed{}", "empty"),
        ("<think>\\boxed{7}", "no_final"),
    ],
)
def test_no_answer(answer: str, detail: str) -> None:
    result = grade(answer, "7", finished=False)
    assert result.status == "no_answer" and detail in result.detail and "cut off" in result.detail
    assert result.extracted is None


def test_spam_and_guards_are_wrong_with_a_reason() -> None:
    spam = grade("".join(f"\\boxed{{{n}}}" for n in range(20)) + "\\boxed{7}", "7")
    assert (spam.status, spam.detail.partition(":")[0]) == ("wrong", "spam")
    for answer in ("9^{9^{9^{9}}}", "\\sum_{k=1}^{9}k", "1+" * 600 + "1", "(" * 300 + "7" + ")" * 300, "1/0", "٧"):
        result = grade(boxed(answer), "7")
        assert (result.status, result.detail.partition(":")[0]) == ("wrong", "guard"), (answer, result)


@pytest.mark.parametrize(
    "gold", ["", "  ", "9^{9^{9^{9^{9}}}}", "1/0", "\\frac{1}{", "\\int_0^1 e^{e^{e^{e^x}}}dx", "x\\frac", "１２"]
)
def test_a_bad_ground_truth_is_a_grader_error(gold: str) -> None:
    assert validate_gold(gold)
    assert grade(boxed("\\sqrt{2}+1"), gold).status == "grader_error"


def test_unreadable_ground_truth_is_never_the_answers_fault() -> None:
    assert grade(boxed("\\sqrt{2}"), "\\sqrt{2}+\\frac{1}{").status == "grader_error"
    assert grade_aime(boxed("7"), "x").status == "grader_error"
    assert grade(boxed("7"), "7", answer_type="integer").status == "grader_error"  # type: ignore[arg-type]


def test_aime_ground_truth_with_leading_zeros() -> None:
    assert grade_aime(boxed("25"), "025").status == "correct"
    assert grade_aime(boxed("205"), "025").status == "wrong"


def test_worker_failures_have_their_own_status(monkeypatch: pytest.MonkeyPatch) -> None:
    # By its name in sys.modules: the package's attribute of that name is the function.
    module = sys.modules["quads.rewards.math.grade"]
    for status in FAILED:
        monkeypatch.setattr(module.POOL, "ask", lambda *_, status=status: Reply(status, "made up"))
        result = grade(boxed("x+1"), "1+x")
        assert (result.status, result.score, result.detail) == (status, 0.0, "made up")


def never_asked(operation: str, gold: str, answer: str) -> bool:
    """Stands in for the worker: textual, symmetric."""
    return "".join(gold.split()) == "".join(answer.split())


@PATIENT
@given(st.lists(st.sampled_from(ATOMS), max_size=12).map("".join), st.sampled_from(ATOMS[:12]))
def test_comparison_never_raises_anything_else(answer: str, gold: str) -> None:
    try:
        compare.Comparison(never_asked).same(
            structure.parse(normalize(gold).text), structure.parse(normalize(answer).text)
        )
    except (compare.RefusedError, structure.TooComplexError):
        pass


@PATIENT
@given(st.text(max_size=60), st.sampled_from(["7", "1,2", "\\{1\\}", "(1,2)", "[0,1)"]))
def test_grade_never_raises(text: str, gold: str) -> None:
    grade(text, gold)
    grade(boxed("".join(c for c in text if not c.isalpha() and c not in "\\{}")), gold)


@PATIENT
@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6))
def test_integers_are_equal_iff_equal(a: int, b: int) -> None:
    assert (grade(boxed(str(a)), str(b)).status == "correct") == (a == b)
    assert grade(boxed(f"  {a} "), f"{a}").status == "correct"
    assert grade(boxed(f"\\frac{{{2 * a}}}{{2}}"), str(a), answer_type="int").status == "correct"


@PATIENT
@given(st.integers(-999, 999), st.integers(1, 400), st.integers(1, 12))
def test_a_decimal_is_a_fraction_only_if_exact(a: int, b: int, digits: int) -> None:
    value = Fraction(a, b)
    decimal = f"{a / b:.{digits}f}"
    exact = Fraction(decimal) == value
    assert (grade(boxed(decimal), f"\\frac{{{a}}}{{{b}}}").status == "correct") == exact
    assert (grade(boxed(f"{a}/{b}"), decimal).status == "correct") == exact


@PATIENT
@given(st.lists(st.fractions(max_denominator=50), min_size=2, max_size=5), st.randoms())
def test_lists_are_multisets_and_tuples_are_ordered(values: list[Fraction], random: Any) -> None:
    shuffled = random.sample(values, len(values))
    gold, answer = (", ".join(f"{v.numerator}/{v.denominator}" for v in vs) for vs in (values, shuffled))
    assert grade(boxed(answer), gold, answer_type="list").status == "correct"
    assert grade(boxed(answer + ", 1/7"), gold, answer_type="list").status == "wrong"
    assert (grade(boxed(f"({answer})"), f"({gold})").status == "correct") == (values == shuffled)
    assert grade(boxed(f"\\{{{answer}, {answer}\\}}"), f"\\{{{gold}\\}}").status == "correct"


NUMBERS = ["1/2", "0.5", "\\frac{2}{4}", "50\\%", "3", "\\sqrt{9}", "2+1", "-3"]


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(NUMBERS, 2)))
def test_numbers_compare_symmetrically(a: str, b: str) -> None:
    assert grade(boxed(a), b).status == grade(boxed(b), a).status


@pytest.mark.parametrize("space", [" ", "  ", "\\,", "\\;", "~", "\n", "\u200b", "\u202f"])
@pytest.mark.parametrize("pair", ["(3,5)", "\\frac{1}{2}", "1,2,3", "\\{1,2\\}", "[0,1)", "x=5", "\\pm 3"])
def test_spaces_between_signs_mean_nothing(pair: str, space: str) -> None:
    spaced = space + pair.replace(",", f"{space},{space}").replace("=", f"{space}={space}") + space
    assert grade(boxed(spaced), pair).status == "correct"


def test_the_integer_path_is_fast() -> None:
    text, gold = boxed("204"), "204"
    grade(text, gold)
    best = min(_seconds(lambda: grade(text, gold)) for _ in range(200))
    assert best < 50e-6


def _seconds(function: Any) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def test_the_parent_imports_neither_sympy_nor_torch() -> None:
    code = (
        "import sys\nfrom quads.rewards import grader\n"
        "assert grader('math')(r'\\boxed{x+1}', '1+x', True).score == 1\n"
        "heavy = {'sympy', 'mpmath', 'math_verify', 'latex2sympy2_extended', 'antlr4', 'torch'}\n"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_exported_names() -> None:
    assert set(math.__all__) == {"ANSWER_TYPES", "AnswerType", "grade", "grade_aime", "validate_gold"}
