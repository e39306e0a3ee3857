"""The trainer ladder on three MoE families: log-probs against plain transformers, routing replay, decomposition."""

from __future__ import annotations

import copy

import pytest
import torch
from other_moe import tiny_mixtral, tiny_olmoe
from tiny_moe import tiny_model
from tolerances import TOLERANCES

from quads.diagnostics.decompose import Rungs, decompose
from quads.diagnostics.ladder import Tokens, prepare_model, routing_difference, score
from quads.layers.setup import Precision
from quads.layers.surgery import quantized_weights
from quads.numerics.rac import RacSpec
from quads.trainer.calibration import calibrate

FAMILIES = {"qwen3": tiny_model, "olmoe": tiny_olmoe, "mixtral": tiny_mixtral}


def some_tokens(sequences: int = 6) -> Tokens:
    """Prompts of 4 or 5 tokens, responses of 3 to 6; ids right of the length are garbage on purpose."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 43, (sequences, 11), generator=generator)
    start = torch.tensor([4, 5] * (sequences // 2))
    length = start + torch.randint(3, 7, (sequences,), generator=generator)
    return Tokens(ids, start, length)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_plain_transformers(family: str) -> None:
    """A model whose weights are bf16 values: surgery at bf16 changes nothing, one sequence at a time is the truth."""
    model = FAMILIES[family]()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).float()
    tokens = some_tokens()
    want = torch.zeros(tokens.mask.shape)
    with torch.no_grad():
        for b in range(len(tokens.ids)):
            start, length = int(tokens.start[b]), int(tokens.length[b])
            log_prob = model(tokens.ids[b : b + 1, :length]).logits[0].log_softmax(-1)
            for t in range(start, length):
                want[b, t - start] = log_prob[t - 1, tokens.ids[b, t]]
    got = score(prepare_model(model, Precision()), tokens)
    assert float((got.logp - want).abs().max()) <= TOLERANCES["diagnostics/ladder_logprob"].limit
    assert bool((got.entropy[tokens.mask] > 0).all()) and bool((got.logp[~tokens.mask] == 0).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_its_own_routing_changes_nothing(family: str) -> None:
    model, tokens = prepare_model(FAMILIES[family](), Precision("nvfp4", "nvfp4")), some_tokens()
    free = score(model, tokens, routing=True)
    assert free.routed is not None and routing_difference(free.routed, free.routed)["tokens_routing_known"] == float(
        tokens.length.sum()
    )
    replayed = score(model, tokens, replay=free.routed)
    assert float((replayed.logp - free.logp).abs().max()) <= TOLERANCES["diagnostics/replay"].limit
    other = free.routed.clone()
    other[other >= 0] = (other[other >= 0] + 1) % 4
    assert routing_difference(free.routed, other)["share_token_any_layer_differs"] > 0.5
    assert float((score(model, tokens, replay=other).logp - free.logp).abs().max()) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_ladder_telescopes_and_qat_has_no_weight_term(family: str) -> None:
    base, tokens = FAMILIES[family](), some_tokens()
    ids = torch.randint(2, 43, (8, 9), generator=torch.Generator().manual_seed(2))
    spec = RacSpec(0.5)
    t1_model = prepare_model(copy.deepcopy(base), Precision("nvfp4"))
    masks = calibrate(t1_model, ids, torch.ones_like(ids), spec)
    t0 = score(prepare_model(copy.deepcopy(base), Precision()), tokens).logp
    t1 = score(t1_model, tokens).logp
    t1_again = score(prepare_model(copy.deepcopy(base), Precision("nvfp4")), tokens).logp
    rac = Precision("nvfp4", "nvfp4", rac=spec)
    t2 = score(prepare_model(copy.deepcopy(base), rac, masks=masks), tokens).logp
    engine = score(prepare_model(copy.deepcopy(base), rac, masks=masks, stored=True), tokens).logp
    naive = decompose(Rungs(t0, t1, t2, engine), tokens.mask)
    assert float(naive.terms["delta_weight"].abs().max()) > 1e-3
    qat = decompose(Rungs(t1, t1_again, t2, engine), tokens.mask)
    assert bool((qat.terms["delta_weight"] == 0).all())
    assert float(qat.terms["delta_act"].abs().max()) > 1e-3 and float(qat.terms["delta_num"].abs().max()) > 0
    assert bool((qat.total + qat.terms["delta_weight"] - naive.total + naive.terms["delta_weight"]).abs().max() < 1e-12)


@pytest.mark.parametrize("family", ["olmoe", "mixtral"])
def test_surgery_quantizes_every_expert_of_another_family(family: str) -> None:
    """q, k, v, o and both expert tensors of both layers; dequantized weights are on the NVFP4 grid, not the input."""
    model = FAMILIES[family]()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = dict(quantized_weights(prepare_model(model, Precision("nvfp4"))))
    assert len(weights) == 2 * 6
    for name, w in weights.items():
        relative = float((w - before[name]).norm() / before[name].norm())
        assert 0.05 < relative < 0.15, (name, relative)
        blocks = w.unflatten(-1, (-1, 16))
        assert max(len(block.abs().unique()) for block in blocks.flatten(0, -2)[:64]) <= 8


def test_stored_rounds_only_what_surgery_leaves_alone() -> None:
    plain = prepare_model(tiny_model(3), Precision("nvfp4"))
    stored = prepare_model(tiny_model(3), Precision("nvfp4"), stored=True)
    for (name, a), b in zip(plain.named_parameters(), stored.parameters(), strict=True):
        quantized = "proj" in name
        assert torch.equal(b, a if quantized else a.to(torch.bfloat16).float()), name
        assert quantized or name.endswith("norm.weight") or not torch.equal(a, b), name


def test_equal_lengths_share_a_forward_and_nothing_else() -> None:
    tokens = some_tokens()
    batches = list(tokens.batches(20))
    assert sorted(torch.cat(batches).tolist()) == list(range(6))
    assert all(len(tokens.length[index].unique()) == 1 for index in batches)
    assert all(len(index) * int(tokens.length[index[0]]) <= 20 or len(index) == 1 for index in batches)


def test_a_dense_model_has_no_routing_to_record() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=43, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    with pytest.raises(ValueError, match="no module whose class ends in TopKRouter"):
        score(LlamaForCausalLM(config).eval(), some_tokens(), routing=True)
