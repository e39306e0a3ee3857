"""What runs inside the sandbox: limits itself, then runs one untrusted program. Standard library only, one file.

Started as `python -c "exec(<this text from a descriptor>)" JOB_FD CONTROL_FD`; it is read, not imported, inside. The
job holds the program, its limits and, for functional tasks and the official emulation, the inputs. It never holds an
expected output. Messages to the control pipe, one JSON list a line (a program may forge them: only its own verdict
depends on them, and only downwards, because the expected outputs are elsewhere):

    ["start", cpu seconds so far]   limits are on, the program's code starts now
    ["test", i]   ["result", i, encoded]   test i begins; its result (functional: quads.rewards.code.compare's encoding,
                                           official: the text printed)
    ["cpu", seconds]   CPU time at the end of the program text
    ["end", "error" | "memory" | "timeout", text]   why it stopped early

Modes:
    stdin       the program is __main__ of a real process with a real stdin; SystemExit of any status is a normal end
    functional  one `Solution` for all tests (a plain function where the text has no "class Solution")
    official    LiveCodeBench's own in-process procedure: main guard stripped, code wrapped into a function (so module
                globals become locals), a stdin object that is not iterable and whose buffer replays line 1, printed
                text captured. Only the clock differs: CPU time instead of SIGALRM on wall time.
Source of the official procedure: lcb_runner/evaluation/testing_util.py at 28fef95.
"""

import ast
import contextlib
import ctypes
import importlib
import io
import json
import os
import resource
import signal
import sys
import time
import types
from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

STAR = (
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json "
    "builtins typing"
).split()
PLAIN = [name for name in STAR if name not in ("builtins", "typing")]
PRELUDE = "\n".join(
    [f"from {name} import *" for name in STAR]
    + [f"import {name}" for name in PLAIN]
    + ["sys.setrecursionlimit(50000)\n"]
)
# Names that the official guard sets to None before it runs a program.
OFFICIAL_GUARD = {
    "os": (
        "kill system putenv remove removedirs rmdir fchdir setuid fork forkpty killpg rename renames truncate replace "
        "unlink fchmod fchown chmod chown chroot lchflags lchmod lchown getcwd chdir"
    ).split(),
    "shutil": ["rmtree", "move", "chown"],
    "subprocess": ["Popen"],
    "builtins": ["quit", "help"],
}
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38


class Control:
    """The pipe to the grading process, with every name it needs bound before a program can replace it."""

    def __init__(self, descriptor: int) -> None:
        encode, write = json.JSONEncoder(check_circular=False).encode, os.write

        def send(*message: object) -> None:
            data = (encode(list(message)) + "\n").encode("utf-8", "surrogatepass")
            while data:
                data = data[write(descriptor, data) :]

        self.send = send


def drop_privileges(uid: int) -> None:
    """Become `uid` for good. Only in a sandbox that root built, where the kernel ignores RLIMIT_NPROC for root."""
    for folder in ("/tmp", "/dev/shm"):
        os.chmod(folder, 0o1777)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    # The change of user took /proc/self away from this process, and with it /dev/stdin.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)


def set_limits(limits: dict[str, Any]) -> None:
    """Hard limits, which nothing inside can raise again."""
    mb = 1 << 20
    # A second measure next to the parent's clock: whole seconds, start-up included, hence never below the limit.
    cpu = int(limits["cpu_seconds"] + time.process_time()) + 1
    if limits.get("count_processes"):
        limits["processes"] += own_processes()
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_mb"] * mb),
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_FSIZE, limits["scratch_mb"] * mb),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_STACK, limits["stack_mb"] * mb),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard - (kind == resource.RLIMIT_CPU))
        # SIGXCPU first, which says why; SIGKILL a second later.
        resource.setrlimit(kind, (value, value + 1 if kind == resource.RLIMIT_CPU else value))


def own_processes() -> int:
    """Threads of this user, for a level without a user namespace: the kernel counts them all."""
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            pass
    return count


def encode(value: Any) -> Any:
    """The encoding of quads.rewards.code.compare. Subclasses count as their plain base, so no method of theirs runs."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, int):
        return ["i", hex(int.__index__(value))]
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return ["l", [encode(v) for v in list.__iter__(value)]]
    if isinstance(value, tuple):
        return ["t", [encode(v) for v in tuple.__iter__(value)]]
    if isinstance(value, dict):
        return ["d", [[encode(k), encode(v)] for k, v in dict.items(value)]]
    if kind in (Decimal, Fraction):
        exact = Fraction(value)
        return ["q", hex(exact.numerator), hex(exact.denominator)]
    if kind.__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
        return encode(value.item())
    return ["x", kind.__name__]


def report(control: Control, error: BaseException) -> None:
    """Say why a program stopped. Its exception may run its own code, which may fail again."""
    kind = "memory" if isinstance(error, MemoryError) else "timeout" if isinstance(error, TimeUpError) else "error"
    try:
        text = f"{type(error).__name__}: {error}"[:500]
    except BaseException:
        text = type(error).__name__
    control.send("end", kind, text)


def start(control: Control) -> None:
    """From here on the program is to blame for whatever happens."""
    control.send("start", time.process_time())


def run_stdin(job: dict[str, Any], control: Control) -> None:
    """The program as __main__; the interpreter then ends as always, waiting for its threads."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv = main, ["solution.py"]
    exec(PRELUDE, main.__dict__)
    start(control)
    used = time.process_time
    try:
        exec(compile(job["program"], "solution.py", "exec", dont_inherit=True), main.__dict__)
    except SystemExit:
        pass
    except BaseException as error:
        report(control, error)
        sys.exit(1)
    # A program may close every descriptor when it is done.
    with contextlib.suppress(OSError):
        control.send("cpu", used())


def run_functional(job: dict[str, Any], control: Control) -> None:
    """Call the method once per test. Inputs are decoded first: json belongs to the program afterwards."""
    arguments = [[json.loads(line) for line in lines] for lines in job["inputs"]]
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    space = module.__dict__
    exec(PRELUDE, space)
    start(control)
    try:
        exec(compile(job["program"], "solution.py", "exec", dont_inherit=True), space)
        owner = space["Solution"]() if "class Solution" in job["program"] else module
        method = getattr(owner, job["function"])
        for i, values in enumerate(arguments):
            control.send("test", i)
            result = method(*values)
            control.send("result", i, ENCODE_JSON(encode(result)))
    except BaseException as error:
        report(control, error)
    os_exit(0)


class TimeUpError(Exception):
    """CPU time of one test is used up (official emulation, where it is raised inside the program)."""


class OfficialBuffer:
    """`sys.stdin.buffer` of the official runner: everything, or line 1 again and again."""

    def __init__(self, text: str) -> None:
        self.data = text.encode()

    def read(self, *_: object) -> bytes:
        return self.data

    def readline(self, *_: object) -> bytes:
        return self.data.split(b"\n")[0] + b"\n"


class OfficialStdin:
    """`sys.stdin` of the official runner. Not iterable: special methods are not looked up through __getattr__."""

    def __init__(self, text: str) -> None:
        self._text, self._io, self.buffer = text, io.StringIO(text), OfficialBuffer(text)

    def read(self, *_: object) -> str:
        return self._text

    def readlines(self, *_: object) -> list[str]:
        return self._text.split("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._io, name)


def official_source(program: str) -> str:
    """The official transformation: guard stripped, imports in front, the rest inside one function."""
    try:
        last = ast.parse(program).body[-1]
        if isinstance(last, ast.If) and ast.unparse(last.test).strip() == "__name__ == '__main__'":
            program = _text(ast.parse(program).body[:-1]) + "\n" + _text(last.body)
    except Exception:
        pass
    try:
        body = ast.parse(program).body
        imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
        rest = [node for node in body if not isinstance(node, (ast.Import, ast.ImportFrom))]
        empty = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        wrapped = ast.FunctionDef(name="wrapped_function", args=empty, body=rest, decorator_list=[], lineno=-1)
        return "\n".join([PRELUDE, _text(imports), ast.unparse(wrapped)])
    except Exception:
        return program


def _text(nodes: Sequence[ast.stmt]) -> str:
    return "\n".join(ast.unparse(node) for node in nodes)


def official_guard(program: str) -> None:
    """Disarm modules as the official runner does; it has numpy loaded by then."""
    if "numpy" in program:
        with contextlib.suppress(ImportError):
            importlib.import_module("numpy")
    for module, names in OFFICIAL_GUARD.items():
        for name in names:
            setattr(importlib.import_module(module), name, None)
    for name in ("ipdb", "joblib", "resource", "psutil", "tkinter"):
        sys.modules[name] = None  # type: ignore[assignment]


def time_up(*_: object) -> None:
    """Handler of SIGPROF in the official procedure."""
    raise TimeUpError("CPU time of this test is used up")


def run_official(job: dict[str, Any], control: Control) -> None:
    """All tests in one process, as the official runner does; printed text goes back test by test."""
    source, real_stdin, real_stdout = official_source(job["program"]), sys.stdin, sys.stdout
    set_timer = signal.setitimer
    lines: Iterator[str] = iter(())
    signal.signal(signal.SIGPROF, time_up)
    official_guard(source)
    # `from sys import stdin` is hoisted and gets the real object, whose methods the official runner replaces per test.
    real_stdin.__dict__["readline"] = lambda *_: next(lines)
    start(control)
    try:
        module = types.ModuleType("tmp_sol")
        set_timer(signal.ITIMER_PROF, job["seconds"])
        exec(compile(source, "<string>", "exec", dont_inherit=True), module.__dict__)
        owner = module.Solution() if "class Solution" in source else module
        method = owner.wrapped_function
        for i, text in enumerate(job["inputs"]):
            control.send("test", i)
            lines = iter(text.split("\n"))
            real_stdin.__dict__["read"] = lambda *_, text=text: text
            real_stdin.__dict__["readlines"] = lambda *_, text=text: text.split("\n")
            printed: Any = io.StringIO()
            # Closing it would lose the text.
            printed.close = lambda: None
            given: Any = OfficialStdin(text)
            sys.stdin, sys.stdout = given, printed
            set_timer(signal.ITIMER_PROF, job["seconds"])
            try:
                method()
            except SystemExit:
                pass
            set_timer(signal.ITIMER_PROF, 0)
            sys.stdin, sys.stdout = real_stdin, real_stdout
            control.send("result", i, printed.getvalue())
    except Exception as error:
        set_timer(signal.ITIMER_PROF, 0)
        report(control, error)
    os_exit(0)


def main() -> None:
    """Read the job, give up rights, set limits, run."""
    job_fd, control_fd = int(sys.argv[1]), int(sys.argv[2])
    with open(job_fd, encoding="utf-8") as file:
        job = json.load(file)
    os.set_inheritable(control_fd, False)
    control = Control(control_fd)
    if job["uid"] is not None:
        drop_privileges(job["uid"])
    ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.chdir(job["folder"])
    sys.path[0] = job["folder"]
    sys.path += job["packages"]
    set_limits(job["limits"])
    modes = {"stdin": run_stdin, "functional": run_functional, "official": run_official}
    modes[job["mode"]](job, control)


ENCODE_JSON, os_exit = json.JSONEncoder(check_circular=False).encode, os._exit
if __name__ == "__main__":
    main()
