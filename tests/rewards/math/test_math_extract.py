"""Extraction: examples of every problem, and properties over arbitrary text, with brute force as the truth."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quads.rewards.math.extract import MAX_DISTINCT, extract, final_text

# A machine shared with others stretches wall time.
PATIENT = settings(deadline=None)

PIECES = st.lists(
    st.sampled_from(
        [
            "\\boxed{",
            "\\fbox {",
            "\\boxed",
            "{",
            "}",
            "\\{",
            "\\}",
            "\\\\",
            "7",
            " ",
            "\n",
            "<think>",
            "</think>",
            "$",
            "é",
        ]
    ),
    max_size=60,
).map("".join)


@pytest.mark.parametrize(
    ("text", "content", "problem"),
    [
        ("\\boxed{204}", "204", ""),
        ("\\boxed {204}", "204", ""),
        ("\\fbox{\\frac{1}{2}}", "\\frac{1}{2}", ""),
        ("\\boxed{1} \\boxed{2}", "2", ""),
        ("\\boxed{\\boxed{7}}", "7", ""),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}", ""),
        ("\\boxed{\\left\\{ 1 \\right.}", "\\left\\{ 1 \\right.", ""),
        ("\\\\boxed{\\\\frac{1}{2}}", "\\frac{1}{2}", ""),
        ("a \\\\ \\boxed{1\\\\2}", "1\\\\2", ""),
        ("\\boxed{7}}", "7", ""),
        ("204", None, "no_box"),
        ("", None, "no_box"),
        ("\\boxed204", None, "no_box"),
        ("boxed{204}", None, "no_box"),
        ("\\boxed{1} \\boxed{\\frac{1}{2}", None, "unclosed"),
        ("\\boxed{204} \\boxed{ }", None, "empty"),
        ("\\boxed{" + "1+" * 40_000 + "1}", None, "too_long"),
        ("<think>\\boxed{1}", None, "no_final"),
        ("<think>\\boxed{1}</think> so 1", None, "no_box"),
        ("\\boxed{11}</think>\\boxed{204}", "204", ""),
        ("<think>a</think>\\boxed{1}<think>\\boxed{2}", None, "no_final"),
        ("<think>a</think>\\boxed{1}<think>\\boxed{2}</think>", None, "no_box"),
    ],
)
def test_examples(text: str, content: str | None, problem: str) -> None:
    found = extract(text)
    assert (found.content, found.problem) == (content, problem)


def test_think_opened_by_the_prompt() -> None:
    assert extract("\\boxed{1}", opened=True).problem == "no_final"
    assert extract("a</think>\\boxed{1}", opened=True).content == "1"


def test_join_is_for_the_last_boxed_line_only() -> None:
    assert extract("\\boxed{1} and \\boxed{2}", join=True).content == "1, 2"
    assert extract("\\boxed{1}\n\\boxed{2}", join=True).content == "2"
    assert extract("\\boxed{1}, so \\boxed{1}", join=True).content == "1"
    assert extract("\\boxed{\\boxed{1}} \\boxed{2}", join=True).content == "\\boxed{1}, 2"


def test_spam_counts_different_values() -> None:
    boxes = "".join(f"\\boxed{{{n}}}" for n in range(MAX_DISTINCT))
    assert extract(boxes).problem == ""
    assert extract(boxes + "\\boxed{x}").problem == "spam"
    assert extract("\\boxed{7}" * 1000).problem == ""
    # Values before </think> do not count.
    assert extract(boxes + "\\boxed{x}</think>\\boxed{1}").problem == ""


@PATIENT
@given(st.one_of(st.text(), PIECES), st.booleans(), st.booleans())
def test_never_raises(text: str, join: bool, opened: bool) -> None:
    extract(text, join, opened)


def by_brute_force(text: str) -> str | None:
    """The content of the last opening, one character at a time."""
    openings = list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))
    if not openings:
        return None
    depth, index, start = 1, openings[-1].end(), openings[-1].end()
    while index < len(text):
        if text[index] == "\\":
            index += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if not depth:
            return text[start:index] if text[start:index].strip() else None
        index += 1
    return None


@PATIENT
@given(PIECES)
def test_agrees_with_brute_force(text: str) -> None:
    final = final_text(text)
    found = extract(text)
    expected = None if final is None else by_brute_force(final)
    # Boxes escaped twice are unescaped, which brute force does not know.
    if final is not None and "\\\\boxed" not in final and "\\\\fbox" not in final:
        assert found.content == expected


@PATIENT
@given(st.text("0123456789+-*/^ ab", min_size=1, max_size=30).filter(str.strip), PIECES)
def test_the_last_box_wins(answer: str, before: str) -> None:
    assert extract(f"{before}</think>{before.replace('<think>', '')} \\boxed{{{answer}}}").content == answer


@PATIENT
@given(st.integers(1, 40))
def test_the_innermost_box_of_a_nest(levels: int) -> None:
    assert extract("\\boxed{" * levels + "7" + "}" * levels).content == "7"


MEGABYTES = {
    "open braces": "{" * 4_000_000,
    "pairs": "{}" * 2_000_000,
    "open boxes": "\\boxed{" * 500_000,
    "open boxes, last closed": "\\boxed{" * 500_000 + "204}",
    "boxes": "\\boxed{204}" * 300_000,
    "braces in a box": "\\boxed{" + "{}" * 2_000_000 + "}",
    "box and spaces": ("\\boxed" + " " * 1000) * 3000,
    "backslashes": "\\" * 4_000_000,
    "think tags": "<think></think>" * 250_000,
    "dollars": "$" * 3_999_999 + "\\boxed{204}",
}


@pytest.mark.parametrize("name", MEGABYTES)
@pytest.mark.parametrize("join", [False, True])
def test_megabytes_in_less_than_a_second(name: str, join: bool) -> None:
    # CPU time: what a loaded machine adds is not the function's.
    start = time.process_time()
    extract(MEGABYTES[name], join)
    assert time.process_time() - start < 1.0
