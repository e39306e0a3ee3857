"""Per-sample records: nothing lost, nothing twice, nothing mixed, whatever a kill leaves on disk."""

import json

import pytest

from quads.evaluation.records import Record, Records, RecordsError, read_records, sample_seed, score_matrix

HEADER = {"checkpoint": "sha256:abc", "mode": "w4a4", "sampling": {"temperature": 1.0}, "eval_hash": "0123456789"}


def record(problem, sample, score=1.0):
    return Record(
        problem, sample, sample_seed(0, problem, sample), "^3+5=", "8;", 2, "stop", -0.5, "correct", score, "8"
    )


def test_round_trip_and_order(tmp_path):
    path = tmp_path / "own.jsonl"
    records = Records.open(path, HEADER)
    assert records.missing(2, 2) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    records.append([record(0, 0), record(1, 1, 0.0)])
    assert records.missing(2, 2) == [(0, 1), (1, 0)]
    records.append([record(1, 0), record(0, 1, 0.0)])
    assert records.scores(2, 2).tolist() == [[1.0, 0.0], [1.0, 0.0]]
    header, rows = read_records(path)
    assert header == HEADER
    assert [r.key for r in rows] == [(0, 0), (1, 1), (1, 0), (0, 1)]
    assert rows[0] == record(0, 0)


def test_text_with_line_separators_survives(tmp_path):
    path = tmp_path / "own.jsonl"
    odd = Record(0, 0, 1, "a\u2028b", "c\nd\x85e", 3, "length", None, "no_answer", 0.0, None)
    Records.open(path, HEADER).append([odd])
    assert read_records(path)[1] == [odd]
    assert Records.open(path, HEADER).done[0, 0] == odd


def test_kill_points_resume_to_the_same_complete_file(tmp_path):
    whole = tmp_path / "whole.jsonl"
    Records.open(whole, HEADER).append([record(p, s) for p in range(2) for s in range(2)])
    content = whole.read_bytes()
    # around every line end, and here and there between them
    ends = [i for i, byte in enumerate(content) if byte == ord("\n")]
    for cut in sorted({*range(0, len(content), 97), *(e + d for e in ends for d in (-1, 0, 1))}):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(content[:cut])
        resumed = Records.open(path, HEADER)
        # a sample counts as finished only when its newline reached the disk
        assert len(resumed.done) == max(0, content[:cut].count(b"\n") - 1)
        resumed.append([record(*key) for key in resumed.missing(2, 2)])
        assert path.read_bytes() == content
        path.unlink()


@pytest.mark.parametrize(
    ("key", "value"),
    [("checkpoint", "sha256:def"), ("mode", "bf16"), ("sampling", {"temperature": 0.6}), ("eval_hash", "x")],
)
def test_other_conditions_are_refused_and_the_file_stays(tmp_path, key, value):
    path = tmp_path / "own.jsonl"
    Records.open(path, HEADER).append([record(0, 0)])
    before = path.read_bytes()
    with pytest.raises(RecordsError, match=rf"{key}: file has.*mv .*own\.jsonl"):
        Records.open(path, {**HEADER, key: value})
    assert path.read_bytes() == before


def test_damage_in_the_middle_names_the_line(tmp_path):
    path = tmp_path / "own.jsonl"
    Records.open(path, HEADER).append([record(0, 0), record(0, 1), record(1, 0)])
    lines = path.read_text().splitlines()
    lines[2] = lines[2][:-9]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordsError, match=r"own\.jsonl:3: not a sample record.*move it aside"):
        Records.open(path, HEADER)
    lines[2] = json.dumps({"problem": 1})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordsError, match=r"own\.jsonl:3"):
        read_records(path)


def test_a_sample_is_never_counted_twice(tmp_path):
    path = tmp_path / "own.jsonl"
    records = Records.open(path, HEADER)
    records.append([record(0, 0)])
    with pytest.raises(ValueError, match="already recorded"):
        records.append([record(0, 0)])
    path.write_text(path.read_text() + path.read_text().splitlines()[1] + "\n")
    with pytest.raises(RecordsError, match="there twice"):
        Records.open(path, HEADER)


def test_holes_and_extras_are_errors(tmp_path):
    rows = [record(0, 0), record(0, 1), record(1, 0)]
    with pytest.raises(RecordsError, match=r"1 missing \(first \[\(1, 1\)\]\)"):
        score_matrix(tmp_path / "x.jsonl", rows, 2, 2)
    with pytest.raises(RecordsError, match=r"1 unexpected \(first \[\(0, 1\)\]\)"):
        score_matrix(tmp_path / "x.jsonl", rows, 2, 1)


def test_reading_a_cut_or_missing_file_is_an_error(tmp_path):
    with pytest.raises(RecordsError, match="missing"):
        read_records(tmp_path / "own.jsonl")
    path = tmp_path / "own.jsonl"
    Records.open(path, HEADER).append([record(0, 0)])
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(RecordsError, match="cut"):
        read_records(path)


def test_seeds_are_distinct_deterministic_and_fit_an_int32():
    seeds = {sample_seed(0, p, s) for p in range(384) for s in range(4)}
    assert len(seeds) == 384 * 4
    assert all(0 <= s < 2**31 for s in seeds)
    assert sample_seed(0, 3, 1) == sample_seed(0, 3, 1) != sample_seed(1, 3, 1)
    # independent of this module: int.from_bytes(sha256(b"0/3/1")[:4], "little") >> 1
    assert sample_seed(0, 3, 1) == 1072032888
