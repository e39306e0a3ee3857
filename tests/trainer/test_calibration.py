"""Calibration against scores accumulated by forward hooks on an untouched copy of the model."""

import copy

import pytest
import torch
from tiny_moe import tiny_model

from quads.layers.setup import Precision
from quads.layers.surgery import apply_surgery, quads_layers
from quads.numerics.qdq import fake_quantize_activation
from quads.numerics.rac import RacSpec, select
from quads.trainer.calibration import calibrate


@pytest.fixture(scope="module")
def model():
    model = tiny_model()
    apply_surgery(model, Precision(weight="nvfp4"))
    return model


@pytest.fixture(scope="module")
def batch():
    ids = torch.randint(0, 43, (6, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0  # left padding, as in rollouts
    mask[3, :2] = 0
    return ids, mask


@pytest.mark.parametrize("score", ["sumsq", "abs"])
def test_masks_equal_hook_based_scores(model, batch, score):
    ids, mask = batch
    spec = RacSpec(0.5, granularity="channel", score=score)
    inputs: dict[str, list[torch.Tensor]] = {}
    reference = copy.deepcopy(model)

    def record(key):
        return lambda module, args: inputs.setdefault(key, []).append(args[0].detach().reshape(-1, args[0].shape[-1]))

    for i, layer in enumerate(reference.model.layers):
        head = f"model.layers.{i}"
        layer.self_attn.q_proj.register_forward_pre_hook(record(f"{head}.self_attn.qkv_proj"))
        layer.self_attn.o_proj.register_forward_pre_hook(record(f"{head}.self_attn.o_proj"))
        layer.mlp.experts.register_forward_pre_hook(record(f"{head}.mlp.experts.w13"))
    with torch.no_grad():
        reference(input_ids=ids, attention_mask=mask)
    got = calibrate(model, ids, mask, spec)
    assert set(got) == set(inputs) | {f"model.layers.{i}.mlp.experts.w2" for i in range(2)}
    for key, (x,) in inputs.items():
        x = x[mask.reshape(-1).bool()]
        r = (x - fake_quantize_activation(x, "nvfp4")).double()
        scores = (r.square() if score == "sumsq" else r.abs()).sum(0)
        assert torch.equal(got[key], select(scores, spec)), key
        assert got[key].dtype == torch.bool and got[key].sum() == x.shape[1] // 2
    for i in range(2):
        assert got[f"model.layers.{i}.mlp.experts.w2"].shape == (32,)


def test_split_into_batches_does_not_change_masks(model, batch):
    spec = RacSpec(0.25)
    whole, parts = calibrate(model, *batch, spec), calibrate(model, *batch, spec, batch=2)
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_padding_content_is_ignored(model, batch):
    ids, mask = batch
    other = torch.where(mask.bool(), ids, 42 - ids)
    spec = RacSpec(0.5)
    a, b = calibrate(model, ids, mask, spec), calibrate(model, other, mask, spec)
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_leaves_no_trace(model, batch):
    model.train()
    model.model.layers[0].eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    flags = [m.training for m in model.modules()]
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    calibrate(model, *batch, RacSpec(0.5))
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(state[n], p) for n, p in model.state_dict().items())
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(m.quads.observer is None for _, m in quads_layers(model))
    model.zero_grad()


def test_errors(model, batch):
    ids, mask = batch
    with pytest.raises(ValueError, match="no token"):
        calibrate(model, ids, torch.zeros_like(mask), RacSpec(0.5))
    with pytest.raises(ValueError, match="no swapped layer"):
        calibrate(torch.nn.Linear(4, 4), ids, mask, RacSpec(0.5))
