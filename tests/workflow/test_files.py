"""Result files: atomic writes, errors that name the file and its rebuild command, tolerance of one torn last line."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quads import files
from quads.files import (
    ResultFileError,
    append_jsonl,
    read_checkpoint_config,
    read_jsonl,
    read_result,
    rebuild_command,
    require_writable,
    write_json_atomic,
    write_text_atomic,
)


def test_round_trip_and_no_leftovers(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "result.json"
    write_json_atomic(path, {"x": [1, 2.5, None, "é"]})
    assert read_result(path, "result", ["x"]) == {"x": [1, 2.5, None, "é"]}
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_text_atomic(tmp_path / "x.txt", "old")

    def full(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        write_text_atomic(path, "new, but only half of i")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.txt"]


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("")
    assert write_text_atomic(tmp_path / "atomic", "").stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_is_refused(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match=r"result\.json.*null"):
        write_json_atomic(tmp_path / "result.json", {"x": value})
    with pytest.raises(ValueError, match="JSON"):
        append_jsonl(tmp_path / "h.jsonl", {"x": value})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "missing"),
        ("", "empty"),
        ('{"run_id": "a", "ste', "truncated or damaged, not valid JSON at line 1 column"),
        ("[1, 2]", "expected a JSON object, got list"),
        ('{"run_id": "a"}', "lacks the key(s) steps; it has: run_id"),
    ],
)
def test_read_result_says_what_and_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("results/toy/result.json")
    path.parent.mkdir(parents=True)
    if content is not None:
        path.write_text(content)
    with pytest.raises(ResultFileError) as caught:
        read_result(path, "training result", ["run_id", "steps"])
    message = str(caught.value)
    assert message.startswith(f"training result {path}: ") and problem in message
    assert message.endswith(f"Rebuild it with: snakemake --forcerun {path} -- {path}")


def test_side_file_names_the_rule_output(tmp_path: Path) -> None:
    with pytest.raises(ResultFileError, match=r"own\.jsonl: missing.*-- results/r/result\.json$"):
        read_jsonl(tmp_path / "own.jsonl", target="results/r/result.json")


def test_advice_is_only_what_can_be_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules make files below results/ of the working folder, under their relative names."""
    monkeypatch.chdir(tmp_path)
    below = "snakemake --forcerun results/toy/x.json -- results/toy/x.json"
    assert {rebuild_command(p) for p in (Path("results/toy/x.json"), tmp_path / "results/toy/x.json")} == {below}
    for other in ("x.json", "../results/toy/x.json", "/results/toy/x.json", "resultsx/x.json"):
        assert "snakemake" not in rebuild_command(Path(other)) and "another folder" in rebuild_command(Path(other))
    with pytest.raises(ResultFileError, match=r"x\.json: missing\. Give another$"):
        read_result("x.json", "thing", advice="Give another")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "missing"),
        ("[1]", "expected a JSON object, got list"),
        ('{"a": 1}', "lacks the key\\(s\\) vocab_size"),
        ('{"vocab_size": "1"}', "vocab_size is '1', expected a whole number from 1"),
        ('{"vocab_size": true}', "vocab_size is True"),
        ('{"vocab_size": 0}', "vocab_size is 0"),
    ],
)
def test_a_wrong_checkpoint_asks_for_another_and_names_no_rule(
    tmp_path: Path, content: str | None, problem: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ResultFileError, match=rf"{problem}.*Give the folder of a Hugging Face checkpoint") as caught:
        read_checkpoint_config(tmp_path, ("vocab_size",))
    assert "snakemake" not in str(caught.value)


def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    refused = (tmp_path, tmp_path / "file" / "x.json", tmp_path / "nowhere" / "x.json", Path("/dev/null"))
    for path in (*refused, tmp_path / ("n" * 300)):
        with pytest.raises(ResultFileError, match="cannot be written"):
            require_writable(path)
    require_writable(tmp_path / "new" / "x.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "nowhere"]


@settings(deadline=None)  # it writes files: a busy disk is no failure
@given(st.binary(max_size=40))
def test_any_truncation_is_noticed(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    """Every proper prefix of a result, with or without noise behind it, is an error or the same object."""
    whole = json.dumps({"run_id": "a", "steps": 3, "nested": {"x": [1, 2]}}).encode()
    path = tmp_path_factory.getbasetemp() / "prefix.json"
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut] + noise)
        try:
            assert isinstance(read_result(path, "result", ["run_id", "steps"]), dict)
            json.loads((whole[:cut] + noise).decode(errors="replace"))
        except ResultFileError:
            continue


def test_append_and_read_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "history.jsonl"
    for step in range(3):
        append_jsonl(path, {"step": step})
    assert read_jsonl(path, ["step"]) == [{"step": 0}, {"step": 1}, {"step": 2}]


@pytest.mark.parametrize("cut", range(1, 12))
def test_torn_last_line(tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    """A writer killed after any byte of the last line: the reader drops it, the next writer replaces it."""
    path = tmp_path / "history.jsonl"
    append_jsonl(path, {"step": 0})
    append_jsonl(path, {"step": 1})
    path.write_bytes(path.read_bytes()[:-cut])
    kept = [{"step": 0}]
    with caplog.at_level(logging.WARNING):
        assert read_jsonl(path, ["step"]) == kept
    # {"step":1}\n is 11 bytes: after 11 removed bytes nothing is torn.
    assert ("torn last line" in caplog.text) == (cut < 11)
    append_jsonl(path, {"step": 9})
    assert read_jsonl(path, ["step"]) == [*kept, {"step": 9}]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"step":0}\n{"st\n{"step":2}\n', "line 2 is damaged"),
        ('{"step":0}\n\n{"step":2}\n', "line 2 is damaged"),
        ("[1]\n", "line 1: expected an object, got list"),
        ('{"step":0}\n{"other":1}\n', r"line 2 lacks the key\(s\) step"),
    ],
)
def test_other_damage_is_an_error(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(text)
    with pytest.raises(ResultFileError, match=problem):
        read_jsonl(path, ["step"])
