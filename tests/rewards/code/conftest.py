"""One proven sandbox for all tests of code grading. A machine without bubblewrap fails them, it does not skip them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from quads.rewards.code import CodeGrader, Sandbox, SandboxUnavailableError, open_sandbox

NO_BWRAP = "QUADS_TESTS_NO_BWRAP"


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    """The bwrap level. Set QUADS_TESTS_NO_BWRAP=1 only where bubblewrap cannot be had (not in CI)."""
    try:
        return open_sandbox()
    except SandboxUnavailableError as error:
        if os.environ.get(NO_BWRAP):
            pytest.skip(f"{NO_BWRAP} is set: {error}")
        pytest.fail(f"{error}\n(or set {NO_BWRAP}=1 where it cannot be had)", pytrace=False)


@pytest.fixture(scope="session")
def grader(sandbox: Sandbox) -> CodeGrader:
    """No cache, both verdicts, default limits."""
    return CodeGrader(sandbox)


@pytest.fixture
def busy() -> Iterator[None]:
    """Eight processes that take every CPU they can get, in eight sessions: the scheduler may share by session."""
    command = [sys.executable, "-S", "-c", "while True: pass"]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(8)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
