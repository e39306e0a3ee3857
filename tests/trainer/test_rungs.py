"""A rung inside training against a fresh model after surgery at that precision, and that nothing of it stays."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tiny_moe import tiny_model

from quads.layers.execution import Execution
from quads.layers.setup import Precision
from quads.layers.surgery import apply_surgery, quads_layers, set_static_masks
from quads.numerics.rac import RacSpec
from quads.trainer.calibration import calibrate
from quads.trainer.rungs import RUNGS, at_precision, rung_precisions

BF16, W4A16, W4A4 = Precision(), Precision("nvfp4"), Precision("nvfp4", "nvfp4")
RAC = replace(W4A4, rac=RacSpec(0.5))
IDS = torch.randint(0, 43, (5, 9), generator=torch.Generator().manual_seed(1))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def fresh(precision: Precision, masks=None) -> torch.Tensor:
    model = tiny_model()
    apply_surgery(model, precision)
    if masks:
        set_static_masks(model, masks)
    return logits(model)


@pytest.fixture(scope="module")
def masks():
    model = tiny_model()
    apply_surgery(model, W4A16)
    return calibrate(model, IDS, torch.ones_like(IDS), RacSpec(0.5))


@pytest.mark.parametrize("precision", [BF16, W4A16, W4A4, RAC, Precision("fp8", "fp8"), Precision("fp8")])
@pytest.mark.parametrize("own", [BF16, W4A16])
def test_a_rung_is_a_model_made_for_that_precision(own, precision, masks):
    model = tiny_model()
    apply_surgery(model, own, Execution(cache="on"))
    before = logits(model)
    with at_precision(model, precision, masks):
        inside = logits(model)
    assert torch.equal(inside, fresh(precision, masks if precision.rac else None))
    assert torch.equal(logits(model), before)
    assert (precision == own) == torch.equal(inside, before)


def test_a_rung_sees_the_weights_of_this_step_not_kept_ones():
    model = tiny_model()
    apply_surgery(model, W4A16, Execution(cache="on"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        with at_precision(model, W4A4):
            inside = logits(model)
        other = tiny_model()
        apply_surgery(other, W4A4)
        other.load_state_dict(model.state_dict())
        assert torch.equal(inside, logits(other))
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_everything_is_restored_after_an_error_too():
    model = tiny_model()
    apply_surgery(model, W4A16, Execution(cache="on"))
    before = [copy.copy(vars(m.quads)) for _, m in quads_layers(model)]
    with pytest.raises(ValueError, match="no static RAC mask"), at_precision(model, RAC):
        pass
    with pytest.raises(KeyboardInterrupt), at_precision(model, W4A4):
        raise KeyboardInterrupt
    after = [vars(m.quads) for _, m in quads_layers(model)]
    for old, new in zip(before, after, strict=True):
        for name in ("precision", "masks", "execution", "cache"):
            assert old[name] is new[name] or old[name] == new[name], name


def test_precisions_of_the_arms():
    def of(trainer, rollout):
        return tuple(rung_precisions(trainer, rollout)[name] for name in RUNGS)

    assert of(W4A16, RAC) == (W4A16, W4A16, RAC)  # QUADS: delta_weight is 0 by construction
    assert of(BF16, W4A4) == (BF16, W4A16, W4A4)  # naive
    assert of(W4A4, W4A4) == (W4A4, W4A4, W4A4)  # symmetric
    assert of(BF16, Precision("fp8", "fp8")) == (BF16, Precision("fp8"), Precision("fp8", "fp8"))
    with pytest.raises(ValueError, match="different layers"):
        rung_precisions(BF16, replace(W4A4, skip=("lm_head",)))
