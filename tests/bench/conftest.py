"""A folder that looks like a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_inputs import CONFIG


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "model"
