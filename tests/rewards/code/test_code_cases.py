"""Every case of the case file gets its verdict, and the hostile ones leave nothing behind.

`expected`/`accept` is the strict verdict, `official` the verdict of LiveCodeBench's own runner where it differs. Two
cases pass there by cheating (they read or replace the expected output); expected outputs are not inside, so they fail.
"""

from __future__ import annotations

import json
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quads.rewards.code import CodeGrader, Sandbox, Task, grade_case
from quads.rewards.code.grade import STATUS

CASES = [json.loads(line) for line in (Path(__file__).parent / "code_cases.jsonl").read_text().splitlines()]
CHEATS = {"c094", "c099"}
# The case file has four words: a program that is missing is an error there, too much output a failure.
WORDS = {"empty": "error", "output": "fail"}
EXPECTED_STATUS = {
    "pass": {"correct"},
    "fail": {"wrong"},
    "error": {"wrong", "no_answer"},
    "timeout": {"timeout"},
    "memory": {"memory"},
}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What hostile cases go for: a secret in the environment, a listener, signals to this process, a canary."""
    monkeypatch.setenv("H6_SECRET", "canary")
    canary = tmp_path / "canary"
    canary.write_text("untouched")
    signals: list[int] = []
    before = signal.signal(signal.SIGWINCH, lambda number, _: signals.append(number))
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 65500))
        listener.listen()
        listener.settimeout(0.0)
        yield signals
        with pytest.raises(BlockingIOError):
            listener.accept()
    signal.signal(signal.SIGWINCH, before)
    assert canary.read_text() == "untouched"
    assert signals == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['id']}-{case['kind']}")
def test_verdict(case: dict[str, Any], grader: CodeGrader, host: Any) -> None:
    result = grade_case(case, grader)
    accepted = case.get("accept") or [case["expected"]]
    assert WORDS.get(result.strict, result.strict) in accepted, result
    assert result.grade.status in set().union(*(EXPECTED_STATUS[word] for word in accepted))
    assert result.grade.status == STATUS[result.strict]
    assert result.sandbox == "bwrap" and "sandbox=bwrap" in result.grade.detail
    official = case["official"] if "official" in case and case["id"] not in CHEATS else None
    assert result.official == official or (
        official is None and WORDS.get(result.official, result.official) in allowed(case)
    )
    if "must_not_print" in case:
        assert case["must_not_print"] not in result.detail
    for path in case.get("must_not_exist", []):
        assert not Path(path).exists()


def allowed(case: dict[str, Any]) -> set[str]:
    """Official verdicts where a case names none: its strict ones; a hostile program may die in its own way (-4)."""
    words = {case["expected"], *case.get("accept", [])}
    return words | {"error", "fail"} if case.get("hostile") and case["expected"] != "pass" else words


def test_there_are_63_cases_and_hostile_ones_among_them() -> None:
    assert len(CASES) == 63
    assert sum(bool(case.get("hostile")) for case in CASES) == 13


def test_threads_give_the_verdicts_of_one_thread(grader: CodeGrader, sandbox: Sandbox) -> None:
    chosen = [case for case in CASES if case["kind"] in ("compare", "extract", "func_ok", "func_bad")]
    items = [(case["response"], Task.parse(case)) for case in chosen]
    together = CodeGrader(sandbox, workers=4).grade_responses(items)
    for case, result in zip(chosen, together, strict=True):
        assert WORDS.get(result.strict, result.strict) in (case.get("accept") or [case["expected"]]), case["id"]


@pytest.mark.slow
def test_all_verdicts_under_load_and_from_threads(grader: CodeGrader, host: Any, busy: None) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda case: grade_case(case, grader), CASES))
    different = {
        case["id"]: result
        for case, result in zip(CASES, results, strict=True)
        if WORDS.get(result.strict, result.strict) not in (case.get("accept") or [case["expected"]])
    }
    assert different == {}
