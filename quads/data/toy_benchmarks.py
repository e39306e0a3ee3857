r"""Benchmarks that the toy model can attempt: three of mathematics by depth, one of programs. Named for what they are.

    chain_depth<d>   a chain of the trained length N whose result depends on its last d operations only: the operation
                     before them is `*0`, and no `*0` stands among them. d = N: no `*0` anywhere. The answer is the last
                     result; graded by the mathematical grader
    chain_code       a fresh chain; the answer is the program that prints all N results; graded in the sandbox

Why depth and not length: the model is trained on chains of exactly N operations and answers any other length with N
digits or none (measured on the toy: chains of 4 operations 2 % right, of 8 operations at the share that ignores them),
so a shorter or longer chain measures its positions, not its arithmetic. An error before a `*0` is forgiven by it, hence
the growing difficulty.

The model's 43 symbols hold no letter, brace or quote. So a documented ADAPTER turns its answer into what the graders
read, and does nothing else: no digit is added, dropped or corrected.
    boxed_last   "…869"  -> "…869 \boxed{9}"                     no end mark or no digit: unchanged, hence no answer
    print_all    "869"   -> ```python\nprint("869")\n```         no end mark: unchanged, hence no program
chain_code is sandbox plumbing at toy scale: it says that extraction, sandbox and verdicts work, not that a model of
this size writes programs.

Rows: {"benchmark", "index", "prompt" [chat], "answer", "grader", "adapter"}; `answer` of a code row: tests as JSON.
Distinct from all rows of train, eval and calibration (exactly), and from each other. A warm-up prompt may coincide: one
in 10 * 30**6 per pair. Differs from quads.data.build in that these rows never decide a training result. No torch.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from quads.config import Benchmarks, Data
from quads.data import build, chain

Row = dict[str, Any]
DEPTH = re.compile(r"chain_depth([1-9][0-9]*)")
CODE = "chain_code"
TIMES_ZERO = 20  # 10 * operator index of "*" + operand 0


def is_toy(name: str) -> bool:
    """Whether this module makes the benchmark `name`."""
    return name == CODE or DEPTH.fullmatch(name) is not None


def draw_depth(count: int, data: Data, depth: int, rng: np.random.Generator, seen: chain.Ints) -> chain.Problems:
    """`count` distinct chains whose result depends on the last `depth` operations. Raises ValueError if impossible."""
    N = data.operations
    if not 1 <= depth <= N:
        raise ValueError(f"chain_depth{depth}: data.operations={N}; use a depth of 1 to {N}")
    if depth < N and "*" not in data.operators:
        raise ValueError(f"chain_depth{depth} needs '*' in data.operators, got {data.operators!r}; use chain_depth{N}")
    pairs = np.array([10 * chain.OPERATORS.index(o) + d for o in data.operators for d in range(10)], dtype=np.int64)
    lasting = pairs[pairs != TIMES_ZERO]
    parts: list[chain.Problems] = []
    found = 0
    for _ in range(1000):
        ids_BN = rng.choice(pairs, (chain.DRAWN_AT_ONCE, N))
        ids_BN[:, N - depth :] = rng.choice(lasting, (chain.DRAWN_AT_ONCE, depth))
        if depth < N:
            ids_BN[:, N - depth - 1] = TIMES_ZERO
        batch = chain.Problems(rng.integers(0, 10, chain.DRAWN_AT_ONCE), ids_BN // 10, ids_BN % 10)
        key_B = chain.keys(batch)
        first_B = np.zeros(len(batch), dtype=bool)
        first_B[np.unique(key_B, return_index=True)[1]] = True
        fresh = batch.take(first_B & ~np.isin(key_B, seen))
        parts.append(fresh)
        seen = np.concatenate([seen, chain.keys(fresh)])
        found += len(fresh)
        if found >= count:
            return chain.concatenate(parts).take(slice(count))
    raise ValueError(f"chain_depth{depth}: found {found} of {count} new chains; ask for fewer (evaluation.benchmarks)")


def build_rows(data: Data, benchmarks: Benchmarks) -> dict[str, list[Row]]:
    """Rows of the toy benchmarks among `benchmarks.names`. Raises ValueError if an answer fails the checker."""
    seen = np.concatenate([chain.keys(p) for p in build.draw_splits(data).values()])
    out: dict[str, list[Row]] = {}
    for name in (n for n in benchmarks.names if is_toy(n)):
        # the stream depends on the name: adding a benchmark changes no other (but for one that drew the same chain)
        stream = int.from_bytes(name.encode(), "little") % 2**32
        rng = np.random.default_rng(np.random.SeedSequence(benchmarks.seed, spawn_key=(stream,)))
        match = DEPTH.fullmatch(name)
        if match:
            problems = draw_depth(benchmarks.problems, data, int(match[1]), rng, seen)
        else:
            problems = chain.draw_new(benchmarks.code_problems, data.operations, data.operators, rng, seen)
        seen = np.concatenate([seen, chain.keys(problems)])
        out[name] = [_row(name, i, *pair) for i, pair in enumerate(_texts(problems))]
    return out


def _texts(problems: chain.Problems) -> list[tuple[str, str]]:
    prompts, answers = chain.prompt_ids(problems), chain.answer_digits(problems)
    pairs = [(chain.text_of(p), chain.text_of(a)) for p, a in zip(prompts, answers, strict=True)]
    for prompt, answer in pairs:
        if not chain.check(prompt, answer + chain.END):
            raise ValueError(f"{answer!r} is not the answer of {prompt!r}")
    return pairs


def _row(name: str, index: int, prompt: str, digits: str) -> Row:
    row: Row = {"benchmark": name, "index": index, "prompt": build.message(prompt)}
    if name == CODE:
        tests = {"mode": "stdin", "tests": [{"input": "", "output": digits + "\n"}]}
        return {**row, "answer": json.dumps(tests), "grader": "code", "adapter": "print_all"}
    return {**row, "answer": digits[-1], "grader": "math", "adapter": "boxed_last"}


def boxed_last(text: str, finished: bool) -> str:
    """The answer with its last digit in a box; unchanged where it did not end or does not end in a digit."""
    last = text[-2:]  # "+5" is one symbol, and no digit
    if not finished or not last or last[-1] not in "0123456789" or last[0] in chain.OPERATORS:
        return text
    return f"{text} \\boxed{{{text[-1]}}}"


def print_all(text: str, finished: bool) -> str:
    """The answer as a fenced one-line program that prints it; unchanged where it did not end."""
    return f"```python\nprint({json.dumps(text)})\n```" if finished else text


ADAPTERS = {"boxed_last": boxed_last, "print_all": print_all}
