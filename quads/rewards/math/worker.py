"""The symbolic worker: reads one question a line, answers one verdict a line, dies when a question costs too much.

    question  {"operation": "expression" | "equation", "gold": str, "answer": str}
    verdict   {"verdict": "same" | "different" | "unparsed_gold" | "unparsed_answer" | "memory" | "error", "detail":
    str} start     one line {"verdict": "ready"} after sympy and the LaTeX tables are loaded (a second or more, not
    counted)

    python -m quads.rewards.math.worker CPU_SECONDS MEMORY_BYTES

CPU time per question: ITIMER_PROF with the default action of SIGPROF, so the kernel ends the process after that much
user and system time, even inside one long multiplication, and other load on the machine changes nothing. The parent
sees the signal in the exit status. Memory: RLIMIT_AS, reported as "memory" and followed by the end of the process.
Differs from SIGALRM (math-verify): no handler runs, no thread matters, wall time does not count. It leaves when its
input ends or its parent is gone, and ignores the terminal's SIGINT. No torch.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time

PARENT_POLL_S = 5.0


def serve(cpu_seconds: float) -> None:
    """Answer questions until the input ends or the parent is gone."""
    from quads.rewards.math import symbolic

    # Builds the parser's tables and the lazy parts of sympy.
    symbolic.same_expression("\\frac{1}{2}+\\sqrt{x}", "\\sqrt{x}+0.5")
    _send("ready")
    parent, pending = os.getppid(), b""
    while True:
        line, newline, rest = pending.partition(b"\n")
        if newline:
            pending = rest
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            verdict, detail = _answer(json.loads(line))
            signal.setitimer(signal.ITIMER_PROF, 0)
            _send(verdict, detail)
            if verdict == "memory":
                return
            continue
        if select.select([0], [], [], PARENT_POLL_S)[0]:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                return
            pending += chunk
        elif os.getppid() != parent:
            return


def _answer(question: dict[str, str]) -> tuple[str, str]:
    from quads.rewards.math import symbolic

    if question["operation"] in ("burn", "fill", "sleep"):
        return _exercise(question["operation"], float(question["answer"]))
    function = symbolic.same_equation if question["operation"] == "equation" else symbolic.same_expression
    try:
        symbolic.read(question["gold"])
    except symbolic.UnparsedError as error:
        return "unparsed_gold", str(error)
    except (RecursionError, MemoryError) as error:
        return "unparsed_gold", type(error).__name__
    try:
        return ("same" if function(question["gold"], question["answer"]) else "different"), ""
    except symbolic.UnparsedError as error:
        return "unparsed_answer", str(error)
    except RecursionError:
        return "unparsed_answer", "too deeply nested"
    except MemoryError:
        return "memory", "MemoryError"
    except Exception as error:
        return "error", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _exercise(operation: str, amount: float) -> tuple[str, str]:
    """Questions that tests ask: use CPU seconds, bytes of memory, or wall seconds."""
    end = time.process_time() + amount
    try:
        while operation == "burn" and time.process_time() < end:
            pass
        if operation == "fill":
            bytearray(int(amount))
        elif operation == "sleep":
            time.sleep(amount)
    except MemoryError:
        return "memory", "MemoryError"
    return "different", ""


def _send(verdict: str, detail: str = "") -> None:
    os.write(_OUT, json.dumps({"verdict": verdict, "detail": detail}).encode() + b"\n")


if __name__ == "__main__":
    # The protocol keeps its own descriptor: what a library prints goes to standard error.
    _OUT = os.dup(1)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    memory = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(float(sys.argv[1]))
