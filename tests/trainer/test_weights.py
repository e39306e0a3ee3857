"""compare_weights counts every differing element and refuses unmatched names."""

import pytest
import torch

from quads.trainer.weights import compare_weights


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
