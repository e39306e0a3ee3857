"""Skip entries match whole name components; fused names map both ways."""

import pytest

from quads.layers.names import engine_name, group_members, skip_reason, trainer_names


@pytest.mark.parametrize(
    ("name", "skip", "skipped"),
    [
        ("lm_head", ("lm_head",), True),
        ("model.layers.0.mlp.gate", (), True),  # router, without being listed
        ("model.layers.0.mlp.shared_expert_gate", (), True),
        ("model.layers.0.mlp.gate_up_proj", ("mlp.gate",), False),  # the trap of substring matching
        ("model.layers.0.mlp.gate_proj", ("mlp.gate",), False),
        ("model.layers.0.self_attn.o_proj", ("self_attn",), True),
        ("model.layers.10.self_attn.o_proj", ("layers.1",), False),
        ("model.layers.1.self_attn.o_proj", ("layers.1",), True),
    ],
)
def test_skip_matches_whole_components(name, skip, skipped):
    assert (skip_reason(name, skip) is not None) == skipped


def test_names_of_fused_modules():
    assert engine_name("model.layers.3.self_attn.k_proj") == "model.layers.3.self_attn.qkv_proj"
    assert engine_name("model.layers.3.self_attn.o_proj") == "model.layers.3.self_attn.o_proj"
    assert trainer_names("a.mlp.gate_up_proj") == ("a.mlp.gate_proj", "a.mlp.up_proj")
    assert group_members("a.q_proj") == ("q_proj", "k_proj", "v_proj")
    assert group_members("a.o_proj") == ()
