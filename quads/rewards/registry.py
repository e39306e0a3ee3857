"""Which grader grades which data source: the `data_source` column of a row is the name. No torch.

Differs from a decorator registry: a plain table, complete in one place. A grader's module is imported when it is first
asked for, so that a task pays for its own grader only, and so that (quads.provenance) an edit to the grader of one task
does not count as an edit to the training of another.
"""

from __future__ import annotations

from importlib import import_module

from quads.data import chain as chain_data
from quads.rewards.types import Grader

GRADERS: dict[str, tuple[str, str]] = {
    chain_data.NAME: ("quads.rewards.chain", "grade_text"),
    "math": ("quads.rewards.math", "grade"),
    "aime": ("quads.rewards.math", "grade_aime"),
    "code": ("quads.rewards.code", "grade_text"),
}


def grader(name: str) -> Grader:
    """The grader called `name`. Raises ValueError listing the known ones."""
    if name not in GRADERS:
        raise ValueError(f"unknown grader {name!r}; known: {', '.join(sorted(GRADERS))}")
    module, function = GRADERS[name]
    found: Grader = getattr(import_module(module), function)
    return found
