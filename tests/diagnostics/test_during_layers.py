"""The decomposition by layer: e by hand, which tokens are recorded, both layouts, equal and other rungs, hooks gone."""

from __future__ import annotations

import json

import pytest
import torch
from other_moe import tiny_mixtral, tiny_olmoe
from tiny_moe import tiny_model

from quads.diagnostics import during, during_layers
from quads.diagnostics.during_layers import TOKENS, first_rows, rows, taken, token_rel_l2
from quads.files import read_jsonl
from quads.layers.blocks import blocks, recorded
from quads.layers.setup import Precision
from quads.layers.surgery import apply_surgery
from quads.trainer.rungs import at_precision

W4A16, W4A4 = Precision("nvfp4"), Precision("nvfp4", "nvfp4")
LENGTHS = torch.tensor([7, 4, 9])
IDS = [torch.randint(2, 43, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS.tolist()]
KEYS = [f"model.layers.{i}{part}" for i in (0, 1) for part in (".self_attn.out", ".mlp.out", "")]
PAIRS = ("total", "delta_weight", "delta_act")


def padded() -> dict[str, torch.Tensor]:
    """As verl pads without remove_padding."""
    ids = torch.nn.utils.rnn.pad_sequence(IDS, batch_first=True)
    mask = (torch.arange(ids.shape[1]) < LENGTHS[:, None]).long()
    positions = torch.nn.utils.rnn.pad_sequence([torch.arange(len(x)) for x in IDS], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def packed(pad: int = 0) -> dict[str, torch.Tensor]:
    """As verl packs: positions start again with every sequence; padding is one more sequence at the end."""
    parts = [*IDS, torch.zeros(pad, dtype=torch.int64)]
    return {"input_ids": torch.cat(parts)[None], "position_ids": torch.cat([torch.arange(len(x)) for x in parts])[None]}


def record(model, inputs, precision, forwards=1) -> dict[str, torch.Tensor]:
    """What a worker keeps of one rung."""
    with at_precision(model, precision), recorded(model, lambda x: first_rows(x, LENGTHS)) as kept, torch.no_grad():
        for i in range(forwards):
            model(**(inputs if i == 0 else {"input_ids": IDS[1][None]}), use_cache=False)
    return {key: x for key, (x,) in kept.items()}


def quantized(make=tiny_model):
    model = make()
    apply_surgery(model, W4A16)
    return model


def test_by_hand() -> None:
    a, b = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 4.0], [1.0, 0.0], [0.0, 0.0]])
    assert token_rel_l2(a, b).tolist() == [0.75, 0.0, 0.0]
    p, q, r = ({"x": torch.tensor([[v, 0.0], [2.0, 0.0]])} for v in (1.0, 2.0, 3.0))
    (row,) = rows([p, q, r])
    assert row == {
        "layer": "x", "tokens": 2, "total_mean": 1.0, "total_max": 2.0, "delta_weight_mean": 0.5,
        "delta_weight_max": 1.0, "delta_act_mean": 0.25, "delta_act_max": 0.5,
    }  # fmt: skip


def test_what_is_not_finite_is_null() -> None:
    zero, one = {"x": torch.zeros(1, 2)}, {"x": torch.ones(1, 2)}
    (row,) = rows([zero, one, {"x": torch.full((1, 2), torch.nan)}])
    assert row["delta_weight_max"] is None and row["total_mean"] is None
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize(
    ("lengths", "want"),
    [
        ([TOKENS + 88, 3], [TOKENS]),
        ([TOKENS, 1], [TOKENS]),
        ([200, 200, 112, 1], [200, 200, 112]),
        ([200, 200, 113, 1], [200, 200]),
        ([5], [5]),
    ],
)
def test_the_budget_is_kept(lengths, want) -> None:
    assert taken(lengths) == want and sum(want) <= TOKENS


def test_both_layouts_give_the_same_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    for lengths in ([300, 150, 80], [600, 20], [4], [700]):
        parts = [torch.randn(n, 3, generator=generator) for n in lengths]
        want = torch.cat(parts)[: sum(taken(lengths))]
        n = torch.tensor(lengths)
        assert torch.equal(first_rows(torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), n), want)
        assert torch.equal(first_rows(torch.cat(parts)[None], n), want)
        assert torch.equal(first_rows(torch.cat([*parts, torch.zeros(9, 3)])[None], n), want)
    assert first_rows(torch.randn(1, 2, 3), torch.tensor([3, 1])).shape == (2, 3)  # a shard holds fewer
    for wrong in (torch.randn(3, 9, 3), torch.randn(2, 8, 3), torch.randn(18, 3)):
        with pytest.raises(ValueError, match="neither 2 sequences of up to 9 tokens, padded, nor 11 packed tokens"):
            first_rows(wrong, torch.tensor([9, 2]))


@pytest.mark.parametrize("make", [tiny_model, tiny_olmoe, tiny_mixtral])
def test_a_model_padded_or_packed(make, monkeypatch) -> None:
    """The same rows for the same sequences, and those of each sequence alone; budget: 7 + 4 of 7 + 4 + 9 tokens."""
    monkeypatch.setattr(during_layers, "TOKENS", 12)
    model = quantized(make)
    found = [record(model, inputs, W4A16) for inputs in (padded(), packed(), packed(5))]
    with recorded(model) as kept, torch.no_grad():
        for ids in IDS[:2]:
            model(input_ids=ids[None], use_cache=False)
    assert [list(rung) for rung in found] == [KEYS] * 3
    for key in KEYS:
        want = torch.cat(kept[key])
        assert want.shape == (11, 64)
        for rung in found:
            torch.testing.assert_close(rung[key], want, atol=2e-5, rtol=1e-4)
    tables = []
    for inputs in (padded(), packed()):
        p, r = record(model, inputs, W4A16), record(model, inputs, Precision())
        tables.append(rows([p, p, r]))
    for one, other in zip(*tables, strict=True):
        assert one["layer"] == other["layer"] and one["tokens"] == other["tokens"] == 11
        assert one["delta_act_mean"] == pytest.approx(other["delta_act_mean"], rel=1e-3)


def test_equal_rungs_are_exactly_0_and_w4a4_is_not() -> None:
    model = quantized()
    p, q, r = (record(model, padded(), x) for x in (W4A16, W4A16, W4A4))
    found = rows([p, q, r])
    assert [row["layer"] for row in found] == KEYS and all(row["tokens"] == 20 for row in found)
    for row in found:
        assert row["delta_weight_mean"] == row["delta_weight_max"] == 0
        assert 0 < row["delta_act_mean"] < row["delta_act_max"] < 2
        assert row["total_mean"] == row["delta_act_mean"] and row["total_max"] == row["delta_act_max"]
    naive = rows([record(model, padded(), Precision()), q, r])
    assert all(row[f"{pair}_mean"] > 0 for row in naive for pair in PAIRS)


def test_only_the_first_forward_is_kept_and_in_its_own_dtype() -> None:
    model = quantized()
    once, twice = record(model, padded(), W4A16), record(model, padded(), W4A16, forwards=2)
    assert list(twice) == KEYS and all(torch.equal(once[key], twice[key]) for key in KEYS)
    assert {x.dtype for x in record(quantized().bfloat16(), padded(), W4A16).values()} == {torch.bfloat16}


def test_a_kept_tensor_holds_only_the_recorded_tokens(monkeypatch) -> None:
    monkeypatch.setattr(during_layers, "TOKENS", 3)
    for inputs in (padded(), packed()):
        kept = record(quantized(), inputs, W4A16)
        assert {x.untyped_storage().nbytes() for x in kept.values()} == {3 * 64 * 4}


def test_hooks_are_gone_after_an_error() -> None:
    model = quantized()
    with (
        pytest.raises(ValueError, match="neither 5 sequences"),
        recorded(model, lambda x: first_rows(x, torch.ones(5, dtype=torch.int64))),
    ):
        model(**padded(), use_cache=False)
    for _, module in blocks(model):
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_a_resumed_run_measures_later_steps_again(tmp_path) -> None:
    line = rows([{"x": torch.ones(1, 2)}] * 3)
    for step in (1, 20, 40):
        during.append_layers(tmp_path, step, line * 2)
        during.append(tmp_path, {"step": step})
    during.keep_until(tmp_path, 20)
    assert [r["step"] for r in read_jsonl(tmp_path / during.LAYERS_FILE)] == [1, 1, 20, 20]
    assert [r["step"] for r in read_jsonl(tmp_path / during.FILE)] == [1, 20]
    assert read_jsonl(tmp_path / during.LAYERS_FILE)[0] == {"step": 1} | line[0]
