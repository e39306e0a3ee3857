"""Every case of cases.jsonl gets its verdict: with its type, without it, from threads, and under CPU load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quads.rewards import grader
from quads.rewards.math import grade, validate_gold

CASES: list[dict[str, Any]] = [
    json.loads(line) for line in (Path(__file__).parent / "cases.jsonl").read_text().splitlines()
]
VERDICTS = ("correct", "wrong", "no_answer")
BUSY = 8


def by_id(case: dict[str, Any]) -> str:
    return f"{case['id']}-{case['kind']}"


def graded(case: dict[str, Any]) -> tuple[bool, bool]:
    """(is it as expected, is it a verdict about the answer)."""
    result = grade(case["response"], case["gold"], answer_type=case["answer_type"])
    return (result.score == 1.0) == case["correct"], result.status in VERDICTS


def test_the_file_is_complete() -> None:
    assert len(CASES) == 150
    assert {case["correct"] for case in CASES} == {True, False}


@pytest.mark.parametrize("case", CASES, ids=by_id)
def test_case(case: dict[str, Any]) -> None:
    result = grade(case["response"], case["gold"], answer_type=case["answer_type"])
    assert (result.status == "correct") == case["correct"], (case["why"], result)
    assert result.status in VERDICTS, result


@pytest.mark.parametrize("case", CASES, ids=by_id)
def test_case_without_its_type(case: dict[str, Any]) -> None:
    result = grader("math")(case["response"], case["gold"], True)
    assert (result.status == "correct") == case["correct"], (case["why"], result)


@pytest.mark.parametrize("case", [c for c in CASES if c["answer_type"] == "int"], ids=by_id)
def test_integer_case_through_aime(case: dict[str, Any]) -> None:
    assert (grader("aime")(case["response"], case["gold"], True).status == "correct") == case["correct"], case["why"]


@pytest.mark.parametrize("gold", sorted({(c["gold"], c["answer_type"]) for c in CASES}))
def test_every_ground_truth_is_valid(gold: tuple[str, Any]) -> None:
    assert validate_gold(*gold) == ""


def test_from_eight_threads() -> None:
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(graded, CASES))
    assert [by_id(c) for c, r in zip(CASES, results, strict=True) if r != (True, True)] == []


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Eight processes that do nothing but compute."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY)]
    try:
        time.sleep(0.5)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_under_load(busy_machine: None) -> None:
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(graded, CASES))
    assert [by_id(c) for c, r in zip(CASES, results, strict=True) if r != (True, True)] == []
    assert os.getloadavg()[0] > 0
