# SPDX-License-Identifier: Apache-2.0
"""The benchmark's gate and verdicts, without a GPU: the timing calls are replaced, the rest is the real protocol."""

from __future__ import annotations

import pytest
import torch

from quads.bench import protocol
from quads.bench.protocol import Bar, Case, InexactError, measure, require_equal


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list:
    """Runs that were captured; every sample takes 2, 4, 6, ... microseconds."""
    runs: list = []
    monkeypatch.setattr(protocol, "capture", lambda run, sets: runs.append(run) or run)
    monkeypatch.setattr(
        protocol, "_samples", lambda graphs, launches, repeats: {n: [2.0 * i for i in range(1, 6)] for n in graphs}
    )
    return runs


def wrong() -> str:
    return require_equal("values", torch.tensor([0.0]), torch.tensor([-0.0]))


def broken() -> str:
    raise RuntimeError("does not compile")


def test_an_inexact_or_broken_kernel_gets_no_time(captured) -> None:
    good, bad = (lambda i: None), (lambda i: None)
    cases = [
        Case("good", good, bytes=6000, check=lambda: "equal"),
        Case("wrong", bad, check=wrong),
        Case("broken", bad, check=broken),
    ]
    rows = measure("group", cases, sets=1)
    assert captured == [good]
    assert [row.us for row in rows] == [6.0, None, None] and rows[0].gbps == 1.0
    assert rows[1].exact.startswith("INEXACT") and rows[2].exact.startswith("FAILED: RuntimeError")
    assert "| - |" in protocol.table(rows, {"group": "good"}).splitlines()[3]


def test_names_must_differ(captured) -> None:
    with pytest.raises(ValueError, match="distinct"):
        measure("group", [Case("a", print), Case("a", print)], sets=1)


def test_require_equal_sees_signs_shapes_and_nan_patterns() -> None:
    assert require_equal("x", torch.ones(2), torch.ones(2)) == "x 2 equal"
    one = torch.ones(1)
    for got, expected in ((0 * one, -0.0 * one), (torch.ones(2), one), (one, one.int())):
        with pytest.raises(InexactError):
            require_equal("x", got, expected)
    nan = torch.full((1,), torch.nan)
    assert require_equal("x", nan, nan.clone())


@pytest.mark.parametrize(
    ("value", "better", "verdict"),
    [(0.97, "higher", "aim"), (0.92, "higher", "met"), (0.5, "higher", "missed"), (None, "higher", "not measured"),
     (0.5, "lower", "aim"), (0.95, "lower", "missed")],
)  # fmt: skip
def test_verdicts(value, better, verdict) -> None:
    assert Bar("1", "x", value, 0.9, 0.96 if better == "higher" else 0.8, better).verdict == verdict
