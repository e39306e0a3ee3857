"""Injection keeps the function and raises the crest factor of what the quantizer sees."""

import copy

import numpy as np
import pytest
import torch
from tolerances import TOLERANCES

from quads.config import Model, Outliers
from quads.data import chain
from quads.toy.model import make_model
from quads.toy.outliers import crest_factor, inject

LAYER = "model.layers.{}."
QUANTIZED_INPUTS = ("self_attn.qkv", "self_attn.o_proj", "mlp.experts.gate_up", "mlp.experts.down")


@pytest.fixture(scope="module")
def model():
    return make_model(Model(), seed=0).eval()


@pytest.fixture(scope="module")
def ids():
    problems = chain.draw(64, 6, "+-*", np.random.default_rng(0))
    return torch.from_numpy(
        np.concatenate([chain.prompt_ids(problems), chain.answer_ids(chain.answer_digits(problems))], 1)
    )


def injected(model, **options):
    changed = copy.deepcopy(model)
    return changed, inject(changed, Outliers(**options))


@torch.no_grad()
def quantized_inputs(model, ids):
    """What each quantized matrix reads, name -> [T,K]; down_proj's input over all experts, recomputed by hand."""
    seen = {}

    def keep(name):
        def hook(_, args):
            seen[name] = args[0].flatten(0, -2)

        return hook

    handles = []
    for index, layer in enumerate(model.model.layers):
        name = LAYER.format(index)
        handles.append(layer.self_attn.q_proj.register_forward_pre_hook(keep(name + "self_attn.qkv")))
        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(keep(name + "self_attn.o_proj")))
        handles.append(layer.mlp.experts.register_forward_pre_hook(keep(name + "mlp.experts.gate_up")))
    model(ids)
    for handle in handles:
        handle.remove()
    for index, layer in enumerate(model.model.layers):
        name = LAYER.format(index)
        gate, up = torch.einsum(
            "tk,enk->ten", seen[name + "mlp.experts.gate_up"], layer.mlp.experts.gate_up_proj
        ).chunk(2, -1)
        seen[name + "mlp.experts.down"] = (torch.nn.functional.silu(gate) * up).flatten(0, 1)
    return seen


@torch.no_grad()
def logit_difference(a, b, ids):
    return (a(ids).logits - b(ids).logits).abs().max().item()


@pytest.mark.parametrize("strength", [2.0, 8.0, 12.0])
def test_function_is_preserved(model, ids, strength):
    changed, chosen = injected(model, strength=strength)
    assert len(chosen) == 2 * 4
    difference = logit_difference(model, changed, ids)
    assert difference <= TOLERANCES["outlier_injection_logits"].limit
    if strength in (2.0, 8.0):
        assert difference == 0.0  # powers of two scale without rounding


def test_the_comparison_can_fail(model, ids):
    changed, chosen = injected(model, strength=12.0)
    (channel, _) = chosen["model.layers.1.post_attention_layernorm"]
    with torch.no_grad():
        changed.model.layers[1].mlp.gate.weight[:, channel] *= 12.0  # as if the router had been forgotten
    assert logit_difference(model, changed, ids) > 100 * TOLERANCES["outlier_injection_logits"].limit


def test_strength_one_changes_no_bit(model):
    changed, chosen = injected(model, strength=1.0)
    assert chosen == {}
    state = model.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in changed.state_dict().items())


def test_crest_factor_rises_in_every_quantized_input(model, ids):
    changed, _ = injected(model, strength=12.0)
    before, after = quantized_inputs(model, ids), quantized_inputs(changed, ids)
    assert len(before) == 2 * len(QUANTIZED_INPUTS)
    for name in before:
        assert crest_factor(after[name]) > 1.3 * crest_factor(before[name]), name


def test_crest_factor_by_hand():
    assert crest_factor(torch.tensor([[3.0, -3.0, 3.0]])) == 1.0
    assert crest_factor(torch.tensor([[0.0, 0.0, 0.0, 2.0]])) == 2.0


def test_value_channel_is_divided_out_of_every_head_of_its_group(model):
    changed, chosen = injected(model, strength=12.0)
    for index in range(2):
        (value,) = chosen[LAYER.format(index) + "self_attn.v_proj"]
        kv_head, offset = divmod(value, 32)
        old = model.model.layers[index].self_attn.o_proj.weight
        new = changed.model.layers[index].self_attn.o_proj.weight
        columns = (old != new).any(0).nonzero().flatten().tolist()
        assert columns == [head * 32 + offset for head in (2 * kv_head, 2 * kv_head + 1)]


def test_gate_rows_of_the_chosen_expert_channel_stay(model):
    changed, chosen = injected(model, strength=12.0)
    (inner,) = chosen["model.layers.0.mlp.experts.down_proj"]
    norm_channels = chosen["model.layers.0.post_attention_layernorm"]
    old = model.model.layers[0].mlp.experts.gate_up_proj
    ratio = changed.model.layers[0].mlp.experts.gate_up_proj / old
    others = [c for c in range(64) if c not in norm_channels]
    # all rows but the up row keep their value outside the norm's channels
    assert torch.equal(ratio[:, :32][..., others], torch.ones(8, 32, len(others)))
    assert torch.allclose(ratio[:, 32 + inner][..., others], torch.tensor(12.0))


def test_number_and_seed_choose_the_channels(model):
    _, four = injected(model, channels_per_norm=4)
    _, again = injected(model, channels_per_norm=4)
    _, other = injected(model, channels_per_norm=4, seed=7)
    assert four == again != other
    assert len(set(four["model.layers.0.input_layernorm"])) == 4


def test_more_channels_than_there_are_is_an_error(model):
    with pytest.raises(ValueError, match="channels_per_norm=65 exceeds the 64 channels"):
        injected(model, channels_per_norm=65)
