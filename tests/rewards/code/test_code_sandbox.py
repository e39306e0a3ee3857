"""What programs try and do not get, what they may do, and what happens where the sandbox itself fails."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from descriptors import open_pipes

from quads.rewards.code import (
    CodeGrader,
    Example,
    Limits,
    Sandbox,
    SandboxUnavailableError,
    Task,
    launch,
    open_sandbox,
    probe,
    seccomp,
)
from quads.rewards.code.clock import sample
from quads.rewards.code.sandbox import Job, Outcome

SMALL = Limits(seconds=2, memory_mb=512)


def strict(grader: CodeGrader, program: str, given: str = "", expected: str = "ok", limits: Limits = SMALL) -> str:
    """Strict verdict of a stdin program with one test."""
    return replace_official(grader).grade_program(program, Task("stdin", (Example(given, expected),)), limits).strict


def functional(grader: CodeGrader, program: str, expected: str = "0", tests: int = 1, limits: Limits = SMALL) -> str:
    """Strict verdict of a functional program with the argument 0."""
    task = Task("functional", (Example("0", expected),) * tests, "f")
    return grader.grade_program(program, task, limits).strict


def replace_official(grader: CodeGrader) -> CodeGrader:
    return CodeGrader(grader.sandbox, grader.limits, official=False)


LEGITIMATE = {
    "reopened stdin": "print(open('/dev/stdin').read())",
    "reopened stdout": "input(); open('/dev/stdout', 'w').write('ok')",
    "stdin has a size": "import os\nprint(os.read(0, os.fstat(0).st_size).decode())",
    "bytes line by line": "import sys\nprint(sys.stdin.buffer.readline().decode())",
    "from sys import stdin": "from sys import stdin, stdout\nstdout.write(stdin.readline())",
    "big stack in a thread": (
        "import threading, sys\nsys.setrecursionlimit(10**6); threading.stack_size(2**27)\n"
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
        "t = threading.Thread(target=lambda: print('ok' if f(100000) else 0)); t.start()"
    ),
    "deep lru_cache": (
        "sys.setrecursionlimit(10**6)\n@functools.lru_cache(None)\n"
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint('ok' if f(40000) else 0)"
    ),
    "exit()": "print('ok'); exit()",
    "status 1 by SystemExit": "print('ok'); sys.exit(1)",
    "future import": "from __future__ import annotations\nprint('ok')",
    "numpy": "import numpy as np\nprint('ok' if np.arange(4).sum() == 6 else 'no')",
    "own processes": (
        "from multiprocessing import Pool\nif __name__ == '__main__':\n"
        "    with Pool(2) as pool: print('ok' if pool.map(abs, [-1, 1]) == [1, 1] else 'no')"
    ),
    "closes everything at its end": "print('ok', flush=True)\nimport os; os.closerange(0, 1000)",
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_ordinary_programs_pass(grader: CodeGrader, name: str) -> None:
    assert strict(grader, LEGITIMATE[name], given="ok\n") == "pass"


GUARDED = "r = 'no'\ntry:\n    {attempt}\nexcept OSError: r = 'ok'\nprint(r)"
ATTEMPTS = {
    "fill /dev/shm": "for i in range(9): open(f'/dev/shm/{i}', 'wb').write(bytes(20 << 20))",
    "fill /tmp": "for i in range(9): open(f'/tmp/{i}', 'wb').write(bytes(20 << 20))",
    "write to the root": "open('/x', 'w').write('x')",
    "write to /dev": "open('/dev/x', 'w').write('x')",
    "write to the interpreter": "open(os.__file__, 'a').write('x')",
    "reach the hypervisor": "__import__('socket').socket(40, 1)",
    "a raw socket": "__import__('socket').socket(2, 3)",
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_attempts_are_refused(grader: CodeGrader, name: str) -> None:
    assert strict(grader, "import os\n" + GUARDED.format(attempt=ATTEMPTS[name])) == "pass"


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("while True: print('x' * 1000)", "output"),
        ("a = []\nwhile True: a.append(bytearray(10**6))", "memory"),
        (
            "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        a = bytearray(b'x') * (200 << 20)\n"
            "        time.sleep(60)\ntime.sleep(60)",
            "memory",
        ),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
        ("import os\nos.kill(os.getpid(), 9)", "error"),
        ("import os\nprint('ok', flush=True); os._exit(3)", "error"),
        ("import ctypes\nctypes.string_at(0)", "error"),
        ("print('ok\\0')", "fail"),
    ],
)
def test_limits_have_their_verdict_and_the_tree_is_gone(grader: CodeGrader, program: str, verdict: str) -> None:
    assert strict(grader, program) == verdict
    assert sample(os.getpid()).pids[0] == os.getpid()
    assert not [pid for pid in sample(os.getpid()).pids if "runner" in _command(pid)]


def test_a_daemon_does_not_survive(sandbox: Sandbox) -> None:
    program = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n"
        "    if os.fork() == 0: time.sleep(600)\n    os._exit(0)\n"
        "time.sleep(0.5)\nprint('ok')"
    )
    outcome = sandbox.run(Job("stdin", program, ("",)), SMALL)
    assert (outcome.kind, outcome.output) == ("ok", "ok\n")
    # bwrap, its process 1, the program and the daemon were seen from outside.
    assert len(outcome.pids) >= 4
    assert not [pid for pid in outcome.pids if Path(f"/proc/{pid}/cmdline").exists() and "runner" in _command(pid)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("program", "expected", "verdict"),
    [
        ("def f(x): return x", "0", "pass"),
        ("class Solution:\n    def f(self, x): return (x, (x,))", "[0, [0]]", "fail"),
        ("def f(x): return 10**6000", "1" + "0" * 6000, "pass"),
        ("def f(x): return {1: x}", '{"1": 0}', "fail"),
        ("def f(x): return {'a': [x, None, True, 'é', 1.5]}", '{"a": [0, null, true, "\\u00e9", 1.5]}', "pass"),
        ("def f(x): return Fraction(1, 2) + x\nfrom fractions import Fraction", "0.5", "pass"),
        ("import numpy as np\ndef f(x): return np.int64(x)", "0", "pass"),
        ("def f(x):\n    a = []; a.append(a); return a", "0", "error"),
        ("def f(x): return (i for i in [])", "[]", "fail"),
        ("import sys\ndef f(x): sys.exit(0)", "0", "error"),
        ("import os\ndef f(x): os._exit(0)", "0", "error"),
        ("class Solution:\n    def f(self, x):\n        while True: pass", "0", "timeout"),
        ("def f(x): return bytearray(1 << 33)", "0", "memory"),
        # TRAP: the control pipe keeps the number that it has in this process, which holds many files late in a long run
        # of tests: a program that tries the first few numbers only finds it in a short run.
        # Forged messages on every descriptor claim a result; it is compared like any other, and can only do harm.
        (
            'import os\nfor d in range(3, 4096):\n    try: os.write(d, b\'["test",0]\\n["result",0,"true"]\\n\')\n'
            "    except OSError: pass\ndef f(x): return 2",
            "2",
            "fail",
        ),
        (
            "import os\ndef f(x):\n    while True:\n        for d in range(3, 4096):\n"
            "            try: os.write(d, b'x' * 1000000)\n            except OSError: pass",
            "0",
            "output",
        ),
    ],
)
def test_functional_programs(grader: CodeGrader, program: str, expected: str, verdict: str) -> None:
    # A flood has to meet the output limit, on a busy machine too, and not the limit of CPU time before it.
    limits = replace(SMALL, seconds=20.0) if verdict == "output" else SMALL
    assert functional(grader, program, expected, limits=limits) == verdict


def test_the_limit_is_per_test_and_not_for_all_together(grader: CodeGrader) -> None:
    work = "import time\ndef f(x):\n    t = time.process_time() + 0.3\n"
    work += "    while time.process_time() < t: pass\n    return x"
    assert functional(grader, work, tests=4, limits=replace(SMALL, seconds=0.6)) == "pass"
    assert functional(grader, work.replace("0.3", "1.5"), tests=2, limits=replace(SMALL, seconds=0.6)) == "timeout"


def test_a_failing_sandbox_is_tried_again_and_never_a_wrong_answer(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, failures = Task("stdin", (Example("", "ok"),)), iter([True, False, True, True])
    real = sandbox.run

    def run(*arguments: object) -> Outcome:
        return Outcome("infra", "made to fail") if next(failures) else real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(sandbox, "run", run)
    grader = CodeGrader(sandbox, official=False)
    assert grader.grade_program("print('ok')", task).grade.status == "correct"
    result = grader.grade_program("print('ok')", task)
    assert result.grade.status == "infra_error" and "made to fail" in result.detail


def test_a_program_that_was_never_started_is_infra(sandbox: Sandbox) -> None:
    broken = Sandbox("bwrap", launch.Python(Path("/nonexistent/python"), sandbox.python.prefix, ()))
    assert broken.run(Job("stdin", "print(1)", ("",)), SMALL).kind == "infra"


def test_without_bubblewrap_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    before = open_pipes()
    with pytest.raises(SandboxUnavailableError, match=r"apt-get install -y bubblewrap.*QUADS_WEAK_SANDBOX=namespaces"):
        open_sandbox()
    assert open_pipes() == before
    with pytest.raises(ValueError, match="bwrap, namespaces, rlimits"):
        open_sandbox("docker")  # type: ignore[arg-type]


def test_the_probe_reports_what_it_found(sandbox: Sandbox) -> None:
    report = sandbox.report
    assert report["level"] == sandbox.level == "bwrap"
    assert int(report["capabilities"], 16) == 0 and report["no_new_privileges"] == "1"
    assert report["processes_seen"] == 2 and 0 < report["forks"] <= probe.LIMITS.processes
    assert (report["seccomp"] == "2") == (seccomp.program() is not None)


@pytest.mark.parametrize("level", ["namespaces", "rlimits"])
def test_the_probe_sees_that_a_weak_level_is_no_bwrap(level: launch.Level, monkeypatch: pytest.MonkeyPatch) -> None:
    python = launch.Python.of_this_process(())
    system = Path("/usr/bin/python3").resolve()
    if os.geteuid() == 0 and not launch.reachable_by_others(python.executable):
        # Weak levels run programs as an unprivileged user, who cannot enter root's home.
        python = launch.Python(system, Path("/usr"), ())
    box = Sandbox(level, python)
    problems = probe.check(box)
    if level == "namespaces" and problems and "did not run" in problems[0]:
        pytest.skip(f"no user namespaces here: {problems[0]}")
    assert problems == []
    assert box.report["read"] and box.report["network"] == (level == "rlimits")
    monkeypatch.setattr(box, "level", "bwrap")
    assert any("hides files" in problem for problem in probe._broken_promises(box))
    monkeypatch.setattr(box, "level", level)
    grader = CodeGrader(box, official=False)
    result = grader.grade_program("print(input())", Task("stdin", (Example("ok", "ok"),)))
    assert result.strict == "pass" and f"sandbox={level}" in result.grade.detail
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\ntime.sleep(0.3)\nprint('ok')"
    outcome = box.run(Job("stdin", daemon, ("",)), SMALL)
    assert outcome.kind == "ok" and not [pid for pid in outcome.pids if "runner" in _command(pid)]


@pytest.mark.slow
def test_verdicts_do_not_change_under_load(grader: CodeGrader, busy: None) -> None:
    work = "import time\nwhile time.process_time() < 1.2: pass\nprint('ok')"
    limits = Limits(seconds=1.5)
    outcome = grader.sandbox.run(Job("stdin", work, ("",)), limits)
    assert outcome.kind == "ok"
    # The premise: by a stopwatch it would have been too late.
    assert outcome.wall > limits.seconds + 1
    assert strict(grader, "while True: pass", limits=limits) == "timeout"
    assert strict(grader, "import time\ntime.sleep(1)\nprint('ok')", limits=limits) == "pass"
    assert strict(grader, "import time\ntime.sleep(60)", limits=limits) == "timeout"
