"""Which grader grades which data source: the `data_source` column of a row is the name. No torch.

Differs from a decorator registry: a plain table, complete in one place, nothing to import first.
"""

from __future__ import annotations

from quads.data import chain as chain_data
from quads.rewards import chain
from quads.rewards.types import Grader

GRADERS: dict[str, Grader] = {chain_data.NAME: chain.grade_text}


def grader(name: str) -> Grader:
    """The grader called `name`. Raises ValueError listing the known ones."""
    if name not in GRADERS:
        raise ValueError(f"unknown grader {name!r}; known: {', '.join(sorted(GRADERS))}")
    return GRADERS[name]
