r"""Every prompt of mathematics and code, training and evaluation alike: the only place where their words stand.

    math_prompt(problem)                    the user's message for a mathematical problem
    code_prompt(question, starter_code)     the user's message for a programming problem, in LiveCodeBench's layout

Contract: both return the text of one user message; the chat template (and a thinking switch) is the caller's. What
they ask for is what the graders read: one last \boxed{}, or one last fenced Python block. Source: the layout of
LiveCodeBench's generation prompt (question, format, answer); wording our own, so scores compare with runs of these
prompts only. Differs from a template with a filled-in example box: an example would be a box that a model can echo.
No torch.
"""

from __future__ import annotations

MATH_INSTRUCTION = (
    "Reason step by step. Give the exact final answer, simplified and without units, inside \\boxed{}. "
    "If several values answer the question, put all of them into one box, separated by commas."
)
CODE_SYSTEM = (
    "You write correct and efficient Python programs. "
    "Read the problem, then answer with one program that passes all tests."
)
CODE_STDIN_FORMAT = (
    "Read the input from standard input and write the answer to standard output, nothing else. "
    "Put the whole program between the delimiters below."
)
CODE_STARTER_FORMAT = (
    "Complete the starter code below. Keep its names and signatures, and put the result between the delimiters."
)
CODE_PLACEHOLDER = "# YOUR CODE HERE"


def math_prompt(problem: str) -> str:
    """User message for a mathematical problem. Raises ValueError on an empty one."""
    return f"{_filled('problem', problem)}\n\n{MATH_INSTRUCTION}"


def code_prompt(question: str, starter_code: str | None = None) -> str:
    """User message for a programming problem: with starter code a function is asked for, else a whole program.

    Raises ValueError on an empty question. Blank starter code counts as none, as in LiveCodeBench's rows.
    """
    starter = (starter_code or "").strip("\n")
    instruction, code = (CODE_STARTER_FORMAT, starter) if starter.strip() else (CODE_STDIN_FORMAT, CODE_PLACEHOLDER)
    return (
        f"### Question:\n{_filled('question', question)}\n\n"
        f"### Format: {instruction}\n```python\n{code}\n```\n\n"
        "### Answer: (use the format above, with the backticks)\n\n"
    )


def _filled(name: str, text: str) -> str:
    if not text.strip():
        raise ValueError(f"{name}={text!r}: expected the text of a problem, got an empty one")
    return text.strip()
