r"""Where the answer stands in a response: after the last </think>, in the last \boxed{...} or \fbox{...}.

    final text   what follows the last </think>; reasoning that was opened and never closed leaves none
    last box     the last opening `\boxed {` decides: its braces must balance and hold something, otherwise no answer
                 (an earlier complete box is not used instead). For a box in a box the last opening is the inner one
    list answer  the boxes of the line of the last box are joined with commas, unless they all say the same
    spam         more than 8 different boxed values in the final text

Contract: never raises, and linear in the length of the text: one regular expression without backtracking finds the
openings, one bounded scan per opening finds the end (64 KiB for the last box, 512 characters for the 256 openings
before it). Escaped braces (`\{`) do not count. Differs from `\\boxed\{([^}]*)\}`, which loses nested braces and is
quadratic on unclosed boxes, and from graders that read the last 100 or 300 characters, which lose long answers. No
torch, no sympy.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import Literal

OPEN_THINK, CLOSE_THINK = "<think>", "</think>"
MAX_CONTENT = 65_536
MAX_SPAM_CONTENT = 512
MAX_DISTINCT = 8
MAX_OPENINGS = 256

_OPENING = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)

Problem = Literal["", "no_final", "no_box", "unclosed", "empty", "too_long", "spam"]


@dataclass(frozen=True)
class Extraction:
    """The boxed text, or the reason why there is none (`content` is then None, except for spam, which keeps it)."""

    content: str | None
    problem: Problem = ""


def final_text(text: str, opened: bool = False) -> str | None:
    """What follows the last </think>; None where reasoning is still open. `opened`: the prompt ended in <think>."""
    _, mark, tail = text.rpartition(CLOSE_THINK)
    if OPEN_THINK in tail or (opened and not mark):
        return None
    return tail


def closing(text: str, start: int, limit: int) -> int | None:
    """Index of the brace that closes the one before `start`; None if it does not come within `limit` characters."""
    depth = 1
    for match in _BRACE.finditer(text, start, min(len(text), start + limit)):
        token = match.group()
        if token == "{":
            depth += 1
        elif token == "}":
            depth -= 1
            if not depth:
                return match.start()
    return None


def extract(text: str, join: bool = False, opened: bool = False) -> Extraction:
    """The answer of a response. `join`: the ground truth is a list, so boxes of the last boxed line belong together."""
    final = final_text(text, opened)
    if final is None:
        return Extraction(None, "no_final")
    openings = deque(_OPENING.finditer(final), maxlen=MAX_OPENINGS)
    if not openings:
        return Extraction(None, "no_box")
    last = openings[-1]
    end = closing(final, last.end(), MAX_CONTENT)
    if end is None:
        return Extraction(None, "unclosed" if len(final) - last.end() < MAX_CONTENT else "too_long")
    content = _unescape(final, last.start(), final[last.end() : end])
    if not content.strip():
        return Extraction(None, "empty")
    line = final.rfind("\n", 0, last.start()) + 1
    if join:
        content = _join(final, [o for o in openings if o.start() >= line], content)
        # The joined line counts as one value: a long list is not spam, and enumerating does not help against a list.
        openings = deque(o for o in openings if o.start() < line)
    if _distinct(final, openings) > MAX_DISTINCT:
        return Extraction(content, "spam")
    return Extraction(content)


def _unescape(text: str, start: int, content: str) -> str:
    r"""A box written `\\boxed` comes from text that was escaped twice: its content is too."""
    return content.replace("\\\\", "\\") if text[start - 1 : start] == "\\" else content


def _join(text: str, openings: list[re.Match[str]], last: str) -> str:
    parts: list[str] = []
    after = -1
    for opening in openings:
        # An opening inside the box before it is part of that box; the outer one then counts.
        if opening.start() < after or (end := closing(text, opening.end(), MAX_SPAM_CONTENT)) is None:
            continue
        parts.append(_unescape(text, opening.start(), text[opening.end() : end]).strip())
        after = end
    parts = [part for part in parts if part]
    return last if len(set(parts)) <= 1 else ", ".join(parts)


def _distinct(text: str, openings: deque[re.Match[str]]) -> int:
    values: set[str] = set()
    for opening in openings:
        end = closing(text, opening.end(), MAX_SPAM_CONTENT)
        if end is not None:
            values.add("".join(text[opening.end() : end].split()))
        if len(values) > MAX_DISTINCT:
            break
    return len(values)
