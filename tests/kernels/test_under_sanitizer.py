# SPDX-License-Identifier: Apache-2.0
"""The verdicts of `under_sanitizer`, with stand-ins for the tool: nothing but a clean, complete process passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from under_sanitizer import CAPTURE, Share, collected, dealt, run

PASSED, CLEAN = "print('a.py::test PASSED', flush=True)", "print('========= ERROR SUMMARY: 0 errors')"
# code of the process -> state
PROCESSES = [
    (f"{PASSED}; {CLEAN}", "passed"),
    (PASSED, "failed"),  # no summary: the tool did not run
    (f"{CLEAN}", "failed"),  # no test ran
    (f"{PASSED}; {CLEAN}; raise SystemExit(1)", "failed"),
    (f"{PASSED}; print('========= ERROR SUMMARY: 3 errors'); raise SystemExit(7)", "reports"),
    (f"{PASSED}; import time; time.sleep(60)", "out of time"),
    ("print('========= Invalid __global__ read of size 4', flush=True); import time; time.sleep(60)", "reports"),
]


def started(share: Share, log: Path, place: int) -> subprocess.Popen:
    with log.open("w") as out:
        return subprocess.Popen([sys.executable, "-c", share.tests[0]], stdout=out, start_new_session=True)


def test_states(tmp_path: Path) -> None:
    shares = [Share([code]) for code, _ in PROCESSES]
    run(shares, [tmp_path / f"{i}.log" for i in range(len(shares))], 3, 60, 5, started)
    assert [share.state for share in shares] == [state for _, state in PROCESSES]
    assert [share.passed for share in shares] == [1, 1, 0, 1, 1, 1, 0]


def test_the_limit_of_the_run_cuts_off_and_leaves_waiting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shares = [Share(["import time; time.sleep(60)"]), Share([f"{PASSED}; {CLEAN}"])]
    run(shares, [tmp_path / "0.log", tmp_path / "1.log"], 1, 0.5, 60, started)
    assert [share.state for share in shares] == ["out of time", "waiting"]
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_captures_get_a_process_each() -> None:
    tests = [f"a.py::test_{i}" for i in range(40)] + [f"a.py::test_in_a_graph[{i}]" for i in range(10)]
    shares = dealt(tests, 8)
    assert sorted(test for share in shares for test in share.tests) == sorted(tests)
    assert [len(share.tests) for share in shares] == [10] * 4 + [1] * 10
    assert [len(share.tests) for share in dealt(tests[40:], 8)] == [1] * 10


def test_every_capture_is_known_by_its_name() -> None:
    """A capture without the caching allocator fails on its first allocation."""
    folder = Path(__file__).parent
    for file in folder.glob("test_*.py"):
        if file.name in ("test_graphs.py", Path(__file__).name):
            continue
        for body in file.read_text().split("\ndef ")[1:]:
            if "torch.cuda.graph(" in body:
                assert CAPTURE.search(body.partition("(")[0]), (file.name, body.partition("(")[0])


def test_collects_by_file_and_by_id() -> None:
    name = "tests/kernels/test_weight.py::test_large_and_repeatable"
    found = collected([name])
    assert len(found) == 2 and all(test.startswith(f"{name}[") for test in found)
    assert collected(found[:1]) == found[:1]
