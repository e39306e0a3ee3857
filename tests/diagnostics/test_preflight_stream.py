"""Streaming changes no number: layer by layer equals the whole model after surgery, in memory of one layer.

Chain of equalities: checkpoint reader = from_pretrained (bitwise); stream = ladder on the whole model (same shapes,
same arithmetic); padded chunks = single sequences, up to a code that float32 noise flips now and then; the
ladder = plain transformers (tests/diagnostics/test_ladder.py). The engine's stand-in is checked on its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from preflight_models import FAMILIES, save, some_ids
from tiny_moe import tiny_model
from tolerances import TOLERANCES
from torch.nn.functional import silu

from quads.config import Preflight
from quads.diagnostics.ladder import Tokens, load_model, score
from quads.diagnostics.preflight import stream as streaming
from quads.diagnostics.preflight.checkpoint import Checkpoint, make_skeleton
from quads.diagnostics.preflight.engine import as_engine
from quads.diagnostics.preflight.head import Scores, score_pairs
from quads.diagnostics.preflight.sequences import Sequences, chunks
from quads.diagnostics.preflight.variants import Stream, make_streams
from quads.layers.setup import Precision
from quads.layers.surgery import apply_surgery
from quads.numerics.qdq import emulated_linear, quantize_activation, quantize_weight
from quads.numerics.rac import RacSpec
from quads.trainer.calibration import calibrate

SPEC = RacSpec(0.5)
TRAINERS = {
    "bf16": Precision(),
    "fp8": Precision("fp8", "fp8"),
    "w4a16": Precision("nvfp4"),
    "w4a4": Precision("nvfp4", "nvfp4"),
    "rac": Precision("nvfp4", "nvfp4", rac=SPEC),
    "token": Precision("nvfp4", "nvfp4", rac=RacSpec(0.25, "channel", "token")),
}
STREAMS = [Stream(name, precision, False) for name, precision in TRAINERS.items()]


def opened(folder: Path) -> Checkpoint:
    skeleton = make_skeleton(folder)
    apply_surgery(skeleton, Precision("nvfp4", "nvfp4"))
    return Checkpoint(folder, skeleton)


def run(
    folder: Path, ids: list[list[int]], streams: list[Stream], calibration: list[list[int]], size: int = 64
) -> tuple[streaming.Pass, Scores]:
    sequences = Sequences(ids, [3] * len(ids), "response", 0)
    parts = list(chunks(sequences, size))
    checkpoint = opened(folder)
    done = streaming.run_layers(
        checkpoint, streams, parts, list(chunks(Sequences(calibration, [1] * len(calibration), "prompt", 0), size)),
        SPEC, "cpu",
    )  # fmt: skip
    return done, score_pairs(checkpoint, streams, done, parts, sequences, "cpu", 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_stream_equals_the_whole_model(family: str, tmp_path: Path) -> None:
    """Each trainer precision, RAC with masks calibrated on held-out sequences included; one chunk, as the ladder."""
    folder, ids = save(FAMILIES[family](), tmp_path, shards=True), some_ids(9, 0, low=11, high=11)
    calibration = torch.tensor(some_ids(6, 5, low=9, high=9))
    masks = calibrate(load_model(folder, TRAINERS["w4a16"]), calibration, torch.ones_like(calibration), SPEC)
    tokens = Tokens(torch.tensor(ids), torch.full((9,), 3), torch.full((9,), 11))
    _, scores = run(folder, ids, STREAMS, calibration.tolist(), size=4096)
    for name, precision in TRAINERS.items():
        want = score(load_model(folder, precision, masks=masks), tokens).logp
        got = scores.given[f"trainer:{name}"]
        assert torch.equal(scores.mask, tokens.mask)
        assert float((got - want).abs().max()) <= TOLERANCES["preflight/stream"].limit, name
        assert name == "bf16" or float((got - scores.given["trainer:bf16"]).abs().max()) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_reader_equals_from_pretrained(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = save(FAMILIES[family](), tmp_path, shards=True)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    checkpoint = opened(folder)
    for name, want in whole.named_parameters():
        got = checkpoint.parameter(name, "cpu")
        assert torch.equal(got, want.to(got.dtype)), name
        assert got.dtype == (torch.bfloat16 if name in checkpoint._weights else torch.float32)
    assert len(checkpoint._weights) == (6 if "moe" in family or family in ("mixtral", "olmoe") else 7) * len(
        whole.model.layers
    )


def test_one_layer_at_a_time(tmp_path: Path) -> None:
    """Eight layers: whenever any module of the decoder computes, parameters of at most one layer have values."""
    folder = save(tiny_model(num_hidden_layers=8), tmp_path)
    checkpoint = opened(folder)
    layers, seen, most = checkpoint.skeleton.model.layers, set(), 0

    def count(module: torch.nn.Module, *_: object) -> None:
        nonlocal most
        alive = [i for i, layer in enumerate(layers) if any(not p.is_meta for p in layer.parameters())]
        seen.update(alive)
        elsewhere = [n for n, p in checkpoint.skeleton.named_parameters() if ".layers." not in n and not p.is_meta]
        most = max(most, len(alive) + bool(elsewhere))

    for layer in layers:
        for module in layer.modules():
            module.register_forward_pre_hook(count)
    sequences = Sequences(some_ids(4, 0), [3] * 4, "response", 0)
    parts = list(chunks(sequences, 64))
    streaming.run_layers(checkpoint, make_streams(Preflight(gap=0)), parts, parts[:1], SPEC, "cpu")
    assert seen == set(range(8)) and most == 1
    assert all(p.is_meta for p in checkpoint.skeleton.parameters())


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "mistral"])
def test_padding_changes_nothing(family: str, tmp_path: Path) -> None:
    """One sequence per forward against all in one, padded: log-probs, masks (through RAC) and rows per layer."""
    folder, ids, calibration = save(FAMILIES[family](), tmp_path), some_ids(12, 2), some_ids(5, 3)
    (one, a), (many, b) = (run(folder, ids, STREAMS, calibration, size) for size in (1, 4096))
    for key in a.given:
        difference = (a.given[key] - b.given[key]).abs()[a.mask]
        moved = float((difference > TOLERANCES["preflight/stream"].limit).double().mean())
        assert moved <= TOLERANCES["preflight/padding_share_moved"].limit, key
        assert key not in ("trainer:bf16", "trainer:w4a16") or moved == 0
    assert [r["layer"] for r in one.layers] == [r["layer"] for r in many.layers]
    for x, y in zip(one.layers, many.layers, strict=True):
        for column in ("activation_qsnr_db_nvfp4", "weight_qsnr_db_nvfp4", "rac_energy_share_static"):
            assert y[column] == pytest.approx(x[column], rel=1e-3)


def test_engine_linear_and_experts_against_the_definition() -> None:
    """The stand-in's products against numerics' emulated GEMM, one expert and one token at a time."""
    model = tiny_model()
    apply_surgery(model, Precision("nvfp4", "nvfp4"))
    layer = model.model.layers[0]
    linear, experts = layer.self_attn.o_proj, layer.mlp.experts
    for module in (linear, experts):
        names = ("weight",) if module is linear else ("gate_up_proj", "down_proj")
        streaming._hide(module, {n: module.quads.dequantized(getattr(module, n), None, n) for n in names})
    x = torch.randn(5, linear.in_features, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    with torch.no_grad(), as_engine(layer):
        got = linear(x)
        want = emulated_linear(quantize_activation(x, "nvfp4"), quantize_weight(linear.weight, "nvfp4"), torch.bfloat16)
        assert float((got - want).abs().max()) <= 2**-7 * float(want.abs().max()) and got.dtype == torch.bfloat16
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        index, weight = torch.tensor([[0, 3], [3, 7], [1, 2], [0, 1], [7, 0]]), torch.rand(5, 2)
        y = experts(x, index, weight)
    w13, w2 = (quantize_weight(w, "nvfp4") for w in (experts.gate_up_proj, experts.down_proj))
    for t in range(5):
        total = torch.zeros(64)
        for s in range(2):
            e = int(index[t, s])
            first = type(w13)(w13.qs[e], w13.rcp[e])
            second = type(w2)(w2.qs[e], w2.rcp[e])
            gate, up = emulated_linear(quantize_activation(x[t : t + 1], "nvfp4"), first, torch.bfloat16).chunk(2, -1)
            out = emulated_linear(quantize_activation(silu(gate) * up, "nvfp4"), second, torch.bfloat16)
            total += weight[t, s] * out[0].float()
        assert float((y[t].float() - total).abs().max()) <= 0.02 * float(total.abs().max())


def test_engine_at_bf16_errs_as_transformers_in_bf16(tmp_path: Path) -> None:
    """Without quantizers the stand-in is a bf16 model: its distance to float32 is that of transformers in bf16."""
    from transformers import AutoModelForCausalLM

    folder, ids = save(tiny_model(), tmp_path), some_ids(12, 4)
    _, scores = run(folder, ids, [*STREAMS[:1], STREAMS[2], Stream("bf16", Precision(), True)], some_ids(2, 0))
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    theirs = torch.zeros(scores.mask.shape)
    with torch.no_grad():
        for b, sequence in enumerate(ids):
            log_prob = plain(torch.tensor([sequence])).logits[0].float().log_softmax(-1)
            for t in range(3, len(sequence)):
                theirs[b, t - 3] = log_prob[t - 1, sequence[t]]
    exact, mask = scores.given["trainer:bf16"], scores.mask
    ours = float((scores.given["rollout:bf16"] - exact)[mask].abs().mean())
    reference = float((theirs - exact)[mask].abs().mean())
    assert 0.3 * reference < ours < 1.5 * reference and ours > 1e-4


def test_drift_and_rows_describe_the_pass(tmp_path: Path) -> None:
    folder = save(tiny_model(), tmp_path)
    done, _ = run(folder, some_ids(6, 0), make_streams(Preflight(gap=0)), some_ids(4, 1))
    assert [r["layer"].rpartition("layers.")[2] for r in done.layers[:4]] == [
        "0.self_attn.qkv_proj", "0.self_attn.o_proj", "0.mlp.experts.w13", "0.mlp.experts.w2",
    ]  # fmt: skip
    assert all(len(values) == 2 for values in done.drift.values())
    w4a4, rac, bf16 = (done.drift[f"rollout:{n}"][-1] for n in ("w4a4", "w4a4+rac-k0.5-block16-static", "bf16"))
    assert bf16 < rac < w4a4
    assert done.selected["rollout:w4a4+rac-k0.5-block16-static"][0] == (32, 64)
