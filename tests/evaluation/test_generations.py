"""The generation cache: nothing lost, nothing twice, nothing mixed, whatever a kill or a shard leaves on disk."""

import json

import pytest

from quads.evaluation.generations import Generation, RecordsError, Shard, Store, conditions_key, sample_seed

CONDITIONS = {"model": "sha256:abc", "mode": "w4a4", "sampling": {"temperature": 1.0}, "max_tokens": 8}
KEYS = [("chain/0", 0), ("chain/0", 1), ("chain/1", 0), ("chain/1", 1)]


def generation(problem, sample, request="r", text="8"):
    return Generation(problem, sample, request, sample_seed(0, problem, sample), "^3+5=", text, 2, "stop", -0.5)


def opened(folder, conditions=CONDITIONS, shard=None):
    return Store.open(folder, "w4a4", conditions, shard)


def test_round_trip(tmp_path):
    store = opened(tmp_path)
    store.append([generation(*k) for k in KEYS])
    again = opened(tmp_path)
    assert again.done == store.done and again.done["chain/0", 1, "r"] == generation("chain/0", 1)
    assert store.path.name == f"w4a4-{conditions_key(CONDITIONS)}.jsonl"


def test_text_with_line_separators_survives(tmp_path):
    odd = Generation("chain/0", 0, "r", 1, "a\u2028b", "c\nd\x85e", 3, "length", None)
    opened(tmp_path).append([odd])
    assert opened(tmp_path).done["chain/0", 0, "r"] == odd


def test_kill_points_resume_to_the_same_complete_file(tmp_path):
    whole = opened(tmp_path / "whole")
    whole.append([generation(*k) for k in KEYS])
    content = whole.path.read_bytes()
    # around every line end, and here and there between them
    ends = [i for i, byte in enumerate(content) if byte == ord("\n")]
    path = tmp_path / "cut" / whole.path.name
    path.parent.mkdir()
    for cut in sorted({*range(0, len(content), 97), *(e + d for e in ends for d in (-1, 0, 1))}):
        path.write_bytes(content[:cut])
        resumed = opened(tmp_path / "cut")
        # a sample counts as finished only when its newline reached the disk
        assert len(resumed.done) == max(0, content[:cut].count(b"\n") - 1)
        resumed.append([generation(*k) for k in KEYS if (*k, "r") not in resumed.done])
        assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("key", "value"), [("model", "sha256:def"), ("mode", "bf16"), ("sampling", {"temperature": 0.6}), ("max_tokens", 9)]
)
def test_other_conditions_have_another_file(tmp_path, key, value):
    opened(tmp_path).append([generation("chain/0", 0)])
    other = opened(tmp_path, {**CONDITIONS, key: value})
    assert other.done == {} and len(list(tmp_path.glob("*.jsonl"))) == 2


def test_another_prompt_is_another_sample(tmp_path):
    opened(tmp_path).append([generation("chain/0", 0, request="r")])
    store = opened(tmp_path)
    store.append([generation("chain/0", 0, request="other")])
    assert len(store.done) == 2


def test_a_header_that_was_edited_is_refused(tmp_path):
    store = opened(tmp_path)
    lines = store.path.read_text().replace("sha256:abc", "sha256:xyz")
    store.path.write_text(lines)
    with pytest.raises(RecordsError, match=r"model: file has 'sha256:xyz'.*mv .*\.jsonl"):
        opened(tmp_path)
    assert store.path.read_text() == lines


def test_damage_in_the_middle_names_the_line(tmp_path):
    store = opened(tmp_path)
    store.append([generation(*k) for k in KEYS])
    lines = store.path.read_text().splitlines()
    lines[2] = lines[2][:-9]
    store.path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordsError, match=r"\.jsonl:3: not a sample.*move it aside"):
        opened(tmp_path)
    lines[2] = json.dumps({"problem": 1})
    store.path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordsError, match=r"\.jsonl:3"):
        Store.read(tmp_path, "w4a4", CONDITIONS)


def test_a_sample_is_never_counted_twice(tmp_path):
    store = opened(tmp_path)
    store.append([generation("chain/0", 0)])
    with pytest.raises(ValueError, match="already there"):
        store.append([generation("chain/0", 0)])
    store.path.write_text(store.path.read_text() + store.path.read_text().splitlines()[1] + "\n")
    with pytest.raises(RecordsError, match="there twice"):
        opened(tmp_path)


def test_shards_part_the_problems_and_their_files_add_up(tmp_path):
    problems = [f"chain/{i}" for i in range(200)]
    shards = [Shard(i, 3) for i in range(3)]
    owners = [[s.index for s in shards if s.holds(p)] for p in problems]
    assert all(len(o) == 1 for o in owners)
    assert min(owners.count([i]) for i in range(3)) > 40
    for shard in shards:
        opened(tmp_path, shard=shard).append([generation(p, 0) for p in problems if shard.holds(p)])
    assert len(Store.read(tmp_path, "w4a4", CONDITIONS).done) == 200
    # an unsharded run after them has nothing left to draw
    assert len(opened(tmp_path).done) == 200


def test_the_same_sample_from_two_files_counts_once_and_always_the_same(tmp_path):
    opened(tmp_path, shard=Shard(0, 2)).append([generation("chain/0", 0, text="first")])
    path = opened(tmp_path, shard=Shard(1, 2)).path
    row = json.loads(opened(tmp_path, shard=Shard(0, 2)).path.read_text().splitlines()[1])
    with path.open("a") as file:
        file.write(json.dumps({**row, "text": "second"}) + "\n")
    for _ in range(2):
        (only,) = Store.read(tmp_path, "w4a4", CONDITIONS).done.values()
        assert only.text == "first"


def test_reading_never_touches_a_file_that_another_shard_writes(tmp_path):
    path = opened(tmp_path, shard=Shard(0, 2)).path
    torn = path.read_text() + '{"problem": "cha'
    path.write_text(torn)
    assert opened(tmp_path, shard=Shard(1, 2)).done == {}
    assert path.read_text() == torn


def test_nothing_generated_is_an_error(tmp_path):
    with pytest.raises(RecordsError, match="nothing was generated"):
        Store.read(tmp_path, "w4a4", CONDITIONS)


@pytest.mark.parametrize("bad", ["", "1", "2/2", "3/2", "-1/2", "a/b", "0/0"])
def test_bad_shards_are_refused(bad):
    with pytest.raises(ValueError, match="expected i/n"):
        Shard.parse(bad)
    assert Shard.parse("1/2") == Shard(1, 2)


def test_seeds_are_distinct_deterministic_and_fit_an_int32():
    seeds = {sample_seed(0, f"chain/{p}", s) for p in range(384) for s in range(4)}
    assert len(seeds) == 384 * 4
    assert all(0 <= s < 2**31 for s in seeds)
    assert sample_seed(0, "3", 1) != sample_seed(1, "3", 1)
    # independent of this module: int.from_bytes(sha256(b"0/3/1")[:4], "little") >> 1
    assert sample_seed(0, "3", 1) == 1072032888
