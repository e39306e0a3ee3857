"""A box: a copy of the repository in which whole workflows run in seconds, because the stages are replaced.

Snakefile, rules, profiles, configs and the package `quads` are the real ones. Only the seven stage modules are replaced
by `stand_in.py`, which takes the same arguments and writes the declared outputs. So what is tested is the DAG and its
reasons to run again, with real Snakemake metadata, not the stages.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
STAGES = ("prepare", "make_benchmarks", "warmup", "train", "evaluate", "track", "report")
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info")


class Box:
    """A folder with a runnable copy of the repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # The copy's own package must win over the installed one; a Slurm or make around the tests must not leak in.
        self.environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}

    def snakemake(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "snakemake", *words]

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.snakemake(*words), cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=300
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def plan(self, *words: str) -> Counter[tuple[str, str]]:
        """(rule, outputs) of every job that a dry run would start, without the targets themselves."""
        done = self.run("-n", *words)
        jobs: Counter[tuple[str, str]] = Counter()
        rule = ""
        for line in (done.stdout + done.stderr).splitlines():
            if found := re.match(r"(?:local)?rule (\w+):", line):
                rule = found[1]
            elif found := re.match(r"    output: (.*)", line):
                jobs[rule, found[1]] += 1
        return jobs

    def count(self, *words: str) -> dict[str, int]:
        """Planned jobs per rule."""
        return dict(Counter(rule for rule, _ in self.plan(*words).elements()))

    def edit(self, name: str, **values: Any) -> None:
        """Set top-level keys of configs/NAME."""
        path = self.folder / "configs" / name
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **values}))

    def executed(self) -> list[str]:
        """One line per stage that really ran, in order."""
        calls = self.folder / "calls.txt"
        return calls.read_text().splitlines() if calls.is_file() else []


def make_box(folder: Path) -> Box:
    for name in ("workflow", "profiles", "configs", "quads"):
        shutil.copytree(ROOT / name, folder / name, ignore=IGNORED)
    shutil.copy(ROOT / "Snakefile", folder)
    (folder / "slurm").symlink_to("profiles/slurm")
    for stage in STAGES:
        shutil.copy(HERE / "stand_in.py", folder / "quads" / f"{stage}.py")
    return Box(folder)
