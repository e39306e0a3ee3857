# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer over the kernel tests on one host, in several processes at once.

    python tests/kernels/under_sanitizer.py [--tool memcheck] [--processes 12] [--devices 1] [--limit 300] [--each 240]
                                            [--only-captures] [--logs DIR] [--out FILE] [TEST ...]

Collects the tests that run on a GPU (all of tests/kernels except `slow` and `blackwell` ones) and runs shares of them
as `compute-sanitizer --tool TOOL --error-exitcode 7 python -m pytest ...` with PyTorch's caching allocator off, so that
every tensor is an allocation of its own and a read beyond it is seen. Tests that capture CUDA graphs keep it on, since
nothing may be allocated during capture without it, and get a process each: several in one process never finished.
Left out are tests whose only point is a size and tests that launch nothing (EXCLUDED).

TEST is what pytest takes: files, ids, or @FILE with an id a line. Prints one line per process and a verdict; exit
status 0 only when every process passed without a report. What did not pass is listed in DIR/left.txt, so that
`... @DIR/left.txt` runs it again. A process that is out of time (--each), or cut off or not started when the run is
(--limit), counts as not passed. Triton compiles once a machine: run the tests without the tool first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Sizes, not code paths: 2^31 elements (minutes each under the tool), hundreds of millions of elements. No launch: the
# compilation for another architecture, this program's own tests.
EXCLUDED = ("beyond_32_bits", "test_peak_memory", "compiles_ahead", "test_under_sanitizer")
CAPTURE = re.compile("graph|capture|repeatable")
MARKERS = "not slow and not stack and not slurm and not blackwell"
# Work of a test with captures, its process's start included, in that of another test.
WEIGHT = 4
RECORDED = ("state", "seconds", "exit", "summary", "passed", "tests")
# The first line of a report, for processes that are cut off before their summary.
REPORT = re.compile(
    r"^=+ (?:Invalid|Misaligned|Out-of-range|Program hit|Uninitialized|Barrier error|(?:Error|Warning): Race)", re.M
)


@dataclass
class Share:
    """Tests of one process and what came of them; state: waiting, running, passed, reports, failed or out of time."""

    tests: list[str]
    state: str = "waiting"
    exit: int | None = None
    passed: int = 0
    summary: str = "no summary"
    seconds: float = 0.0
    process: subprocess.Popen | None = field(default=None, repr=False)
    begin: float = 0.0

    def line(self) -> str:
        """One line of the report."""
        what = self.tests[0] if len(self.tests) == 1 else f"{self.passed} of {len(self.tests)} tests"
        return f"{self.state:<12} {self.seconds:6.1f} s  exit {self.exit}, {self.summary}: {what}"


def collected(paths: list[str]) -> list[str]:
    """Test ids in the order of collection."""
    call = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", MARKERS, *paths]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if "::" in line]
    if not found:
        sys.exit(f"no test collected:\n{done.stdout}{done.stderr}")
    return [test for test in found if not any(name in test for name in EXCLUDED)]


def dealt(tests: list[str], processes: int) -> list[Share]:
    """One share a test with graph captures; the others in as many as leave the captures their part of the processes."""
    captures = [test for test in tests if CAPTURE.search(test)]
    others = [test for test in tests if not CAPTURE.search(test)]
    rest = min(len(others), max(1, round(processes * len(others) / max(1, len(others) + WEIGHT * len(captures)))))
    return [Share(others[i::rest]) for i in range(rest)] + [Share([test]) for test in captures]


def start(tool: str, share: Share, log: Path, device: int | None) -> subprocess.Popen:
    """One process over one share; its output goes to `log`."""
    listing = log.with_suffix(".tests")
    listing.write_text("\n".join(share.tests))
    call = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "7", sys.executable, "-m", "pytest", "-v"]
    call += ["-p", "no:cacheprovider", "-m", MARKERS, f"@{listing}"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(device)
    if not CAPTURE.search(share.tests[0]):
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    with log.open("w") as out:
        own = {"stdout": out, "stderr": subprocess.STDOUT, "start_new_session": True}
        return subprocess.Popen(call, cwd=ROOT, env=environment, **own)


def finish(share: Share, log: Path, in_time: bool) -> None:
    """State of a share whose process has ended or is ended here."""
    assert share.process is not None
    if not in_time:
        os.killpg(share.process.pid, signal.SIGKILL)
    share.exit, share.seconds = share.process.wait(), time.monotonic() - share.begin
    text = log.read_text(errors="replace")
    share.passed = len(re.findall(r" PASSED| SKIPPED", text))
    share.summary = (re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text) or ["no summary"])[-1]
    reported = share.exit == 7 or re.search(r"ERROR SUMMARY: [1-9]", share.summary) or REPORT.search(text)
    whole = share.exit == 0 and share.passed == len(share.tests) and share.summary != "no summary"
    share.state = "reports" if reported else "passed" if whole else "failed" if in_time else "out of time"


def run(
    shares: Sequence[Share], logs: Sequence[Path], processes: int, limit: float, each: float,
    begin: Callable[[Share, Path, int], subprocess.Popen],
) -> None:  # fmt: skip
    """All shares in their order, `processes` at once; `begin(share, log, place)` starts one in place 0..processes-1."""
    end = time.monotonic() + limit
    waiting, places = list(range(len(shares))), {place: -1 for place in range(processes)}
    while time.monotonic() < end and (waiting or any(i >= 0 for i in places.values())):
        for place, i in places.items():
            if i >= 0:
                share = shares[i]
                done = share.process is not None and share.process.poll() is not None
                if done or time.monotonic() - share.begin > each:
                    finish(share, logs[i], done)
                    print(share.line(), flush=True)
                    places[place] = -1
            if places[place] < 0 and waiting:
                places[place] = i = waiting.pop(0)
                shares[i].state, shares[i].begin = "running", time.monotonic()
                shares[i].process = begin(shares[i], logs[i], place)
        time.sleep(0.1)
    for i in places.values():
        if i >= 0:
            finish(shares[i], logs[i], False)
            print(shares[i].line(), flush=True)
    for i in waiting:
        print(shares[i].line())


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tool", default="memcheck", choices=("memcheck", "racecheck", "initcheck", "synccheck"))
    parser.add_argument("--processes", type=int, default=12, help="at once")
    parser.add_argument("--devices", type=int, default=1, help="GPUs, taken in turn")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="of the whole run")
    parser.add_argument("--each", type=float, metavar="SECONDS", help="of one process; default: that of the run")
    parser.add_argument("--only-captures", action="store_true", help="only tests that capture CUDA graphs")
    parser.add_argument("--logs", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON: every process, its tests, state and seconds")
    parser.add_argument("tests", nargs="*", default=["tests/kernels"])
    arguments = parser.parse_args()
    tests = [t for t in collected(arguments.tests) if CAPTURE.search(t) or not arguments.only_captures]
    logs = arguments.logs or Path(tempfile.mkdtemp())
    logs.mkdir(parents=True, exist_ok=True)
    shares = dealt(tests, arguments.processes)
    begin = time.monotonic()
    run(
        shares, [logs / f"{arguments.tool}{i}.log" for i in range(len(shares))], arguments.processes, arguments.limit,
        arguments.each or arguments.limit,
        lambda share, log, place: start(
            arguments.tool, share, log, place % arguments.devices if arguments.devices > 1 else None
        ),
    )  # fmt: skip
    left = [test for share in shares if share.state != "passed" for test in share.tests]
    (logs / "left.txt").write_text("".join(f"{test}\n" for test in left))
    passed, clean = sum(share.passed for share in shares), sum(share.state == "passed" for share in shares)
    seconds = time.monotonic() - begin
    if arguments.out:
        rows = [{name: getattr(share, name) for name in RECORDED} for share in shares]
        summary = {"tool": arguments.tool, "tests": len(tests), "passed": passed, "seconds": round(seconds, 1)}
        arguments.out.write_text(json.dumps(summary | {"left_out": EXCLUDED, "processes": rows}, indent=1))
    print(f"{arguments.tool}: {passed} of {len(tests)} tests, {clean} of {len(shares)} processes clean, "
          f"{seconds:.0f} s; left out: {', '.join(EXCLUDED)}; not passed: {logs / 'left.txt'}")  # fmt: skip
    return 0 if clean == len(shares) else 1


if __name__ == "__main__":
    sys.exit(main())
