"""Which of a run's checkpoints training may resume from.

    resume step = the newest step whose checkpoint is complete and whose history 1..step is complete; 0 without one

A checkpoint is complete when every rank's model, optimizer and extra state, the data loader's state and the Hugging
Face weights are there. A kill may leave the newest one half-written, or written before the step's metrics were logged;
such a step and everything newer is moved aside, never deleted, and verl's tracker file is set to the resume step.
Differs from verl's own resume, which trusts the tracker file and then fails on every retry.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from quads.files import write_json_atomic, write_text_atomic

log = logging.getLogger(__name__)

LATEST = "latest_checkpointed_iteration.txt"
STALE = "stale-"
_STATES = ("model", "optim", "extra_state")


def is_complete(step_dir: Path) -> bool:
    """Whether a global_step_N folder can be resumed from and evaluated."""
    actor = step_dir / "actor"
    for state in _STATES:
        files = [f for f in actor.glob(f"{state}_world_size_*_rank_*.pt") if f.stat().st_size]
        worlds = {int(re.search(r"world_size_(\d+)", f.name).group(1)) for f in files}  # type: ignore[union-attr]
        if len(worlds) != 1 or len(files) != worlds.pop():
            return False
    weights = [f for f in (actor / "huggingface").glob("*.safetensors") if f.stat().st_size]
    return bool(weights) and (actor / "huggingface" / "config.json").is_file() and (step_dir / "data.pt").is_file()


def _steps(checkpoints: Path) -> dict[int, Path]:
    found = {}
    for folder in checkpoints.glob("global_step_*"):
        number = folder.name.rpartition("_")[2]
        if number.isdigit() and folder.is_dir():
            found[int(number)] = folder
    return found


def _move_aside(checkpoints: Path, items: list[Path], why: str) -> None:
    if not items:
        return
    aside = checkpoints / f"{STALE}{time.strftime('%Y%m%dT%H%M%S')}-{time.monotonic_ns()}"
    aside.mkdir()
    for item in items:
        shutil.move(str(item), aside / item.name)
    log.warning("%s: moved %s to %s", why, ", ".join(i.name for i in items), aside)


def claim(checkpoints: Path, stamp: dict[str, Any], logged: Collection[int]) -> int:
    """Make the folder safe for verl's resume and return the step it will resume from.

    `stamp` identifies config and code: checkpoints under another one are moved aside. `logged` are the steps whose
    metrics are known.
    """
    path = checkpoints / "stamp.json"
    try:
        same = not path.exists() or json.loads(path.read_text()) == stamp
    except ValueError:
        same = False
    if not same:
        old = [i for i in checkpoints.iterdir() if i.name != ".lock" and not i.name.startswith(STALE)]
        _move_aside(checkpoints, old, "checkpoints of another config or code")
    steps = _steps(checkpoints)
    usable = [s for s, d in steps.items() if is_complete(d) and all(i in logged for i in range(1, s + 1))]
    resume = max(usable, default=0)
    late = [d for s, d in sorted(steps.items()) if s > resume]
    _move_aside(checkpoints, late, "checkpoints that are incomplete or ahead of the logged metrics")
    write_json_atomic(path, stamp)
    if resume:
        write_text_atomic(checkpoints / LATEST, str(resume))
    else:
        (checkpoints / LATEST).unlink(missing_ok=True)
    return resume
