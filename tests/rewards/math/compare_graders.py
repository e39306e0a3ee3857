"""Compares graders of mathematics on cases.jsonl and prints the table of docs/graders.md.

    python tests/rewards/math/compare_graders.py [CASES.jsonl] [--names]

Right means the `correct` field of the case. False positives and negatives are against this project's rules (strict
box, exact values, answer after </think>), so part of them is policy; --names lists the cases. Every grader runs in the
main thread of its own process: math-verify uses SIGALRM, and verl's graders swallow the error where it cannot. A case
that takes more than 60 s of wall time counts as hung: its process is ended and a new one goes on with the next case.
Times are wall seconds of all answered cases after one warm-up call. Run by hand: not a test.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LIMIT_S = 60.0
Case = dict[str, Any]


def ours(case: Case) -> bool:
    from quads.rewards.math import grade

    return grade(case["response"], case["gold"], answer_type=case["answer_type"]).status == "correct"


def ours_untyped(case: Case) -> bool:
    from quads.rewards.math import grade

    return grade(case["response"], case["gold"]).status == "correct"


def math_verify_readme(case: Case) -> bool:
    from math_verify import parse, verify

    return bool(verify(parse(f"${case['gold']}$"), parse(case["response"])))


def math_verify_reward(case: Case) -> bool:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    normalization = NormalizationConfig(
        basic_latex=True, units=True, malformed_operators=False, nits=False, boxed="all", equations=False
    )
    config = LatexExtractionConfig(
        boxed_match_priority=0, normalization_config=normalization, try_extract_without_anchor=False
    )
    answer = parse(case["response"], extraction_config=[config], extraction_mode="first_match")
    return bool(verify(parse(f"${case['gold']}$"), answer))


def verl_math_verify(case: Case) -> bool:
    from verl.utils.reward_score import math_verify

    return float(math_verify.compute_score(case["response"], case["gold"])) > 0


def verl_math_reward(case: Case) -> bool:
    from verl.utils.reward_score import math_reward

    return float(math_reward.compute_score(case["response"], case["gold"])) > 0


def verl_math_dapo(case: Case) -> bool:
    from verl.utils.reward_score import math_dapo

    return float(math_dapo.compute_score(case["response"], case["gold"])["score"]) > 0


def verl_math_dapo_box(case: Case) -> bool:
    from verl.utils.reward_score import math_dapo

    result = math_dapo.compute_score(case["response"], case["gold"], strict_box_verify=True)
    return float(result["score"]) > 0


def verl_prime_math(case: Case) -> bool:
    from verl.utils.reward_score import prime_math

    result = prime_math.compute_score(case["response"], case["gold"])
    return float(result[0] if isinstance(result, tuple) else result) > 0


GRADERS: dict[str, Callable[[Case], bool]] = {
    "quads.rewards.math, with answer types": ours,
    "quads.rewards.math, from the ground truth alone": ours_untyped,
    "math-verify, README": math_verify_readme,
    "math-verify, README's reward settings": math_verify_reward,
    "verl math_verify": verl_math_verify,
    "verl prime_math": verl_prime_math,
    "verl math_reward": verl_math_reward,
    "verl math_dapo, strict box": verl_math_dapo_box,
    "verl math_dapo": verl_math_dapo,
}


def serve(connection: Connection, name: str) -> None:
    """Answers cases in a process of its own: (verdict or None for an exception, seconds)."""
    logging.disable(logging.CRITICAL)
    # prime_math starts processes with functions that only a fork can pass on, and prints its errors.
    multiprocessing.set_start_method("fork", force=True)
    sys.stdout = open(os.devnull, "w")
    warnings.simplefilter("ignore")
    function = GRADERS[name]
    while True:
        case = connection.recv()
        start = time.perf_counter()
        try:
            verdict: bool | None = function(case)
        except Exception:
            verdict = None
        connection.send((verdict, time.perf_counter() - start))


class Grader:
    """One grader in a killable process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process: multiprocessing.process.BaseProcess | None = None

    def ask(self, case: Case) -> tuple[bool | None, float] | None:
        """(verdict, seconds), or None when it hangs."""
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=serve, args=(theirs, self.name))
            self.process.start()
            self.connection.send({"response": "\\boxed{\\frac{x}{2}}", "gold": "0.5x", "answer_type": "expr"})
            self.connection.recv()
        self.connection.send(case)
        if self.connection.poll(LIMIT_S):
            verdict: tuple[bool | None, float] = self.connection.recv()
            return verdict
        self.close()
        return None

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.terminate()
            self.process.join()
            self.process = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="?", type=Path, default=Path(__file__).parent / "cases.jsonl")
    parser.add_argument("--names", action="store_true", help="list the cases that each grader gets wrong")
    arguments = parser.parse_args()
    cases = [json.loads(line) for line in arguments.cases.read_text().splitlines()]
    print(f"| grader | right of {len(cases)} | false positives | false negatives | raised or hung | seconds |")
    print("|---|---|---|---|---|---|")
    for name in GRADERS:
        grader = Grader(name)
        wrong: dict[str, list[str]] = {"+": [], "-": [], "failed": []}
        seconds, right = 0.0, 0
        for case in cases:
            answer = grader.ask(case)
            verdict = answer[0] if answer else None
            seconds += answer[1] if answer else LIMIT_S
            right += bool(verdict) == case["correct"] and verdict is not None
            if verdict is None:
                wrong["failed"].append(case["id"])
            elif verdict != case["correct"]:
                wrong["+" if verdict else "-"].append(case["id"])
        grader.close()
        print(
            f"| {name} | {right} | {len(wrong['+'])} | {len(wrong['-'])} | {len(wrong['failed'])} | {seconds:.2f} |",
            flush=True,
        )
        if arguments.names:
            print({kind: " ".join(ids) for kind, ids in wrong.items() if ids}, flush=True)


if __name__ == "__main__":
    main()
