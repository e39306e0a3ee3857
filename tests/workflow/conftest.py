"""Fixtures: a fresh box, and a private copy of one in which `snakemake smoke` has run (workflow_box.py)."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from single_machine import SingleMachine, missing
from workflow_box import Box, make_box


@pytest.fixture
def box(tmp_path: Path) -> Box:
    """A fresh box."""
    return make_box(tmp_path / "box")


@pytest.fixture(scope="session")
def finished_once(tmp_path_factory: pytest.TempPathFactory) -> Box:
    """A box in which `snakemake smoke` ran to the end; not to be changed."""
    done = make_box(tmp_path_factory.mktemp("finished") / "box")
    done.run("smoke")
    return done


@pytest.fixture
def finished(finished_once: Box, tmp_path: Path) -> Box:
    """A private copy of the finished box, file times included."""
    return Box(Path(shutil.copytree(finished_once.folder, tmp_path / "box", symlinks=True)))


@pytest.fixture(scope="session")
def slurm() -> Iterator[SingleMachine]:
    """One Slurm for all tests; skipped with the reason where it cannot be started."""
    if reason := missing():
        pytest.skip(reason)
    # A short path: socket names are limited to 107 bytes.
    with tempfile.TemporaryDirectory(prefix="quads-slurm-", ignore_cleanup_errors=True) as folder:
        with SingleMachine(Path(folder)) as machine:
            yield machine
