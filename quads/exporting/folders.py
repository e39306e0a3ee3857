"""The output folder that an export is given. No torch.

Contract: asked before a model is loaded, so that a mistyped path costs no time; errors say what there is instead.
"""

from __future__ import annotations

from pathlib import Path


def require_new(out: Path) -> None:
    """ValueError unless `out` is an empty folder or does not exist yet. Makes nothing."""
    if out.is_dir():
        if any(out.iterdir()):
            raise ValueError(f"{out} is not empty; give another folder, or delete it")
    elif out.exists():
        raise ValueError(f"{out} is not a folder; give a new one")
