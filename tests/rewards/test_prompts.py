"""The prompts ask for what the graders read, and hold no answer that could be echoed."""

from __future__ import annotations

import ast

import pytest

from quads.rewards.math import grade
from quads.rewards.prompts import code_prompt, math_prompt

QUESTION = "Print the sum of two numbers."
STARTER = "class Solution:\n    def add(self, a: int, b: int) -> int:\n"


def test_math_prompt_asks_for_one_box() -> None:
    prompt = math_prompt("  What is 2+2?\n")
    assert prompt.startswith("What is 2+2?\n\n") and "\\boxed{}" in prompt
    # A model that repeats the prompt has not answered.
    assert grade(prompt, "4").status == "no_answer"


def test_code_prompt_without_starter_code_asks_for_a_program() -> None:
    prompt = code_prompt(QUESTION)
    assert QUESTION in prompt and "standard input" in prompt
    assert prompt == code_prompt(QUESTION, "") == code_prompt(QUESTION, "\n")


def test_code_prompt_keeps_the_starter_code_as_it_is() -> None:
    prompt = code_prompt(QUESTION, STARTER)
    block = prompt.split("```python\n")[1].split("```")[0]
    assert block == STARTER and "standard input" not in prompt
    ast.parse(block + "        pass\n")


@pytest.mark.parametrize("function", [math_prompt, code_prompt])
def test_an_empty_problem_is_an_error(function: object) -> None:
    with pytest.raises(ValueError, match="got an empty one"):
        function(" \n")  # type: ignore[operator]
