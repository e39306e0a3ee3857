"""Makes tests/ importable (`from tolerances import TOLERANCES`) and runs cheap tests before expensive ones."""

from __future__ import annotations

import pytest

COSTLY = ("slow", "stack", "slurm", "gpu", "blackwell")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Unmarked tests first: a broken unit test shows before minutes of verl and vLLM."""
    items.sort(
        key=lambda item: max((COSTLY.index(m.name) + 1 for m in item.iter_markers() if m.name in COSTLY), default=0)
    )
