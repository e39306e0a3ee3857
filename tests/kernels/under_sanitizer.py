# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer over the kernel tests on one GPU, in several processes at once.

    python tests/kernels/under_sanitizer.py [--tool memcheck] [--processes 12] [--limit 300] [--logs DIR] [TEST ...]

Collects the tests that run on a GPU (all of tests/kernels except `slow` and `blackwell` ones), deals them out in turn
and runs each share as `compute-sanitizer --tool TOOL --error-exitcode 7 python -m pytest ...` with PyTorch's caching
allocator off, so that every tensor is an allocation of its own and a read beyond it is seen; tests that capture CUDA
graphs keep it on, since nothing may be allocated during capture without it. Left out are tests whose only point is a
size and tests that launch nothing (EXCLUDED). Prints one line per process and a verdict; exit status 0 only when every
share passed without a report. A share that is out of time counts as not run: its finished tests are printed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Sizes, not code paths: 2^31 elements (minutes each under the tool), hundreds of millions of elements. No launch: the
# compilation for another architecture.
EXCLUDED = ("beyond_32_bits", "test_peak_memory", "compiles_ahead")
CAPTURE = re.compile("graph|capture|repeatable")
MARKERS = "not slow and not stack and not slurm and not blackwell"


def collected(paths: list[str]) -> list[str]:
    """Test ids in the order of collection."""
    call = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", MARKERS, *paths]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if "::" in line]
    if not found:
        sys.exit(f"no test collected:\n{done.stdout}{done.stderr}")
    return [test for test in found if not any(name in test for name in EXCLUDED)]


def dealt(tests: list[str], processes: int) -> list[list[str]]:
    """Shares of about equal work, those with graph captures apart and three times as short."""
    captures = [test for test in tests if CAPTURE.search(test)]
    others = [test for test in tests if not CAPTURE.search(test)]
    weighted = 3 * len(captures)
    own = min(len(captures), max(1, round(processes * weighted / (weighted + len(others)))))
    rest = min(len(others), max(1, processes - own))
    return [captures[i::own] for i in range(own)] + [others[i::rest] for i in range(rest)]


def start(tool: str, share: list[str], log: Path) -> subprocess.Popen:
    """One process over one share; its output goes to `log`."""
    listing = log.with_suffix(".tests")
    listing.write_text("\n".join(share))
    call = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "7", sys.executable, "-m", "pytest", "-v"]
    call += ["-p", "no:cacheprovider", "-m", MARKERS, f"@{listing}"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    if not CAPTURE.search(share[0]):
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    with log.open("w") as out:
        own = {"stdout": out, "stderr": subprocess.STDOUT, "start_new_session": True}
        return subprocess.Popen(call, cwd=ROOT, env=environment, **own)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tool", default="memcheck", choices=("memcheck", "racecheck", "initcheck", "synccheck"))
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS")
    parser.add_argument("--logs", type=Path, metavar="DIR")
    parser.add_argument("tests", nargs="*", default=["tests/kernels"])
    arguments = parser.parse_args()
    tests = collected(arguments.tests)
    logs = arguments.logs or Path(tempfile.mkdtemp())
    logs.mkdir(parents=True, exist_ok=True)
    shares = dealt(tests, arguments.processes)
    begin = time.monotonic()
    running = [start(arguments.tool, share, logs / f"{arguments.tool}{i}.log") for i, share in enumerate(shares)]
    for process in running:
        try:
            process.wait(max(0.1, arguments.limit - (time.monotonic() - begin)))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    passed = clean = 0
    for i, (process, share) in enumerate(zip(running, shares, strict=True)):
        text = (logs / f"{arguments.tool}{i}.log").read_text()
        ok = len(re.findall(r" PASSED| SKIPPED", text))
        summary = re.findall(r"ERROR SUMMARY: .*|RACECHECK SUMMARY: .*", text)
        passed, clean = passed + ok, clean + (process.wait() == 0 and ok == len(share))
        print(f"share {i}: exit {process.returncode}, {ok} of {len(share)} tests, {summary[-1:] or 'no summary'}")
    print(f"{arguments.tool}: {passed} of {len(tests)} tests, {clean} of {len(shares)} shares clean, "
          f"{time.monotonic() - begin:.0f} s; left out: {', '.join(EXCLUDED)}")  # fmt: skip
    return 0 if clean == len(shares) else 1


if __name__ == "__main__":
    sys.exit(main())
