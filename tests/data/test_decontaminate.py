"""Every rule removes what it is for, keeps what it is not for, and the report lists it."""

from __future__ import annotations

import json
import random
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from quads.data.benchmarks import load_spec
from quads.data.benchmarks.store import encoded
from quads.data.decontaminate import Result, Rules, TestProblems, decontaminate
from quads.decontaminate import main

Row = dict[str, Any]
AIME = {
    "id": "aime24-60",
    "problem": "Anna walks nine kilometres every morning at a constant speed of $s$ kilometres per hour and then she "
    "stops at the old bakery for $t$ minutes before she walks home. Find the number of minutes that the trip takes.",
    "answer": "204",
}
TAIL = "can be written as $\\frac{m}{n}$ where $m$ and $n$ are relatively prime positive integers. Find $m+n$."
CODE = {
    "id": "abc1_a",
    "question": "You are given a string of lowercase letters. Print the length of its longest block of equal letters "
    "in the order of the alphabet after every second block was removed by the inspector.",
    "date": "2025-01-19T00:00:00",
}


def math_row(row_id: str, problem: str, answer: str = "1") -> Row:
    return {"id": row_id, "problem": problem, "answer": answer}


def noise(seed: int, words: int = 40) -> str:
    rng = random.Random(seed)
    return " ".join(f"n{rng.randrange(10_000)}" for _ in range(words))


def run(rows: list[Row], tests: list[Row] | None = None, **more: Any) -> Result:
    problems = TestProblems([("aime24", tests if tests is not None else [AIME])], Rules())
    return decontaminate(rows, problems, **more)


def test_exact_up_to_spelling() -> None:
    copy = AIME["problem"].upper().replace("$", "").replace("KILOMETRES", " Kilometres ")
    (match,) = run([math_row("t", copy, "204")]).removed
    assert (match.reason, match.test_id, match.test_set, match.answer_equal) == ("exact", "aime24-60", "aime24", True)


def test_a_run_of_thirteen_tokens_but_not_of_twelve() -> None:
    words = AIME["problem"].split()
    thirteen = f"{noise(1)} {' '.join(words[:13])} {noise(2)}"
    twelve = f"{noise(3)} {' '.join(words[:12])} {noise(4)}"
    result = run([math_row("13", thirteen), math_row("12", twelve)])
    assert [(m.id, m.reason, m.answer_equal) for m in result.removed] == [("13", "ngram", False)]
    assert result.kept == ["12"] and "anna walks nine kilometres" in result.removed[0].detail


def test_reworded_problem_is_found_by_minhash() -> None:
    """Changed words 13 apart leave no run of 13. Of 36 runs of three 6 break: Jaccard 30/42; of 47, 9: 38/56."""
    words = [f"q{i}" for i in range(49)]
    two = [f"z{i}" if i in (12, 25) else word for i, word in enumerate(words[:38])]
    three = [f"z{i}" if i in (12, 25, 38) else word for i, word in enumerate(words)]
    tests = [math_row("two", " ".join(words[:38])), math_row("three", " ".join(f"p{w}" for w in words))]
    result = run([math_row("a", " ".join(two)), math_row("b", " ".join(f"p{w}" for w in three))], tests)
    assert [(m.id, m.reason, m.test_id) for m in result.removed] == [("a", "minhash", "two")]
    assert result.removed[0].detail == f"Jaccard {30 / 42:.3f}"
    assert result.kept == ["b"] and result.review[0].detail == f"Jaccard {38 / 56:.3f}"


def test_formulas_of_several_test_problems_do_not_count() -> None:
    tests = [math_row(f"x{i}", f"{noise(10 + i)} {TAIL}") for i in range(3)]
    result = run([math_row("style", f"{noise(20)} {TAIL}")], tests)
    assert result.removed == [] and result.formula_only == 1
    assert [m.reason for m in run([math_row("style", f"{noise(20)} {TAIL}")], tests[:2]).removed] == ["ngram"]


def test_formulas_of_many_training_rows_do_not_count() -> None:
    tests = [math_row("x", f"{noise(10)} {TAIL}")]
    rows = [math_row(f"t{i}", f"{noise(30 + i)} {TAIL}") for i in range(11)]
    assert run(rows, tests).removed == []
    assert len(run(rows[:10], tests).removed) == 10
    # The same text repeated is one text: contamination by copies is no formula.
    copies = [{**rows[0], "id": f"c{i}"} for i in range(50)]
    assert len(run(copies, tests).removed) == 50


def test_short_test_problem_counts_as_one_run() -> None:
    tests = [math_row("short", "Compute the number of odd divisors of 2025 factorial")]
    rows = [math_row("in", f"{noise(5)} compute the number of odd divisors of 2025 factorial {noise(6)}")]
    assert [m.reason for m in run(rows, tests).removed] == ["ngram"]


def test_similar_row_with_the_same_answer_is_listed_for_review() -> None:
    words = [f"q{i}" for i in range(60)]
    near = [f"z{i}" if i in (12, 24, 36, 48, 55) else word for i, word in enumerate(words)]
    tests = [math_row("x", " ".join(words), "42")]
    result = run([math_row("same", " ".join(near), "42"), math_row("other", " ".join(near), "41")], tests)
    assert result.kept == ["same", "other"] and [m.id for m in result.review] == ["same"]


def code_row(row_id: str, date: str | None, seed: int) -> Row:
    return {"id": row_id, "question": noise(seed), "date": date}


def test_dates_and_the_livecodebench_rule() -> None:
    rows = [
        code_row("old", "2024-07-31T23:59:59", 1),
        code_row("new", "2024-08-01T00:00:00", 2),
        code_row("?", None, 3),
    ]
    start = datetime(2024, 8, 1)
    own = run(rows, [CODE], window_start=start)
    assert [(m.id, m.reason) for m in own.removed] == [("new", "date")] and own.kept == ["old", "?"]
    lcb = run(rows, [CODE], window_start=start, is_livecodebench=True)
    assert [(m.id, m.reason) for m in lcb.removed] == [("new", "livecodebench"), ("?", "livecodebench")]
    assert run(rows, [CODE]).removed == []


def test_a_text_match_wins_over_the_date() -> None:
    (match,) = run([{**CODE, "id": "copy"}], [CODE], window_start=datetime(2024, 8, 1)).removed
    assert (match.reason, match.test_id, match.answer_equal) == ("exact", "abc1_a", None)


def test_rows_without_words_are_kept() -> None:
    assert run([math_row("t", "$$")], [math_row("x", "$+$")]).kept == ["t"]


def fetched(data: Path, name: str, rows: list[Row]) -> None:
    """What quads.fetch leaves behind for a set, made by hand."""
    import hashlib

    lines = b"".join(encoded(row) for row in rows)
    (data / name).mkdir(parents=True)
    (data / name / "rows.jsonl").write_bytes(lines)
    manifest = {"pin_hash": load_spec(name).pin_hash, "rows_sha256": hashlib.sha256(lines).hexdigest()}
    (data / name / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    train = [math_row("a", noise(1)), math_row("b", AIME["problem"], "204"), math_row("c", noise(2))]
    fetched(tmp_path, "dapo_math_17k", train)
    fetched(tmp_path, "aime24", [AIME])
    tests = [{"input": "1", "output": "1", "testtype": "stdin"}]
    fetched(
        tmp_path, "deepcoder_taco", [{**code_row("k", None, 4), "tests": tests}, {**CODE, "id": "l", "tests": tests}]
    )
    fetched(tmp_path, "livecodebench_v6_new", [{**CODE, "tests": tests}])
    return tmp_path


def test_stage_writes_rows_and_both_reports(data: Path, tmp_path: Path) -> None:
    words = ["--set", "dapo_math_17k", "--against", "aime24", "livecodebench_v6_new", "--data", str(data), "--out"]
    assert main([*words, str(tmp_path / "x")]) == 0 == main([*words, str(tmp_path / "y")])
    names = ("report.json", "report.md", "rows.jsonl")
    assert all((tmp_path / "x" / n).read_bytes() == (tmp_path / "y" / n).read_bytes() for n in names)
    report = json.loads((tmp_path / "x" / "report.json").read_text())
    assert (report["rows"], report["kept"], report["removed"]["exact"], report["answer_equal"]) == (3, 2, 1, 1)
    assert report["removed_rows"] == [
        {
            "id": "b",
            "reason": "exact",
            "test_id": "aime24-60",
            "test_set": "aime24",
            "detail": "39 tokens",
            "answer_equal": True,
        }
    ]
    assert "| b | exact | aime24-60 (aime24) | yes |" in (tmp_path / "x" / "report.md").read_text()
    assert [json.loads(line)["id"] for line in (tmp_path / "x" / "rows.jsonl").read_text().splitlines()] == ["a", "c"]


def test_stage_keeps_the_tests_of_code_rows(data: Path, tmp_path: Path) -> None:
    out = ["--data", str(data), "--out", str(tmp_path / "z")]
    assert main(["--set", "deepcoder_taco", "--against", "livecodebench_v6_new", *out]) == 0
    (row,) = [json.loads(line) for line in (tmp_path / "z" / "rows.jsonl").read_text().splitlines()]
    assert row["id"] == "k" and row["tests"][0]["input"] == "1"


def test_stage_refuses_what_it_cannot_use(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = ["--data", str(data), "--out", str(tmp_path / "z")]
    assert main(["--set", "dapo_math_17k", "--against", "aime25", *out]) == 1
    assert "aime25: not fetched" in caplog.text and "snakemake fetch_data" in caplog.text
    assert main(["--set", "dapo_math_17k", "--against", "deepcoder_taco", *out]) == 1
    assert "a training set; test sets are aime24" in caplog.text
