"""Grade programs against tests: LiveCodeBench's task semantics, in a sandbox, two verdicts side by side.

    strict    ours: the program is a real process with a real stdin (one per test), or one process per functional
              program; expected outputs stay here. This verdict is the score.
    official  what LiveCodeBench's runner would say, by its own in-process procedure re-enacted in the same sandbox
              (module globals become locals, sys.stdin is not iterable, ...). One process per program. For functional
              tasks both procedures agree and nothing runs twice. What differs on purpose: expected outputs are not
              inside, so programs that cheat the official runner by looking for them, or with an `__eq__`, still fail.

    verdict   pass | fail | error | timeout | memory | output | empty | infra
    status    correct| wrong| wrong | timeout | memory | wrong  | no_answer | infra_error

Tests run in order and stop at the first that is not passed. A sandbox failure is tried once more and then is
infra_error, never a wrong answer. `grade_many` grades in threads, each waiting for its own process tree.
Differs from verl's prime_code: no partial credit, no float tolerance, a limit per test and not for all together.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, cast, get_args

from quads.rewards.code import cache, launch
from quads.rewards.code.compare import same_output, same_value
from quads.rewards.code.extract import extract_program
from quads.rewards.code.limits import Limits
from quads.rewards.code.probe import open_sandbox
from quads.rewards.code.sandbox import Job, Outcome, Sandbox
from quads.rewards.code.task import Example, Task, argument_lines
from quads.rewards.types import Grade, Status

log = logging.getLogger(__name__)
# Part of the cache key: raise it with every change that can change a verdict.
GRADER_VERSION = 1
Verdict = Literal["pass", "fail", "error", "timeout", "memory", "output", "empty", "infra"]
STATUS: dict[Verdict, Status] = {
    "pass": "correct",
    "fail": "wrong",
    "error": "wrong",
    "timeout": "timeout",
    "memory": "memory",
    "output": "wrong",
    "empty": "no_answer",
    "infra": "infra_error",
}
WEAK_FLAG = "QUADS_WEAK_SANDBOX"


@dataclass(frozen=True)
class CodeResult:
    """Both verdicts on one program. `official` is None where it was not asked for."""

    strict: Verdict
    official: Verdict | None
    sandbox: launch.Level
    program: str
    detail: str = ""
    passed: int = 0
    tests: int = 0
    cpu: float = 0.0
    cached: bool = False

    @property
    def grade(self) -> Grade:
        """The strict verdict as the shared grade; the sandbox level is part of its detail."""
        status = STATUS[self.strict]
        detail = f"sandbox={self.sandbox} strict={self.strict} official={self.official} "
        detail += f"passed {self.passed}/{self.tests} {self.detail}"
        return Grade(float(status == "correct"), status, self.program or None, detail.strip())


class CodeGrader:
    """Grades programs in one sandbox.

    sandbox   default: `open_sandbox()`, which raises SandboxUnavailableError if bubblewrap does not work here
    workers   programs at a time; default half of the CPUs, at least 1
    cache_dir folder of the verdict cache, None for no cache
    official  also compute the official verdict (evaluation: yes; training reward: no need)
    """

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        limits: Limits | None = None,
        workers: int | None = None,
        cache_dir: Path | None = None,
        official: bool = True,
    ) -> None:
        self.sandbox, self.limits, self.official = sandbox or open_sandbox(), limits or Limits(), official
        self.workers = workers or max(1, len(os.sched_getaffinity(0)) // 2)
        self.cache = None if cache_dir is None else cache.VerdictCache(cache_dir)

    def close(self) -> None:
        """Close the verdict cache: with one, nothing can be graded afterwards."""
        if self.cache is not None:
            self.cache.close()

    def grade_response(self, response: str, task: Task, limits: Limits | None = None) -> CodeResult:
        """Grade the program that `extract_program` finds in `response`."""
        return self.grade_program(extract_program(response), task, limits)

    def grade_program(self, program: str, task: Task, limits: Limits | None = None) -> CodeResult:
        """Grade program text. Never raises for what a program does; ValueError comes from `Task` alone."""
        limits = limits or self.limits
        if not program.strip():
            verdict: Verdict | None = "error" if self.official else None
            return CodeResult("empty", verdict, self.sandbox.level, "", "no program", tests=len(task.tests))
        name = self._key(program, task, limits)
        stored = None if self.cache is None else self.cache.get(name)
        if stored is not None:
            return CodeResult(**{**stored, "program": program, "cached": True})
        strict = self._strict(program, task, limits)
        official = self._official(program, task, limits, strict) if self.official else None
        result = replace(strict, official=official)
        if self.cache is not None and "infra" not in (result.strict, result.official):
            self.cache.put(name, {k: v for k, v in asdict(result).items() if k != "program"})
        return result

    def grade_many(self, items: Iterable[tuple[str, Task]]) -> list[CodeResult]:
        """Grade (program text, task) pairs, `workers` at a time; results in the given order."""
        with ThreadPoolExecutor(self.workers, thread_name_prefix="code-grader") as pool:
            return list(pool.map(lambda item: self.grade_program(*item), items))

    def grade_responses(self, items: Iterable[tuple[str, Task]]) -> list[CodeResult]:
        """Grade (response text, task) pairs, `workers` at a time; results in the given order."""
        return self.grade_many((extract_program(response), task) for response, task in items)

    def _key(self, program: str, task: Task, limits: Limits) -> str:
        packages = {p.name: _version(p.name) for p in self.sandbox.python.packages if not p.name.endswith(".libs")}
        parts: dict[str, Any] = {"program": program, "task": asdict(task), "limits": asdict(limits)}
        parts |= {"version": GRADER_VERSION, "official": self.official, "packages": packages}
        parts |= {"level": self.sandbox.level, "python": self.sandbox.report.get("python", "")}
        return cache.key(parts)

    def _run(self, job: Job, limits: Limits, on_result: Any = None) -> Outcome:
        outcome = self.sandbox.run(job, limits, on_result)
        if outcome.kind == "infra":
            log.warning("sandbox failed, trying once more: %s", outcome.detail)
            outcome = self.sandbox.run(job, limits, on_result)
        return outcome

    def _strict(self, program: str, task: Task, limits: Limits) -> CodeResult:
        base = CodeResult("pass", None, self.sandbox.level, program, tests=len(task.tests))
        if task.kind == "functional":
            inputs = tuple(argument_lines(test.input) for test in task.tests)
            job = Job("functional", program, inputs, task.function)
            return self._all_tests(base, job, task, limits, same_value)
        cpu = 0.0
        for i, test in enumerate(task.tests):
            outcome = self._run(Job("stdin", program, (test.input,)), limits)
            cpu += outcome.cpu
            verdict = _verdict(outcome)
            if verdict == "pass" and not same_output(outcome.output, test.output):
                verdict = "fail"
            if verdict != "pass":
                detail = f"test {i}: {outcome.detail or _excerpt(outcome.output)}"
                return replace(base, strict=verdict, passed=i, detail=detail, cpu=cpu)
        return replace(base, passed=len(task.tests), cpu=cpu)

    def _official(self, program: str, task: Task, limits: Limits, strict: CodeResult) -> Verdict:
        if task.kind == "functional" or strict.strict == "infra":
            # Official code -4 is any exception, running out of memory included.
            return strict.strict
        job = Job("official", program, tuple(test.input for test in task.tests))
        return self._all_tests(strict, job, task, limits, same_output).strict

    def _all_tests(self, base: CodeResult, job: Job, task: Task, limits: Limits, same: Any) -> CodeResult:
        """Modes that run all tests in one process: compare as results arrive, stop at the first wrong one."""
        right: dict[int, bool] = {}

        def on_result(i: int, text: str) -> bool:
            if i < len(task.tests):
                right[i] = same(text, task.tests[i].output)
            return right.get(i, False)

        outcome = self._run(job, limits, on_result)
        passed = next((i for i in range(len(task.tests)) if not right.get(i, False)), len(task.tests))
        verdict = _verdict(outcome)
        if outcome.kind == "stopped":
            verdict = "fail"
        elif verdict == "pass" and passed < len(task.tests):
            # The process ended by itself (os._exit, sys.exit in a method) before its tests did.
            verdict = "fail" if job.mode == "official" else "error"
        elif verdict == "error" and job.mode == "official" and not outcome.detail.split(":")[0].isidentifier():
            # A dead process has no result; the official harness then keeps its initial -2, "wrong answer".
            verdict = "fail"
        seen = outcome.detail or _excerpt(outcome.results.get(passed))
        detail = "" if verdict == "pass" else f"test {passed}: {seen}"
        return replace(base, strict=verdict, passed=passed, detail=detail, cpu=base.cpu + outcome.cpu)


def _verdict(outcome: Outcome) -> Verdict:
    verdict = "pass" if outcome.kind == "ok" else outcome.kind
    return cast(Verdict, verdict) if verdict in get_args(Verdict) else "fail"


def _excerpt(text: str | None) -> str:
    return "no result" if text is None else f"got {text[:80]!r}"


@functools.cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


@functools.lru_cache(maxsize=1)
def default_grader() -> CodeGrader:
    """The grader of this process, without the official verdict. A weaker level only if QUADS_WEAK_SANDBOX names it."""
    return CodeGrader(open_sandbox(cast(launch.Level, os.environ.get(WEAK_FLAG, "bwrap"))), official=False)


def grade_text(text: str, ground_truth: str, finished: bool) -> Grade:
    """The registry's grader "code": `ground_truth` is the task as JSON (quads.rewards.code.task.Task.parse).

    `finished` is not looked at: LiveCodeBench grades whatever stands between the last two fences.
    A ground truth that cannot be read is grader_error: the fault of the data, not of the answer.
    """
    try:
        task = Task.parse(ground_truth)
    except (ValueError, KeyError, TypeError) as error:
        return Grade(0.0, "grader_error", detail=f"ground truth: {error}")
    return default_grader().grade_response(text, task).grade


def grade_stdin_program(program: str, tests: Sequence[tuple[str, str]], grader: CodeGrader | None = None) -> Grade:
    """For small tasks: grade program text against (input, expected output) pairs, each in a fresh process."""
    task = Task("stdin", tuple(Example(given, expected) for given, expected in tests))
    return (grader or default_grader()).grade_program(program, task).grade


def grade_case(case: Mapping[str, Any], grader: CodeGrader) -> CodeResult:
    """Grade one line of a case file: {"response", "mode", "tests", "fn_name"?, "timeout_s"?, "memory_mb"?}."""
    limits = grader.limits
    if "timeout_s" in case:
        limits = replace(limits, seconds=float(case["timeout_s"]))
    if "memory_mb" in case:
        limits = replace(limits, memory_mb=int(case["memory_mb"]))
    return grader.grade_response(str(case["response"]), Task.parse(case), limits)


def as_ground_truth(task: Task) -> str:
    """The JSON text that `grade_text` reads back as `task`."""
    return json.dumps({"mode": task.kind, "fn_name": task.function, "tests": [asdict(test) for test in task.tests]})
