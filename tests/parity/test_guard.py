"""The start-up check of a backend: passes what only rounds otherwise, names what is wrong, leaves no trace."""

from __future__ import annotations

import json
import logging

import pytest
from programs import run_program
from tolerances import TOLERANCES

logger = logging.getLogger(__name__)
pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("guard") / "said.json"
    run_program("guard_runs.py", out)
    return json.loads(out.read_text())


@pytest.mark.parametrize("layer", ["linear", "experts"])
def test_other_orders_of_additions_are_far_below_the_limit(said, layer):
    rows = [row for row in said["clean"] if row["layer"] == layer]
    worst = max(rows, key=lambda row: row["relative_difference"])
    logger.info("%s: %s", layer, worst)
    assert len(rows) == 8 and worst["relative_difference"] <= TOLERANCES[f"guard_{layer}"].limit
    assert TOLERANCES[f"guard_{layer}"].limit <= worst["limit"] / 2


@pytest.mark.parametrize(
    ("case", "module"),
    [
        ("mask ignored", "layers.0.o_proj"),
        ("nan", "layers.0.o_proj"),
        ("last tile", "layers.0.o_proj"),
        ("one percent", "layers.0.o_proj"),
        ("wrong expert", "layers.0.experts"),
    ],
)
def test_a_wrong_product_is_named_and_nothing_stays_behind(said, case, module):
    text = said["broken"][case]
    assert text.startswith(f"{module}: backend 'triton' on cpu does not multiply"), text
    assert "left behind" not in text and "limit" in text


def test_the_reference_is_not_compared_with_itself(said):
    assert said["reference"] is None
