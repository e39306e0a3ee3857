"""The program in a response, as LiveCodeBench reads it.

    fences  = the lines that contain three backticks
    program = the lines between the LAST TWO fences; fewer than two fences: no program

The language tag is ignored, so a C++ block is a (failing) Python program, and a closed draft block followed by an
unclosed one yields what stands between the last two fences, whatever that is. Lines end at "\\n" only; a carriage
return stays at the end of its line, where Python accepts it. Linear in the length of the response.
Source: lcb_runner/utils/extraction_utils.py at 28fef95. Differs from "the last ```python block": prose between two
blocks is taken for the program when the last fence only opens a block, and so it is here.
"""

from __future__ import annotations

FENCE = "```"


def extract_program(response: str) -> str:
    """The program in `response`, "" if there is none."""
    lines = response.split("\n")
    fences = [i for i, line in enumerate(lines) if FENCE in line]
    if len(fences) < 2:
        return ""
    return "\n".join(lines[fences[-2] + 1 : fences[-1]])
