"""compare_weights counts every differing element and refuses unmatched names."""

import pytest
import torch
from safetensors.torch import save_file

from quads.trainer.weights import Dump, compare_weights


def test_counts_and_maximum():
    a = {"x": torch.zeros(4, 4), "y": torch.ones(3)}
    b = {name: tensor.clone() for name, tensor in a.items()}
    assert compare_weights(a.items(), b) == {"elements": 19, "different": 0, "max_abs": 0.0, "tensors": 2}
    b["x"][1, 2] = -0.5
    b["y"][0] = 2.0
    assert compare_weights(a.items(), b) == {"elements": 19, "different": 2, "max_abs": 1.0, "tensors": 2}


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({}, "holds no weight 'x'"),
        ({"x": torch.zeros(3)}, "shape"),
        ({"x": torch.zeros(2), "z": torch.zeros(1)}, "'z'"),
    ],
)
def test_unmatched_weights_are_named(engine, words):
    with pytest.raises(ValueError, match=words):
        compare_weights([("x", torch.zeros(2))], engine)


def test_a_dump_is_the_product_of_what_the_engine_stores(tmp_path):
    qs, rcp = torch.tensor([[1.0, -3.0], [0.5, 6.0]]).bfloat16(), torch.tensor([[0.1], [1 / 3]])
    save_file({"x.qs": qs, "x.rcp": rcp}, tmp_path / "dump.safetensors")
    dump = Dump(tmp_path / "dump.safetensors")
    ours = [("x", qs.float() * rcp)]
    assert list(dump) == ["x"] and len(dump) == 1 and "y" not in dump
    assert compare_weights(ours, dump) == {"elements": 4, "different": 0, "max_abs": 0.0, "tensors": 1}
    ours[0][1][1, 1] += 1
    assert compare_weights(ours, dump)["different"] == 1
    with pytest.raises(ValueError, match="holds no weight 'y'"):
        compare_weights([("y", qs)], dump)
    with pytest.raises(ValueError, match="quantizes no weight"):
        compare_weights([], dump)
