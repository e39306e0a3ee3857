"""Exact-match grader of the arithmetic chains.

    score = 1  iff  the response is exactly N digits, the LAST one is right, and the end mark followed by itself

N is the length of `ground_truth`, the whole right chain ("869" for ^3+5*2-7=). Earlier digits may be wrong: only the
result counts, as in tasks with a chain of thought; they must be digits, because the end mark has its place after N.
A response that did not end there, or holds anything but N digits, is no_answer; one with a wrong last digit is wrong.

Three entries for three kinds of evidence:
    grade_tokens   token ids as the engine returned them: sees the end mark itself (evaluation)
    grade_text     text without the end mark, and the engine's word whether it stopped there
    compute_score  verl's custom reward function, text only. verl decodes with skip_special_tokens=True, which drops
                   the end mark, so finishing is inferred from the length: configs allow N+2 tokens, hence a cut
                   response of digits would have N+2 of them, and exactly N digits can only come from N digits and ";".
                   Its one blind spot is a start mark "^" inside the response, which decoding drops too.
Source: the toy of this project. Differs from "last number in the text": an unfinished chain earns nothing. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quads.data import chain
from quads.rewards.types import Grade


def grade_text(text: str, ground_truth: str, finished: bool) -> Grade:
    """Grade a response given as text without its end mark. Raises ValueError if `ground_truth` is not digits."""
    if not _digits(ground_truth):
        raise ValueError(f"ground_truth={ground_truth!r}: expected the whole right chain as digits, such as '869'")
    N = len(ground_truth)
    if not finished:
        return Grade(0.0, "no_answer", detail=f"cut off before the end mark after {len(text)} characters")
    if len(text) != N or not _digits(text):
        return Grade(0.0, "no_answer", detail=f"expected exactly {N} digits, got {text!r}")
    if text[-1] != ground_truth[-1]:
        return Grade(0.0, "wrong", extracted=text[-1])
    return Grade(1.0, "correct", extracted=text[-1])


def grade_tokens(ids: Sequence[int], ground_truth: str) -> Grade:
    """Grade a response given as token ids (no padding after the end mark is needed, what follows it is ignored).

    Raises ValueError on an id outside the vocabulary.
    """
    outside = [int(i) for i in ids if not 0 <= int(i) < len(chain.SYMBOLS)]
    if outside:
        raise ValueError(f"token id {outside[0]} is outside the vocabulary of {len(chain.SYMBOLS)} symbols")
    symbols = [chain.SYMBOLS[int(i)] for i in ids]
    finished = chain.END in symbols
    text = "".join(symbols[: symbols.index(chain.END)] if finished else symbols)
    return grade_text(text, ground_truth, finished)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    **_: Any,
) -> dict[str, float]:
    """verl's reward signature: {"score", "acc"} by the exact-length rule. Raises ValueError on another data source."""
    if data_source != chain.NAME:
        raise ValueError(f"data_source={data_source!r}: this function grades {chain.NAME!r} rows only")
    grade = grade_text(solution_str, ground_truth, finished=len(solution_str) == len(ground_truth))
    return {"score": grade.score, "acc": grade.score}


def _digits(text: str) -> bool:
    """ASCII digits only: str.isdigit also accepts superscripts and other scripts."""
    return text.isascii() and text.isdigit()
