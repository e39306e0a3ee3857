r"""Grading of mathematical answers: a response and its ground truth in, a Grade out.

    response -> text after </think> -> last box -> integer path -> normalise -> shape -> exact fractions -> symbolic
    worker

    no_answer   no box, an unclosed or empty last box, reasoning that never ended ("no_final" in the detail)
    wrong       another value; also an answer refused by a guard, or more than 8 different boxes (see the detail)
    timeout     the symbolic comparison used up its CPU time twice; memory: it ran out of memory twice
    grader_error the ground truth cannot be read, or the comparison raised twice: masked, never the answer's fault
    infra_error the worker did not start or vanished twice

Contract: never raises on any response or ground truth, may be called from any thread, imports neither sympy nor
math-verify into this process. The same function serves the training reward and the evaluation.
Differs from math-verify as documented: strict (box only, last box only), exact (no rounding), and killable. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from quads.rewards.math import compare, structure
from quads.rewards.math.extract import Extraction, extract
from quads.rewards.math.integer import parse_integer
from quads.rewards.math.normalize import normalize, strip_braces
from quads.rewards.math.pool import Pool
from quads.rewards.types import Grade, Status

AnswerType = Literal["int", "expr", "list", "set", "tuple", "interval", "matrix", "text"]
ANSWER_TYPES: tuple[AnswerType, ...] = get_args(AnswerType)
MAX_RAW = 4096
MAX_NORMALISED = 512
POOL = Pool()

_REASONS = {
    "no_final": "no_final: reasoning was opened and never closed",
    "no_box": "no \\boxed{} or \\fbox{} in the final text",
    "unclosed": "the last box is not closed",
    "empty": "the last box is empty",
    "too_long": "the last box does not close within 65536 characters",
}


@dataclass(frozen=True)
class Gold:
    """A ground truth, read once: shape, unit, integer value where it is one, second reading where it has two."""

    node: structure.Node
    text: str
    unit: str | None
    integer: int | None
    is_list: bool
    number: bool
    second: Gold | None = None


class _FailedError(Exception):
    def __init__(self, status: Status, detail: str) -> None:
        super().__init__(detail)
        self.status: Status = status


def grade(
    text: str,
    ground_truth: str,
    finished: bool = True,
    *,
    answer_type: AnswerType | None = None,
    think_opened: bool = False,
) -> Grade:
    """Grade one response.

    answer_type: what the ground truth is; None reads it off its form. think_opened: the prompt ended in <think>.
    `finished` does not change the verdict (a complete last box counts), only the detail of no_answer.
    """
    try:
        gold = read_gold(ground_truth, answer_type)
    except compare.GoldError as error:
        return Grade(0.0, "grader_error", detail=f"ground truth {ground_truth[:80]!r}: {error}")
    found = extract(text, join=gold.is_list, opened=think_opened)
    if found.content is None:
        return Grade(0.0, "no_answer", detail=_REASONS[found.problem] + ("" if finished else "; cut off at the limit"))
    shown = found.content.strip()[:MAX_NORMALISED]
    if gold.integer is not None and not found.problem and (value := parse_integer(found.content)) is not None:
        right = value == gold.integer
        return Grade(float(right), "correct" if right else "wrong", shown)
    status, detail = _judge(gold, found)
    return Grade(float(status == "correct"), status, shown, detail)


def grade_aime(text: str, ground_truth: str, finished: bool = True) -> Grade:
    """Grade an answer that must be an integer. A ground truth that is none is a grader_error."""
    return grade(text, ground_truth, finished, answer_type="int")


def validate_gold(ground_truth: str, answer_type: AnswerType | None = None) -> str:
    """Why a ground truth cannot be graded, or "": it must parse and equal itself without looking at its spelling."""
    try:
        gold = read_gold(ground_truth, answer_type)
        return "" if compare.Comparison(_ask, literal=False).same(gold.node, gold.node) else "it does not equal itself"
    except (compare.GoldError, compare.RefusedError, _FailedError) as error:
        return str(error)


def _judge(gold: Gold, found: Extraction) -> tuple[Status, str]:
    if found.problem == "spam":
        return "wrong", "spam: more than 8 different boxed values"
    raw = strip_braces(found.content or "")
    if len(raw) > MAX_RAW:
        return "wrong", f"guard: {len(raw)} characters in the box"
    try:
        right = _matches(gold, raw) or (gold.second is not None and _matches(gold.second, raw))
    except (compare.RefusedError, structure.TooComplexError) as error:
        return "wrong", f"guard: {error}"
    except compare.GoldError as error:
        return "grader_error", f"ground truth: {error}"
    except _FailedError as error:
        return error.status, str(error)
    return ("correct" if right else "wrong"), ""


def _matches(gold: Gold, raw: str) -> bool:
    clean = normalize(raw, thousands=gold.number)
    if len(clean.text) > max(MAX_NORMALISED, len(gold.text)):
        raise compare.RefusedError(f"{len(clean.text)} characters, at most {MAX_NORMALISED}")
    if gold.unit and clean.unit and gold.unit != clean.unit:
        return False
    if isinstance(gold.node, structure.Word):
        # Words may hold commas and "or": they are compared as a whole before any shape is read.
        if compare.same_words(gold.node, structure.Leaf(clean.text)):
            return True
    return compare.Comparison(_ask).same(gold.node, structure.parse(clean.text))


@lru_cache(maxsize=65_536)
def read_gold(ground_truth: str, answer_type: AnswerType | None = None) -> Gold:
    """The ground truth as the grader sees it. Raises GoldError where it has no readable form."""
    if answer_type is not None and answer_type not in ANSWER_TYPES:
        raise compare.GoldError(f"answer_type {answer_type!r} is none of {', '.join(ANSWER_TYPES)}")
    if not ground_truth.strip():
        raise compare.GoldError("empty")
    gold = _read(ground_truth, answer_type, thousands=answer_type in (None, "int", "expr"))
    if answer_type is None and gold.number:
        # "100,200" is a number with a separator or a list of two: nothing but the data set knows.
        plain = _read(ground_truth, None, thousands=False)
        if plain.is_list:
            return Gold(gold.node, gold.text, gold.unit, gold.integer, False, True, second=plain)
    return gold


def _read(ground_truth: str, answer_type: AnswerType | None, thousands: bool) -> Gold:
    clean = normalize(strip_braces(ground_truth), thousands=thousands)
    try:
        node = structure.parse(clean.text)
    except structure.TooComplexError as error:
        raise compare.GoldError(str(error)) from None
    node = _as_type(node, clean.text, answer_type)
    integer = parse_integer(clean.text) if isinstance(node, structure.Leaf) else None
    if answer_type == "int" and integer is None:
        raise compare.GoldError("not an integer")
    is_list = isinstance(node, structure.Items) and node.kind == "list"
    return Gold(node, clean.text, clean.unit, integer, is_list, isinstance(node, structure.Leaf | structure.Equation))


def _as_type(node: structure.Node, text: str, answer_type: AnswerType | None) -> structure.Node:
    """The shape that the data set declares, where the spelling alone says another."""
    if answer_type == "text":
        return node if isinstance(node, structure.Word) else structure.Word(text.strip(" .()"))
    if answer_type == "list":
        return structure.Items("list", node.items if isinstance(node, structure.Items) else (node,))
    if isinstance(node, structure.Items) and node.kind == "list":
        if answer_type == "set":
            return structure.Items("set", node.items, "\\{\\}")
        if answer_type == "tuple":
            return structure.Items("tuple", node.items, "()")
    return node


def _ask(operation: compare.Operation, gold: str, answer: str) -> bool:
    reply = POOL.ask(operation, gold, answer)
    if reply.verdict == "same" or reply.verdict == "different":
        return reply.verdict == "same"
    if reply.verdict == "unparsed_gold":
        raise compare.GoldError(f"not readable: {reply.detail}")
    if reply.verdict == "unparsed_answer":
        raise compare.RefusedError(f"not readable: {reply.detail}")
    raise _FailedError(reply.verdict, reply.detail)
