"""The toy is transformers' Qwen3-MoE with the configured sizes, reproducible, and stored under classic names."""

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

from quads.config import Model
from quads.toy.model import make_model


def test_default_sizes():
    made = make_model(Model(), seed=0)
    assert type(made) is Qwen3MoeForCausalLM
    # per layer: q 64*128, k and v 64*64, o 128*64, q/k norm 2*32, two norms 2*64, router 8*64, experts 8*(3*32*64)
    layer = 64 * 128 + 2 * 64 * 64 + 128 * 64 + 64 + 128 + 8 * 64 + 8 * 3 * 32 * 64
    assert sum(p.numel() for p in made.parameters()) == 2 * layer + 2 * 43 * 64 + 64 == 154_432
    assert {p.dtype for p in made.parameters()} == {torch.float32}
    assert made.lm_head.weight.data_ptr() != made.model.embed_tokens.weight.data_ptr()
    assert made.config.norm_topk_prob and made.config.vocab_size == 43 and made.config.head_dim == 32


def test_same_seed_same_bits_whatever_the_global_generator_says():
    first = make_model(Model(), seed=3).state_dict()
    torch.rand(7)
    second, other = make_model(Model(), seed=3).state_dict(), make_model(Model(), seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("model.embed_tokens.weight", 0.5),
        ("lm_head.weight", 64**-0.5),
        ("model.layers.1.self_attn.q_proj.weight", 64**-0.5),
        ("model.layers.1.self_attn.o_proj.weight", (128 * 4) ** -0.5),
        ("model.layers.0.mlp.experts.gate_up_proj", 64**-0.5),
        ("model.layers.0.mlp.experts.down_proj", 2 * (32 * 4) ** -0.5),
    ],
)
def test_initial_spread(name, std):
    weight = make_model(Model(), seed=0).state_dict()[name]
    # relative standard error of a standard deviation from n draws is (2n)^-0.5, 1.4 % for the smallest matrix here
    assert abs(weight.std().item() / std - 1) < 4 * (2 * weight.numel()) ** -0.5
    assert abs(weight.mean().item()) < 4 * std * weight.numel() ** -0.5


def test_gains_start_at_one():
    state = make_model(Model(), seed=0).state_dict()
    gains = [name for name, weight in state.items() if weight.dim() == 1]
    assert len(gains) == 2 * 4 + 1
    assert all((state[name] == 1).all() for name in gains)


def test_checkpoint_has_one_tensor_per_expert_and_reloads_bit_for_bit(tmp_path):
    made = make_model(Model(), seed=0)
    made.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
        first = file.get_tensor("model.layers.0.mlp.experts.5.up_proj.weight")
    # per layer 8 experts x 3, q/k/v/o, q/k norm, router, two norms; embedding, final norm, head
    assert len(names) == 2 * (24 + 4 + 2 + 1 + 2) + 3 == 69
    assert torch.equal(first, made.model.layers[0].mlp.experts.gate_up_proj[5, 32:])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    state = loaded.state_dict()
    assert all(torch.equal(weight, state[name]) for name, weight in made.state_dict().items())
    assert loaded.generation_config.eos_token_id == 41
