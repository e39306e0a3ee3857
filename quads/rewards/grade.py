"""Regrade responses from a file: one JSON verdict per line on standard output, a summary on standard error.

    python -m quads.rewards.grade math CASES.jsonl      {"id", "gold", "response", "answer_type"?}
    python -m quads.rewards.grade aime CASES.jsonl      the same; the strict integer path
    python -m quads.rewards.grade code CASES.jsonl      {"id", "response", "mode", "tests", "fn_name"?, ...}

Each verdict: {"id", "score", "status", "extracted", "detail"}; code adds "official" (LiveCodeBench's own rules) and
"sandbox" (the level it ran in). Verdicts keep the order of the file. Exit status 0 when every line was graded, 3 when a
grader or the sandbox failed on some (statuses grader_error, infra_error), 2 for bad input: a line that is no case stops
the run before anything is graded, naming line, key and what is expected. No torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from quads.rewards.types import FAILURES, Grade

Case = dict[str, Any]
Verdict = dict[str, Any]
REQUIRED = {
    "math": ("id", "gold", "response"),
    "aime": ("id", "gold", "response"),
    "code": ("id", "response", "mode", "tests"),
}


class CaseFileError(ValueError):
    """A line of the case file cannot be graded; the message names the line and what is expected."""


def read_cases(path: Path, kind: str) -> list[Case]:
    """All cases of a file, checked. Raises CaseFileError for the first line that is none."""
    if not path.is_file():
        raise CaseFileError(f"{path}: no such file; give a JSONL file with one case per line")
    cases = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            case = json.loads(line)
        except json.JSONDecodeError as error:
            raise CaseFileError(f"{path}, line {number}: not JSON: {error}") from None
        missing = [k for k in REQUIRED[kind] if not isinstance(case, dict) or k not in case]
        if missing:
            need = ", ".join(REQUIRED[kind])
            raise CaseFileError(f"{path}, line {number}: lacks {', '.join(missing)}; a {kind} case needs all of {need}")
        cases.append(case)
    if not cases:
        raise CaseFileError(f"{path}: no cases in it")
    return cases


def _verdict(case: Case, grade: Grade, **more: Any) -> Verdict:
    return {
        "id": case["id"],
        "score": grade.score,
        "status": grade.status,
        "extracted": grade.extracted,
        "detail": grade.detail,
        **more,
    }


def math_grader() -> Callable[[Case], Verdict]:
    """Grades with the answer type of the case where it names one."""
    from quads.rewards.math import grade
    from quads.rewards.math.grade import ANSWER_TYPES

    def one(case: Case) -> Verdict:
        kind = case.get("answer_type")
        if kind is not None and kind not in ANSWER_TYPES:
            raise CaseFileError(f"case {case['id']}: answer_type {kind!r} is unknown; known: {', '.join(ANSWER_TYPES)}")
        return _verdict(case, grade(str(case["response"]), str(case["gold"]), answer_type=kind))

    return one


def aime_grader() -> Callable[[Case], Verdict]:
    """Grades integers from 0 to 999."""
    from quads.rewards.math import grade_aime

    return lambda case: _verdict(case, grade_aime(str(case["response"]), str(case["gold"])))


def code_grader() -> Callable[[Case], Verdict]:
    """Grades programs in the sandbox; the score is the strict verdict."""
    from quads.rewards.code import CodeGrader, grade_case

    # The pool of this module is the parallelism: one program at a time inside each call.
    grader = CodeGrader(workers=1)

    def one(case: Case) -> Verdict:
        result = grade_case(case, grader)
        return _verdict(case, result.grade, official=result.official, sandbox=result.sandbox)

    return one


GRADERS: dict[str, Callable[[], Callable[[Case], Verdict]]] = {
    "math": math_grader,
    "aime": aime_grader,
    "code": code_grader,
}


def verdicts(kind: str, cases: list[Case], workers: int) -> Iterator[Verdict]:
    """Verdicts in the order of the cases."""
    one = GRADERS[kind]()
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(one, cases)


def main(argv: list[str] | None = None) -> int:
    """Read, grade, print."""
    parser = argparse.ArgumentParser(prog="python -m quads.rewards.grade", description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=sorted(GRADERS), help="which grader")
    parser.add_argument("cases", type=Path, help="JSONL file")
    parser.add_argument("--workers", type=int, default=2, help="cases graded at once (verdicts do not depend on it)")
    args = parser.parse_args(argv)
    statuses: Counter[str] = Counter()
    score = 0.0
    try:
        for verdict in verdicts(args.kind, read_cases(args.cases, args.kind), args.workers):
            statuses[verdict["status"]] += 1
            score += verdict["score"]
            sys.stdout.write(json.dumps(verdict, ensure_ascii=False) + "\n")
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    total = statuses.total()
    counts = ", ".join(f"{name} {count}" for name, count in statuses.most_common())
    sys.stderr.write(f"{total} responses, mean score {score / total:.4f}: {counts}\n")
    return 3 if any(statuses[name] for name in FAILURES) else 0


if __name__ == "__main__":
    sys.exit(main())
