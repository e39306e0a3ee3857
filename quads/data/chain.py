"""Arithmetic chains: prompts, answers, their tokens and an independent checker. The one home of the toy's templates.

    prompt    ^3+5*2-7=      start mark, first digit, one operator+digit per operation, the ask mark
    answer    869;           after each operation the running result modulo 10, left to right, then the end mark
                             (3+5 = 8; 8*2 = 16 -> 6; 6-7 = -1 -> 9)

An operator with its digit is ONE token, so a prompt of N operations has N+3 tokens and its answer N+1.
Vocabulary (43 symbols, position = token id): 0-9, +0..+9, -0..-9, *0..*9, =, ;, ^.

Legend: B problems, N operations; all arrays int64.
Differs from ordinary arithmetic: no operator precedence, and every step is reduced modulo 10, so that one digit
carries the whole state and each token of the answer can be right or wrong by itself. No torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

NAME = "chain"  # data_source of the rows and name of the grader
OPERATORS = "+-*"
START, ASK, END = "^", "=", ";"
SYMBOLS: tuple[str, ...] = (*"0123456789", *(o + d for o in OPERATORS for d in "0123456789"), ASK, END, START)
ID = {symbol: i for i, symbol in enumerate(SYMBOLS)}
PATTERN = r"[+\-*][0-9]|."  # one match = one symbol; also the tokenizer's split rule
DRAWN_AT_ONCE = 256  # fixed, because numpy's stream depends on the shape that is asked for
MAX_OPERATIONS = 12  # keys of problems are base-30 numbers in int64


@dataclass(frozen=True)
class Problems:
    """B chains of N operations."""

    start: Ints  # [B], first digit
    operators: Ints  # [B,N], index into OPERATORS
    operands: Ints  # [B,N], digit

    def __len__(self) -> int:
        return len(self.start)

    @property
    def operations(self) -> int:
        return int(self.operands.shape[1])

    def take(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_] | slice) -> Problems:
        """The problems at `rows`, in that order."""
        return Problems(self.start[rows], self.operators[rows], self.operands[rows])


def concatenate(parts: list[Problems]) -> Problems:
    """All problems of `parts` (same number of operations), in order."""
    return Problems(
        np.concatenate([p.start for p in parts]),
        np.concatenate([p.operators for p in parts]),
        np.concatenate([p.operands for p in parts]),
    )


def count_distinct(operations: int, operators: str) -> int:
    """How many different prompts exist."""
    return int(10 * (10 * len(set(operators))) ** operations)


def draw(count: int, operations: int, operators: str, rng: np.random.Generator) -> Problems:
    """`count` problems, uniform and independent (repeats possible). Raises ValueError on unusable arguments."""
    if not 1 <= operations <= MAX_OPERATIONS:
        raise ValueError(f"operations={operations}: expected 1 to {MAX_OPERATIONS}")
    unknown = sorted(set(operators) - set(OPERATORS))
    if unknown or not operators:
        raise ValueError(f"operators={operators!r}: expected some of {OPERATORS!r}, unknown {unknown}")
    allowed = np.array([OPERATORS.index(o) for o in OPERATORS if o in operators], dtype=np.int64)
    start_B = rng.integers(0, 10, count)
    operators_BN = allowed[rng.integers(0, len(allowed), (count, operations))]
    return Problems(start_B, operators_BN, rng.integers(0, 10, (count, operations)))


def keys(problems: Problems) -> Ints:
    """One integer per problem, equal exactly where the prompts are equal. int64 [B]."""
    key_B = problems.start.copy()
    for n in range(problems.operations):
        key_B = key_B * 30 + 10 * problems.operators[:, n] + problems.operands[:, n]
    return key_B


def draw_new(count: int, operations: int, operators: str, rng: np.random.Generator, seen: Ints) -> Problems:
    """`count` distinct problems, none with a key in `seen`. A larger count with the same rng begins with the same ones.

    Raises ValueError where fewer than twice as many prompts exist as are wanted or excluded: drawing would stall.
    """
    exist = count_distinct(operations, operators)
    if 2 * (count + len(seen)) > exist:
        raise ValueError(
            f"{count} new prompts beside {len(seen)} used ones were asked for, but only {exist} exist with "
            f"operations={operations}, operators={operators!r}; ask for fewer prompts or raise data.operations"
        )
    parts: list[Problems] = []
    missing = count
    while missing > 0:
        batch = draw(DRAWN_AT_ONCE, operations, operators, rng)
        key_B = keys(batch)
        first_B = np.zeros(len(batch), dtype=bool)
        first_B[np.unique(key_B, return_index=True)[1]] = True
        fresh = batch.take(first_B & ~np.isin(key_B, seen))
        parts.append(fresh)
        seen = np.concatenate([seen, keys(fresh)])
        missing -= len(fresh)
    return concatenate(parts).take(slice(count))


def step(result_B: Ints, operator_B: Ints, operand_B: Ints) -> Ints:
    """One operation modulo 10 on each row."""
    choices = (result_B + operand_B, result_B - operand_B, result_B * operand_B)
    return np.choose(operator_B, choices) % 10


def answer_digits(problems: Problems, noise: float = 0.0, rng: np.random.Generator | None = None) -> Ints:
    """Running results, int64 [B,N].

    With `noise` each digit is replaced with that probability by a uniform one and THE CHAIN GOES ON FROM IT: a
    demonstration is then locally right almost everywhere and globally often wrong, the latent skill RL can sharpen.
    """
    if noise and rng is None:
        raise ValueError(f"noise={noise} needs a random generator; pass rng")
    result_B = problems.start
    digits = []
    for n in range(problems.operations):
        result_B = step(result_B, problems.operators[:, n], problems.operands[:, n])
        if noise and rng is not None:
            replaced_B = rng.random(len(problems)) < noise
            result_B = np.where(replaced_B, rng.integers(0, 10, len(problems)), result_B)
        digits.append(result_B)
    return np.stack(digits, axis=1)


def prompt_ids(problems: Problems) -> Ints:
    """Token ids of the prompts, int64 [B,N+3]."""
    ids = np.empty((len(problems), problems.operations + 3), dtype=np.int64)
    ids[:, 0], ids[:, 1], ids[:, -1] = ID[START], problems.start, ID[ASK]
    ids[:, 2:-1] = 10 + 10 * problems.operators + problems.operands
    return ids


def answer_ids(digits_BN: Ints) -> Ints:
    """Token ids of answers with the end mark, int64 [B,N+1]."""
    return np.concatenate([digits_BN, np.full((len(digits_BN), 1), ID[END])], axis=1)


def text_of(ids: Ints | list[int]) -> str:
    """The text of token ids, marks included."""
    return "".join(SYMBOLS[int(i)] for i in ids)


def ids_of(text: str) -> list[int]:
    """Token ids of a text. Raises ValueError naming a symbol outside the vocabulary."""
    symbols = re.findall(PATTERN, text, flags=re.DOTALL)
    unknown = sorted({s for s in symbols if s not in ID})
    if unknown:
        raise ValueError(f"{text!r}: {unknown} not in the vocabulary of {len(SYMBOLS)} symbols")
    return [ID[s] for s in symbols]


def check(prompt: str, answer: str) -> bool:
    """Whether `answer` (with its end mark) is exactly the right chain for `prompt`.

    Independent of the generator on purpose: works on the text and reduces Python's own unbounded integers.
    Raises ValueError if `prompt` is not a well-formed prompt.
    """
    match = re.fullmatch(r"\^([0-9])((?:[+\-*][0-9])+)=", prompt)
    if match is None:
        raise ValueError(f"{prompt!r} is not a chain prompt such as '^3+5*2-7='")
    value = int(match[1])
    expected = ""
    for symbol, digit in re.findall(r"([+\-*])([0-9])", match[2]):
        value = {"+": value.__add__, "-": value.__sub__, "*": value.__mul__}[symbol](int(digit))
        expected += str(value)[-1] if value >= 0 else str((10 - int(str(value)[-1])) % 10)
    return answer == expected + ";"
