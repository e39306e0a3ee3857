"""The re-enacted official procedure against verdicts of LiveCodeBench's own `run_test` (28fef95).

The column OFFICIAL was recorded by running that file, unchanged, on these programs; ours must agree. Expected output is
"ok" everywhere. Where strict differs, a correct program fails only because of the in-process procedure, or (a `return`
at module level) the other way round.
"""

from __future__ import annotations

import pytest

from quads.rewards.code import CodeGrader, Example, Limits, Task

PROGRAMS = [
    # name, program, input, official verdict, strict verdict
    ("import of stdin", "from sys import stdin\nprint(stdin.readline())", "ok\n", "pass", "pass"),
    ("stdin of the prelude", "print(stdin.readline())", "ok\n", "pass", "pass"),
    ("iterating imported stdin", "from sys import stdin\nfor l in stdin: print(l)", "ok\n", "fail", "pass"),
    ("readlines", "import sys\nprint(sys.stdin.readlines()[0])", "ok\nx\n", "pass", "pass"),
    ("size of stdin", "import os\nprint(os.read(0, os.fstat(0).st_size).decode())", "ok", "fail", "pass"),
    (
        "second byte line",
        "import sys\nr = sys.stdin.buffer.readline\nr(); print(r().decode())",
        "x\nok\n",
        "fail",
        "pass",
    ),
    ("import of stdout", "from sys import stdout\nstdout.write('ok')", "", "fail", "pass"),
    ("stdout.write", "import sys\np = sys.stdout.write\np('ok')", "", "pass", "pass"),
    (
        "thread not joined",
        "import threading, time\ndef m():\n  time.sleep(.2); print('ok')\nthreading.Thread(target=m).start()",
        "",
        "fail",
        "pass",
    ),
    ("quit", "print('ok'); quit()", "", "error", "pass"),
    ("exit", "print('ok'); exit()", "", "pass", "pass"),
    ("status 1", "import sys\nprint('ok'); sys.exit(1)", "", "pass", "pass"),
    ("_exit", "import os\nprint('ok', flush=True); os._exit(0)", "", "fail", "pass"),
    ("future import", "from __future__ import annotations\nprint('ok')", "", "error", "pass"),
    ("numpy", "import numpy as np\nprint('ok' if np.arange(4).sum() == 6 else 0)", "", "pass", "pass"),
    ("guard", "def main():\n  print(input())\nif __name__=='__main__': main()", "ok", "pass", "pass"),
    ("guard not last", "if __name__=='__main__':\n  print('ok')\nx = 1", "ok", "fail", "pass"),
    (
        "closure instead of global",
        "n = 0\ndef g():\n  return n\nn = 5\nprint('ok' if g() == 5 else 0)",
        "",
        "pass",
        "pass",
    ),
    ("open(0)", "print(open(0).read())", "ok", "fail", "pass"),
    ("input replaced", "import sys; input = sys.stdin.readline\nprint(input().strip())", "ok\n", "pass", "pass"),
    ("return at module level", "print('ok')\nreturn", "", "pass", "error"),
    ("end of input", "try:\n  input()\nexcept EOFError: print('ok')", "", "pass", "pass"),
]


@pytest.mark.parametrize(("name", "program", "given", "official", "strict"), PROGRAMS, ids=[row[0] for row in PROGRAMS])
def test_official(grader: CodeGrader, name: str, program: str, given: str, official: str, strict: str) -> None:
    task = Task("stdin", (Example(given, "ok"),))
    result = grader.grade_program(program, task, Limits(seconds=4))
    assert (result.official, result.strict) == (official, strict), result
