"""Which checkpoint is resumed from: complete, logged, of the same config and code; nothing is deleted."""

import pytest
from test_train_stage import make_checkpoint

from quads.integrations.verl.checkpoints import LATEST, claim, is_complete

STAMP = {"config_hash": "a", "code_hash": "b"}


@pytest.mark.parametrize(
    "lost",
    [
        "data.pt",
        "actor/model_world_size_1_rank_0.pt",
        "actor/optim_world_size_1_rank_0.pt",
        "actor/extra_state_world_size_1_rank_0.pt",
        "actor/huggingface/model.safetensors",
        "actor/huggingface/config.json",
    ],
)
def test_a_half_written_checkpoint_falls_back_to_the_one_before(tmp_path, lost):
    for step in (2, 4):
        make_checkpoint(tmp_path / f"global_step_{step}")
    (tmp_path / LATEST).write_text("4")
    (tmp_path / "global_step_4" / lost).unlink()
    assert not is_complete(tmp_path / "global_step_4")
    assert claim(tmp_path, STAMP, range(5)) == 2
    assert (tmp_path / LATEST).read_text() == "2"
    assert len(list(tmp_path.glob("stale-*/global_step_4"))) == 1


def test_a_rank_that_is_missing_makes_it_incomplete(tmp_path):
    make_checkpoint(tmp_path)
    (tmp_path / "actor" / "model_world_size_1_rank_0.pt").rename(tmp_path / "actor" / "model_world_size_2_rank_0.pt")
    assert not is_complete(tmp_path)


def test_a_checkpoint_ahead_of_its_metrics_is_not_used(tmp_path):
    for step in (2, 4):
        make_checkpoint(tmp_path / f"global_step_{step}")
    assert claim(tmp_path, STAMP, {1, 2, 3}) == 2
    assert claim(tmp_path, STAMP, {1}) == 0
    assert len(list(tmp_path.glob("stale-*/global_step_*"))) == 2


@pytest.mark.parametrize("tracker", ["", "4\n", "nonsense"])
def test_the_tracker_file_is_not_trusted(tmp_path, tracker):
    make_checkpoint(tmp_path / "global_step_2")
    (tmp_path / LATEST).write_text(tracker)
    assert claim(tmp_path, STAMP, {1, 2}) == 2


@pytest.mark.parametrize("stamp", ["", '{"config_hash": "other", "code_hash": "b"}'])
def test_checkpoints_of_other_code_are_moved_aside_not_deleted(tmp_path, stamp):
    make_checkpoint(tmp_path / "global_step_2")
    (tmp_path / "stamp.json").write_text(stamp)
    assert claim(tmp_path, STAMP, {1, 2}) == 0
    assert len(list(tmp_path.glob("stale-*/global_step_2"))) == 1
    assert not (tmp_path / "global_step_2").exists()
