"""Block recordings against the model's own arithmetic, and the Fig. 7 study on a stand-in engine with known answers."""

from __future__ import annotations

import pytest
import torch
from fake_engine import FakeEngine
from other_moe import tiny_mixtral, tiny_olmoe
from tiny_moe import tiny_model

from quads.config import Diagnostics, Experiment, load_arm
from quads.diagnostics import capture
from quads.diagnostics.context import Context
from quads.diagnostics.layerwise import LOG_PROBS, capture_hidden, fig7, trainer_blocks
from quads.diagnostics.prompts import Prompt, calibration_ids
from quads.layers.blocks import blocks, fed, recorded
from quads.layers.names import trainer_module

IDS = torch.randint(2, 43, (1, 9), generator=torch.Generator().manual_seed(5))
NAMES = [f"model.layers.{i}{part}" for i in (0, 1) for part in (".self_attn", ".mlp", "")]


@pytest.mark.parametrize("make", [tiny_model, tiny_olmoe, tiny_mixtral])
def test_stream_is_the_sum_of_the_blocks(make) -> None:
    model = make(1)
    with recorded(model) as kept, torch.no_grad():
        hidden = model(input_ids=IDS, use_cache=False, output_hidden_states=True).hidden_states
    assert [name for name, _ in blocks(model)] == NAMES
    stream = hidden[0][0]
    for layer in (0, 1):
        name = f"model.layers.{layer}"
        stream = stream + kept[f"{name}.self_attn.out"][0] + kept[f"{name}.mlp.out"][0]
        torch.testing.assert_close(kept[name][0], stream, atol=1e-6, rtol=1e-5)
    # transformers' own list: the entry after layer 0 is the stream between the layers
    torch.testing.assert_close(kept["model.layers.0"][0], hidden[1][0], atol=0, rtol=0)


def test_fed_replaces_every_input() -> None:
    model, generator = tiny_model(1), torch.Generator().manual_seed(0)
    given = {f"{n}.in": torch.randn(9, 64, generator=generator) for n in NAMES if n[-1] not in "01"}
    with recorded(model) as own, torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    with recorded(model) as kept, fed(model, own_first(own) | given), torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    block = dict(blocks(model))["model.layers.1.mlp"]
    with torch.no_grad():
        want = block(given["model.layers.1.mlp.in"][None])[0]
    torch.testing.assert_close(kept["model.layers.1.mlp.out"][0], want)
    # with its own inputs nothing changes
    with recorded(model) as same, fed(model, own_first(own)), torch.no_grad():
        model(input_ids=IDS, use_cache=False)
    assert all(torch.equal(same[f"{n}.out"][0], own[f"{n}.out"][0]) for n in NAMES if f"{n}.out" in own)


def own_first(kept: dict[str, list[torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: parts[0] for key, parts in kept.items() if key.endswith(".in")}


def test_a_model_without_decoder_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="has no decoder layer"):
        list(blocks(torch.nn.Linear(2, 2)))


def test_engine_names_become_the_trainers() -> None:
    assert trainer_module("model.layers.3.block_sparse_moe.experts") == "model.layers.3.mlp.experts"
    assert trainer_module("model.layers.3.self_attn.qkv_proj") == "model.layers.3.self_attn.qkv_proj"


class Counting:
    """Hidden state of token t is (its id, t)."""

    def hidden(self, sequence):
        return {"x": torch.tensor([[float(token), float(t)] for t, token in enumerate(sequence)])}


def test_budget_per_seed_cuts_the_last_sequence() -> None:
    sequences = [[5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]]
    found = capture_hidden(Counting(), sequences, [2, 2, 2], range(3), [0, 0, 1], tokens_per_seed=6)
    assert found["sequence"].tolist() == [0] * 4 + [1] * 2 + [2] * 4
    assert found["position"].tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3]
    assert found["x"][:, 0].tolist() == [5, 6, 7, 8, 9, 10, 13, 14, 15, 16]
    # one token left: nothing of the second sequence would predict a response token
    found = capture_hidden(Counting(), sequences, [2, 2, 2], range(3), [0, 0, 1], tokens_per_seed=5)
    assert found["sequence"].tolist() == [0] * 4 + [2] * 4


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    root = tmp_path_factory.mktemp("fig7")
    tiny_model(1).save_pretrained(root / "model")
    settings = Diagnostics(prompts=4, samples_per_prompt=2, seeds=(0, 1), single_sequences=2, k=(0.0, 0.5),
                           float32_engine=False)  # fmt: skip
    experiment = Experiment(name="tiny", title="t", arms=("bf16", "quads"), diagnostics=settings)
    arms = [load_arm(name) for name in ("bf16", "qat_only", "quads")]
    modes = {arm.name: capture.arm_engine(arm) for arm in arms}
    generator = torch.Generator().manual_seed(0)
    prompts = [Prompt(tuple(torch.randint(2, 43, (5,), generator=generator).tolist())) for _ in range(8)]
    capture.capture_all(
        {mode.id: mode for mode in modes.values()}, prompts, calibration_ids(None, prompts), root / "model", experiment,
        root / "captures", start=FakeEngine, versions={"fake": "1"},
    )  # fmt: skip
    context = Context(experiment, arms, root / "model", root / "captures")
    return context, modes, fig7(context)


def test_columns_and_every_pair(study) -> None:
    rows = study[2].rows
    assert list(rows[0]) == ["layer", "trainer", "rollout", "metric", "mean", "sd", "seeds"]
    assert {r["rollout"] for r in rows} == {"bf16", "w4a4", "w4a4+rac"} and all(r["seeds"] == 2 for r in rows)
    assert {r["trainer"] for r in rows} == {"bf16", "w4a16", "w4a4", "w4a4+rac"}
    assert {r["layer"] for r in rows} == {*NAMES, LOG_PROBS}


def test_against_brute_force_and_what_the_stand_in_is(study) -> None:
    """The stand-in emulates W4A4 in the trainer's own code: a symmetric trainer differs by bf16 storage alone."""
    context, modes, found = study
    value = {(r["layer"], r["trainer"], r["rollout"], r["metric"]): r["mean"] for r in found.rows}
    mode = modes["qat_only"]
    hidden, dump = context.hidden(mode.id), context.dump(mode.id)
    own = trainer_blocks(context.model_at(mode.trainer_weights), dump.tokens.ids, hidden, same_input=False)
    means = []
    for seed in (0, 1):
        ratios = []
        for row, (b, t) in enumerate(zip(hidden["sequence"].tolist(), hidden["position"].tolist(), strict=True)):
            start, length = int(dump.tokens.start[b]), int(dump.tokens.length[b])
            if int(dump.values["seed"][b]) == seed and start - 1 <= t < length - 1:
                a, c = own["model.layers.1"][row].double(), hidden["model.layers.1"][row].double()
                ratios.append(float((a - c).norm() / c.norm()))
        means.append(sum(ratios) / len(ratios))
    assert value["model.layers.1", "w4a16", "w4a4", "mean_token_rel_l2"] == pytest.approx(sum(means) / 2, rel=1e-9)
    for layer in ("model.layers.0.self_attn", "model.layers.0.mlp"):
        same = "mean_same_input_token_rel_l2"
        assert value[layer, "w4a4", "w4a4", same] < 0.2 * value[layer, "w4a16", "w4a4", same]
    assert value["model.layers.0", "bf16", "bf16", "mean_token_rel_l2"] < 0.01
