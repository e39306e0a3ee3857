"""Grade generated samples: adapter, then the grader of the training reward; no engine, no torch.

    chain   exact match on the end of a chain          (quads.rewards.chain)
    math    last box, integers, then symbolic worker   (quads.rewards.math)
    code    sandboxed program, strict and official     (quads.rewards.code)

Contract: a verdict depends on (response, truth) only, so grading the same samples twice gives the same records. A
grader_error or infra_error is tried once more here (the graders retry inside, too) and then stays what it is: counted,
masked from every mean, never wrong. Programs run in parallel and their verdicts are cached under `cache`.
Differs from grading while generating: a fixed grader, or a new one, needs no engine (python -m quads.regrade).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quads.data.toy_benchmarks import ADAPTERS
from quads.evaluation.generations import Generation
from quads.evaluation.problems import Question
from quads.rewards import code, math
from quads.rewards.registry import grader
from quads.rewards.types import FAILURES, Grade

log = logging.getLogger(__name__)

Item = tuple[Question, Generation]


@dataclass(frozen=True)
class Graded:
    """What the grader saw and said; `official` is the second verdict on a program, None elsewhere."""

    response: str
    grade: Grade
    official: str | None = None


def respond(question: Question, generation: Generation) -> str:
    """The text that is graded: the response, through the adapter of a toy benchmark."""
    if question.adapter is None:
        return generation.text
    return ADAPTERS[question.adapter](generation.text, generation.finish_reason == "stop")


class Grading:
    """Grades batches. Sandbox and verdict cache are opened at the first program, or by `check`, until `close`."""

    def __init__(self, sandbox: code.launch.Level, cache: Path | None) -> None:
        self.weakest, self.cache = sandbox, cache
        self._programs: code.CodeGrader | None = None

    def close(self) -> None:
        """Close the verdict cache, if a program has opened it."""
        if self._programs is not None:
            self._programs.close()

    @property
    def level(self) -> str | None:
        """Isolation that programs really ran under; None where none ran. Known after `close`, too."""
        return self._programs.sandbox.level if self._programs else None

    def check(self, questions: Sequence[Question]) -> None:
        """Open the sandbox now if a program will be graded. Raises SandboxUnavailableError before the engine starts."""
        if any(q.grader == "code" for q in questions):
            self._open()

    def _open(self) -> code.CodeGrader:
        if self._programs is None:
            self._programs = code.CodeGrader(code.open_sandbox(self.weakest), cache_dir=self.cache)
        return self._programs

    def grade(self, items: Sequence[Item]) -> list[Graded]:
        """One verdict per item, in order."""
        out = self._once(items)
        failed = [i for i, g in enumerate(out) if g.grade.status in FAILURES]
        if failed:
            log.warning("grading failed for %d samples (%s), trying once more", len(failed), out[failed[0]].grade)
            for i, again in zip(failed, self._once([items[i] for i in failed]), strict=True):
                out[i] = again
        return out

    def _once(self, items: Sequence[Item]) -> list[Graded]:
        programs = [i for i, (q, _) in enumerate(items) if q.grader == "code"]
        verdicts = dict(zip(programs, self._code([items[i] for i in programs]), strict=True)) if programs else {}
        return [verdicts[i] if i in verdicts else _text(q, g) for i, (q, g) in enumerate(items)]

    def _code(self, items: Sequence[Item]) -> list[Graded]:
        responses = [respond(q, g) for q, g in items]
        out: list[Graded | None] = [None] * len(items)
        # the same program on the same tests runs once, also where no cache folder is given
        first: dict[tuple[str, str], int] = {}
        tasks: dict[int, code.Task] = {}
        for i, (q, _) in enumerate(items):
            try:
                task = code.Task.parse(q.truth)
            except (ValueError, KeyError, TypeError) as error:
                out[i] = Graded(responses[i], Grade(0.0, "grader_error", detail=f"tests of {q.id}: {error}"))
                continue
            if first.setdefault((responses[i], q.truth), i) == i:
                tasks[i] = task
        done = self._open().grade_responses((responses[i], task) for i, task in tasks.items())
        results = dict(zip(tasks, done, strict=True))
        for i, (q, _) in enumerate(items):
            if out[i] is None:
                result = results[first[responses[i], q.truth]]
                out[i] = Graded(responses[i], result.grade, result.official)
        return [g for g in out if g is not None]


def _text(question: Question, generation: Generation) -> Graded:
    response, finished = respond(question, generation), generation.finish_reason == "stop"
    judge: Callable[..., Grade] = math.grade if question.grader == "math" else grader(question.grader)
    extra = {"answer_type": question.answer_type} if question.grader == "math" else {}
    return Graded(response, judge(response, question.truth, finished, **extra))
