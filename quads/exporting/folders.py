"""Folders that an export is given: a run that exists, and a place where nothing is yet. No torch.

Contract: asked before a model is loaded, so that a mistyped path costs no time; errors say what there is instead.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from quads.config import ConfigError


def require_new(out: Path) -> None:
    """ValueError unless `out` is an empty folder or does not exist yet. Makes nothing."""
    if out.is_dir():
        if any(out.iterdir()):
            raise ValueError(f"{out} is not empty; give another folder, or delete it")
    elif out.exists():
        raise ValueError(f"{out} is not a folder; give a new one")


def require_run(train: Path) -> None:
    """ConfigError with the runs beside it when there is no train folder of this name.

    A folder without its result is left to quads.files.read_result: there the rule that makes it again is the remedy.
    """
    if train.is_dir():
        return
    if train.exists():
        raise ConfigError(f"--train {train} is not a folder; give results/<experiment>/train/<run>, the folder itself")
    known = sorted(p.parent.name for p in train.parent.glob("*/result.json"))
    if not known:
        raise ConfigError(f"no folder {train}, and no finished run under {train.parent}; train first, or give another")
    close = difflib.get_close_matches(train.name, known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ConfigError(f"no folder {train}{hint}; known under {train.parent}: {', '.join(known)}")
