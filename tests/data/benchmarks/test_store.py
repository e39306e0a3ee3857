"""Fetching: right rows from every schema, and one error class for everything that can be wrong with a copy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_up_sets import RAW, lcb_rows, lcb_spec, made_up, problem, write_raw

from quads.data.benchmarks import build, iterate, load, load_spec, names, store
from quads.data.benchmarks.errors import (
    AnswerError,
    ChangedHashError,
    ControlCharacterError,
    DuplicateError,
    GoldError,
    NotAvailableError,
    RowCountError,
    SchemaError,
    StaleError,
)
from quads.data.benchmarks.hub import file_sha256
from quads.data.benchmarks.spec import FilePin, Spec, Window
from quads.fetch import chosen, gold_problem

Row = dict[str, Any]


def built(tmp_path: Path, spec: Spec, rows: list[Row], **more: Any) -> Row:
    raw = write_raw(tmp_path / "raw" / spec.name, spec, rows)
    return build(spec, tmp_path / "out", local=raw, locks=tmp_path / "locks", **more)


def rows_of(tmp_path: Path, name: str) -> list[Row]:
    return [json.loads(line) for line in (tmp_path / "out" / name / "rows.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", RAW)
def test_every_schema_is_normalised(tmp_path: Path, name: str) -> None:
    manifest = built(tmp_path, made_up(name), RAW[name], gold=gold_problem)
    rows = rows_of(tmp_path, name)
    assert manifest["rows"] == len(rows) == len(RAW[name]) and manifest["dropped_rows"] == []
    if load_spec(name).kind == "math":
        assert all(list(row) == ["answer", "answer_type", "id", "problem", "source"] for row in rows)
        assert [row["problem"] for row in rows] == [problem(i) for i in range(len(rows))]
        assert all(isinstance(row["answer"], str) for row in rows)


def test_values_of_each_math_set(tmp_path: Path) -> None:
    for name in ("aime24", "aime25", "hmmt_feb25", "dapo_math_17k", "deepmath_103k"):
        built(tmp_path, made_up(name), RAW[name])
    first = {name: rows_of(tmp_path, name)[1] for name in ("aime24", "aime25", "hmmt_feb25", "dapo_math_17k")}
    assert {k: (v["id"], v["answer"], v["answer_type"]) for k, v in first.items()} == {
        "aime24": ("aime24-61", "7", "int"),
        "aime25": ("aime25-2", "33", "int"),
        "hmmt_feb25": ("hmmt_feb25-2", "\\frac{1}{576}", None),
        "dapo_math_17k": ("dapo_math_17k-uuid-1", "1", "int"),
    }
    assert rows_of(tmp_path, "deepmath_103k")[39]["id"] == "deepmath_103k-39"


def test_livecodebench_rows(tmp_path: Path) -> None:
    manifest = built(tmp_path, lcb_spec(), lcb_rows(), gold=gold_problem)
    rows = rows_of(tmp_path, "livecodebench_v6")
    assert [row["id"] for row in rows] == [f"toy_{i:03d}" for i in range(1, 9)] and manifest["gold_checked"]
    assert rows[0]["func_name"] is None and rows[5]["func_name"] == "scaleList"
    assert rows[0]["tests"][0] == {"input": "1\n-20\n", "output": "-20\n", "testtype": "stdin"}
    # Private tests come after the public ones and are really decoded.
    assert len(rows[0]["tests"]) > 2 and rows[0]["tests"][1]["output"] == "-34\n"
    assert rows[0]["date"] == "2025-01-04T00:00:00" and rows[0]["platform"] == "atcoder"


def test_window_is_inclusive_at_both_ends(tmp_path: Path) -> None:
    window = Window(release="release_v6", start="2025-01-19", end="2025-03-15", published_rows=5)
    manifest = built(tmp_path, lcb_spec(window=window), lcb_rows())
    dates = [row["date"][:10] for row in rows_of(tmp_path, "livecodebench_v6")]
    assert dates == ["2025-01-19", "2025-02-08", "2025-03-02", "2025-03-15", "2025-02-01"]
    assert (manifest["rows_in_files"], manifest["outside_window"], manifest["rows"]) == (8, 3, 5)
    assert manifest["window"]["release"] == "release_v6" and manifest["window"]["end"] == "2025-03-15T00:00:00"


def test_parquet_and_jsonl_have_the_same_hash(tmp_path: Path) -> None:
    spec = made_up("aime25")
    first = built(tmp_path / "a", spec, RAW["aime25"])
    copy = tmp_path / "train-00000-of-00001.jsonl"
    copy.write_text("".join(json.dumps(row) + "\n" for row in RAW["aime25"]))
    second = build(spec, tmp_path / "b", local=copy, locks=tmp_path / "locks")
    assert first["rows_sha256"] == second["rows_sha256"]


@pytest.mark.parametrize("count", [29, 31])
def test_wrong_row_count(tmp_path: Path, count: int) -> None:
    rows = (RAW["aime24"] + [{**RAW["aime24"][0], "id": 99, "problem": "Another one?"}])[:count]
    spec = made_up("aime24")
    raw = write_raw(tmp_path / "raw", spec, rows)
    with pytest.raises(RowCountError, match=f"{count} rows in data/train-.*, expected 30"):
        build(spec, tmp_path / "out", local=raw, locks=tmp_path / "locks")
    assert not list((tmp_path / "out").rglob("rows.jsonl*")) and not list((tmp_path / "out").rglob("manifest.json"))


def test_rows_repeated_as_verl_copies_repeat_them(tmp_path: Path) -> None:
    rows = [{**row, "id": 100 * copy + row["id"]} for copy in range(2) for row in RAW["aime24"][:15]]
    with pytest.raises(DuplicateError, match="'aime24-160' repeats the text of 'aime24-60'"):
        built(tmp_path, made_up("aime24"), rows)
    with pytest.raises(DuplicateError, match="id 'aime24-60' occurs twice"):
        built(tmp_path, made_up("aime24"), [{**row, "id": 60} for row in RAW["aime24"]])


def test_hash_is_recorded_once_and_a_change_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = made_up("aime24")
    manifest = built(tmp_path, spec, RAW["aime24"])
    lock = json.loads((tmp_path / "locks" / "aime24.json").read_text())
    assert lock["rows_sha256"] == manifest["rows_sha256"] and "commit that file" in caplog.text
    assert built(tmp_path, spec, RAW["aime24"]) == manifest
    changed = [dict(row) for row in RAW["aime24"]]
    changed[3]["answer"] = "022"
    with pytest.raises(ChangedHashError, match=r"expected .*recorded in .*aime24\.json from a local copy"):
        built(tmp_path, spec, changed)
    assert not (tmp_path / "out" / "aime24" / "manifest.json").exists()
    other_pin = spec.model_copy(update={"revision": "0" * 40})
    with pytest.raises(ChangedHashError, match=r"recorded under pin .* delete .*aime24\.json"):
        built(tmp_path, other_pin, RAW["aime24"])


def test_pinned_hashes_are_enforced_without_a_lock(tmp_path: Path) -> None:
    with pytest.raises(ChangedHashError, match=r"pinned in aime24\.yaml"):
        built(tmp_path, made_up("aime24", rows_sha256="0" * 64), RAW["aime24"])
    spec = made_up("aime25")
    path = write_raw(tmp_path / "raw", spec, RAW["aime25"]) / spec.files[0].path
    pin = FilePin(path=spec.files[0].path, rows=30, sha256=file_sha256(path), bytes=path.stat().st_size)
    spec = spec.model_copy(update={"files": (pin,)})
    build(spec, tmp_path / "out", local=tmp_path / "raw", locks=tmp_path / "locks")
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChangedHashError, match=r"has sha256 .* expected"):
        build(spec, tmp_path / "out", local=tmp_path / "raw", locks=tmp_path / "locks")
    path.write_bytes(data[:-1])
    with pytest.raises(ChangedHashError, match="bytes, expected"):
        build(spec, tmp_path / "out", local=tmp_path / "raw", locks=tmp_path / "locks")


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"problem": "Find $\frac{1}{2}$."}, ControlCharacterError, r"U\+000C .*\\frac .*one backslash"),
        ({"problem": "In \triangle ABC"}, ControlCharacterError, r"U\+0009 .*triangle"),
        ({"problem": "Let \beta be"}, ControlCharacterError, r"U\+0008"),
        ({"problem": "a \rightarrow b"}, ControlCharacterError, r"U\+000D"),
        ({"problem": "where a \neq b holds"}, ControlCharacterError, "begins with 'eq b hol'"),
        ({"problem": "an unreadable \ufffd sign"}, ControlCharacterError, r"U\+FFFD"),
        ({"problem": "  "}, SchemaError, "not empty"),
        ({"answer": "2x"}, AnswerError, "expected an integer in ASCII digits"),
        ({"answer": "\u0662\u0665"}, AnswerError, "ASCII digits"),
        ({"answer": "1000"}, AnswerError, "expected 0 to 999"),
    ],
)
def test_bad_row_of_a_test_set(tmp_path: Path, change: Row, error: type[Exception], text: str) -> None:
    rows = [dict(row) for row in RAW["aime24"]]
    rows[4].update(change)
    with pytest.raises(error, match=text) as caught:
        built(tmp_path, made_up("aime24"), rows)
    assert "aime24-64" in str(caught.value)


def test_good_text_is_not_refused(tmp_path: Path) -> None:
    rows = [dict(row) for row in RAW["aime24"]]
    text = "A line.\r\n\\neq stays, so do \u03b1 \u2264 \\frac12\nequal parts\nnot here\nabla"
    rows[0]["problem"] = text.replace("\nabla", "")
    built(tmp_path, made_up("aime24"), rows)
    assert rows_of(tmp_path, "aime24")[0]["problem"] == text.replace("\r\n", "\n").replace("\nabla", "")


def test_missing_column_is_named(tmp_path: Path) -> None:
    rows = [{k: v for k, v in row.items() if k != "answer"} for row in RAW["aime24"]]
    with pytest.raises(SchemaError, match=r"no column\(s\) answer; it has id, problem"):
        built(tmp_path, made_up("aime24"), rows)


def test_training_rows_are_dropped_and_listed(tmp_path: Path) -> None:
    rows = [dict(row) for row in RAW["dapo_math_17k"]]
    rows[1]["prompt"] = "Find $\frac{1}{2}$."
    rows[2]["solution"] = "about 3"
    rows[3]["prompt"] = rows[5]["prompt"]
    manifest = built(tmp_path, made_up("dapo_math_17k"), rows, gold=lambda row: "bad" if row["answer"] == "9" else "")
    assert manifest["rows"] == 36 and manifest["rows_in_files"] == 40
    assert manifest["dropped"] == {"answer": 1, "control_character": 1, "duplicate": 1, "gold": 1}
    assert [row["id"].rsplit("-", 1)[1] for row in manifest["dropped_rows"]] == ["1", "2", "5", "9"]


def test_gold_that_the_grader_cannot_use(tmp_path: Path) -> None:
    rows = [dict(row) for row in RAW["hmmt_feb25"]]
    rows[7]["answer"] = "\\frac{1}{"
    with pytest.raises(GoldError, match="hmmt_feb25-8: the grader cannot use its gold"):
        built(tmp_path, made_up("hmmt_feb25"), rows, gold=gold_problem)


def test_reading_a_fetched_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = made_up("aime24")
    built(tmp_path, spec, RAW["aime24"])
    monkeypatch.setattr(store, "load_spec", lambda name: spec.model_copy(update={"revision": "0" * 40}))
    with pytest.raises(StaleError, match="fetched under pin"):
        load("aime24", tmp_path / "out")
    monkeypatch.setattr(store, "load_spec", lambda name: spec)
    assert [row["id"] for row in load("aime24", tmp_path / "out")] == [f"aime24-{i}" for i in range(60, 90)]
    rows = tmp_path / "out" / "aime24" / "rows.jsonl"
    rows.write_text(rows.read_text().replace("pears", "plums"))
    with pytest.raises(ChangedHashError, match="differs from its manifest"):
        load("aime24", tmp_path / "out")


def test_reading_what_was_never_fetched(tmp_path: Path) -> None:
    with pytest.raises(
        NotAvailableError, match=r"snakemake fetch_data.*python -m quads.fetch --set aime25.*--local PATH"
    ):
        next(iterate("aime25", tmp_path))


def test_pins_are_complete() -> None:
    assert [n for n in names("test") if load_spec(n).kind == "math"] == ["aime24", "aime25", "hmmt_feb25"]
    assert [load_spec(n).rows for n in ("livecodebench_v5", "livecodebench_v6")] == [880, 1055]
    assert all(pin.sha256 and pin.bytes for pin in load_spec("livecodebench_v6").files)
    assert chosen(["all"]) == [n for n in names() if n != "deepcoder_lcbv5"]


def test_no_row_of_a_noncommercial_set_is_committed() -> None:
    root = Path(__file__).resolve().parents[3]
    listed = subprocess.run(["git", "ls-files", "*.jsonl", "*.parquet"], cwd=root, capture_output=True, text=True)
    data = [line for line in listed.stdout.splitlines() if "aime" in line.lower() or "hmmt" in line.lower()]
    assert data == []


def test_import_touches_neither_hub_nor_torch() -> None:
    heavy = {"torch", "huggingface_hub", "datasets"}
    code = f"import sys, quads.data.benchmarks, quads.fetch; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
