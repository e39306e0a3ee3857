"""The data set: deterministic content, disjoint splits, verl's row format, the prepare stage."""

import datasets
import numpy as np
import pytest

from quads import prepare
from quads.config import Data
from quads.data import build, chain
from quads.files import ResultFileError, read_result

SMALL = Data(operations=3, train_prompts=40, eval_prompts=20, calibration_prompts=5)
EXPERIMENT = """
name: tiny
title: data only
arms: [bf16]
data: {operations: 3, train_prompts: 40, eval_prompts: 20, calibration_prompts: 5}
grpo: {steps: 2, prompts_per_step: 12}
"""


@pytest.fixture(scope="module")
def rows():
    return build.build(SMALL)


def prompts(split_rows):
    return {r["prompt"] if isinstance(r["prompt"], str) else r["prompt"][0]["content"] for r in split_rows}


def test_same_config_same_content_and_another_seed_another(rows):
    again = build.build(SMALL)
    other = build.build(SMALL.model_copy(update={"seed": 1001}))
    for split in build.SPLITS:
        assert build.content_hash(rows[split]) == build.content_hash(again[split])
        assert build.content_hash(rows[split]) != build.content_hash(other[split])


def test_the_toy_data_is_the_versioned_one():
    # Changes only together with a deliberate new version of the data: every published number depends on it.
    toy = build.build(Data())
    assert {s: build.content_hash(r)[:16] for s, r in toy.items()} == {
        "train": "e09e8e07f3eb0fdc",
        "eval": "1cee29ddd53d744d",
        "calibration": "b8027955055e2d38",
    }


def test_splits_are_disjoint_and_without_repeats(rows):
    sets = {split: prompts(rows[split]) for split in build.SPLITS}
    assert {split: len(s) for split, s in sets.items()} == {"train": 40, "eval": 20, "calibration": 5}
    assert len(set.union(*sets.values())) == 65


def test_more_training_prompts_change_no_eval_prompt_and_only_append(rows):
    longer = build.build(SMALL.model_copy(update={"train_prompts": 400}))
    assert longer["eval"] == rows["eval"]
    assert longer["train"][:40] == rows["train"]


def test_too_many_prompts_for_the_configuration():
    with pytest.raises(ValueError, match="only 300 exist"):
        build.build(Data(operations=1, train_prompts=200, eval_prompts=20, calibration_prompts=5))


def test_rows_have_the_format_verl_reads(rows):
    assert rows["eval"][3].keys() == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    for index, row in enumerate(rows["eval"]):
        (message,) = row["prompt"]
        assert message["role"] == "user"
        assert row["data_source"] == "chain"
        assert row["reward_model"]["style"] == "rule"
        assert row["extra_info"] == {"split": "eval", "index": index, "operations": 3}
        assert chain.check(message["content"], row["reward_model"]["ground_truth"] + ";")


def test_calibration_rows_hold_prompt_answer_and_their_ids(rows):
    for row in rows["calibration"]:
        assert row.keys() == {"prompt", "answer", "input_ids"}
        assert chain.check(row["prompt"], row["answer"])
        assert row["input_ids"] == chain.ids_of(row["prompt"] + row["answer"])


@pytest.fixture
def prepared(tmp_path):
    config = tmp_path / "configs" / "tiny.yaml"
    config.parent.mkdir()
    config.write_text(EXPERIMENT)
    prepare.main(["--experiment", str(config), "--out", str(tmp_path / "data")])
    return tmp_path / "data"


def test_stage_writes_the_rows_and_a_manifest_of_them(prepared, rows):
    manifest = read_result(prepared / "manifest.json", "data manifest", ("rows", "sha256", "seed", "config"))
    assert manifest["rows"] == {"train": 40, "eval": 20, "calibration": 5}
    for split in build.SPLITS:
        file = str(prepared / f"{split}.parquet")
        loaded = datasets.load_dataset("parquet", data_files=file, cache_dir=str(prepared / "cache"))["train"].to_list()
        assert loaded == rows[split] == build.read(prepared / f"{split}.parquet")
        assert build.content_hash(loaded) == manifest["sha256"][split]
    assert not list(prepared.glob("*.part"))


def test_stage_killed_before_the_end_leaves_no_manifest(prepared, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "write", killed)
    config = prepared.parent / "configs" / "tiny.yaml"
    with pytest.raises(KeyboardInterrupt):
        prepare.main(["--experiment", str(config), "--out", str(prepared)])
    with pytest.raises(ResultFileError, match="missing"):
        read_result(prepared / "manifest.json", "data manifest")


def test_eval_keys_are_those_of_the_eval_prompts(prepared, rows):
    ids = build.problems_of(np.array([chain.ids_of(p) for p in sorted(prompts(rows["eval"]))]))
    assert sorted(build.eval_keys(prepared).tolist()) == sorted(chain.keys(ids).tolist())


def test_damaged_or_missing_parquet_is_named(prepared):
    file = prepared / "eval.parquet"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"eval\.parquet: not a complete parquet file"):
        build.eval_keys(prepared)
    file.unlink()
    with pytest.raises(ValueError, match=r"eval\.parquet: missing; make it with"):
        build.eval_keys(prepared)


def test_content_hash_ignores_key_order_only():
    a, b = {"x": 1, "y": "2"}, {"y": "2", "x": 1}
    assert build.content_hash([a]) == build.content_hash([b])
    assert build.content_hash([a]) != build.content_hash([{"x": 1, "y": 2}])
