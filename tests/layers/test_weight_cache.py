"""The weight cache: one quantization per optimizer step, and never a value that a model without it would not have."""

import copy

import pytest
import torch
from tiny_moe import tiny_model

from quads.layers import execution
from quads.layers.execution import Execution
from quads.layers.setup import Precision
from quads.layers.surgery import apply_surgery, invalidate_weight_cache, quads_layers, weight_cache

IDS = torch.randint(0, 43, (4, 8), generator=torch.Generator().manual_seed(0))
KEPT = 2 * (4 + 2 + 1)  # two layers: q, k, v, o, two expert tensors, one shared amax


@pytest.fixture
def quantized(monkeypatch):
    """Calls of the quantizer so far."""
    calls = []
    original = execution.qdq.fake_quantize_weight
    monkeypatch.setattr(execution.qdq, "fake_quantize_weight", lambda w, *a: calls.append(1) or original(w, *a))
    return calls


def pair(cache: str = "on", **precision):
    """(with a cache, without), equal weights."""
    models = []
    for choice in (cache, "off"):
        model = tiny_model()
        apply_surgery(model, Precision(weight="nvfp4", **precision), Execution(cache=choice))
        models.append(model)
    return models


def loss_of(model, ids=IDS):
    return torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def assert_equal(cached, plain):
    """Equal losses and gradients, to the bit."""
    losses = []
    for model in (cached, plain):
        model.zero_grad()
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    for (name, a), b in zip(cached.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_one_quantization_per_optimizer_step(quantized, micro_batches):
    model, _ = pair()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, 4):
        with torch.no_grad():
            model(IDS)  # log-probs before the update use the same weights
        for _ in range(micro_batches):
            loss_of(model).backward()
        assert len(quantized) == step * 12 and weight_cache(model).counts["computed"] == step * KEPT
        optimizer.step()
        assert weight_cache(model).nbytes == 0, "a step gives the memory back"


def test_without_a_cache_every_forward_quantizes(quantized):
    _, model = pair()
    for _ in range(3):
        model(IDS)
    assert len(quantized) == 3 * 12 and weight_cache(model) is None


@pytest.mark.parametrize("scale_group", ["fused", "shard"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "foreach", "by hand"])
def test_training_is_equal(optimizer, scale_group):
    """`by hand` is no torch optimizer: only the version counters tell."""
    models = pair(scale_group=scale_group)
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
        "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
        "by hand": lambda p: None,
    }
    steppers = [makers[optimizer](model.parameters()) for model in models]
    for _ in range(3):
        assert_equal(*models)
        for model, stepper in zip(models, steppers, strict=True):
            if stepper is not None:
                stepper.step()
                continue
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
    assert weight_cache(models[0]).counts["computed"] == 3 * KEPT - (2 if scale_group == "shard" else 0) * 3


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(assign):
    models = pair()
    assert_equal(*models)
    other = tiny_model(seed=5).state_dict()
    for model in models:
        model.load_state_dict({k: v.clone() for k, v in other.items()}, assign=assign)
    assert_equal(*models)
    assert weight_cache(models[0]).counts["computed"] == 2 * KEPT


def test_edits_in_place_and_replaced_storage():
    models = pair()
    assert_equal(*models)
    for edit in (
        lambda p: p.mul_(1.5),
        lambda p: setattr(p, "data", p.data * 0.5),
        lambda p: p[0].copy_(p[-1]),
    ):
        for model in models:
            with torch.no_grad():
                edit(model.model.layers[0].self_attn.q_proj.weight)
                edit(model.model.layers[1].mlp.experts.down_proj)
        assert_equal(*models)
    kept = weight_cache(models[0]).counts["computed"]
    # Each edit touches q, hence its amax, q, k and v, and one expert tensor.
    assert kept == KEPT + 3 * 5


def test_replaced_parameter():
    models = pair()
    assert_equal(*models)
    for model in models:
        o_proj = model.model.layers[0].self_attn.o_proj
        o_proj.weight = torch.nn.Parameter(o_proj.weight.detach() * 2)
    assert_equal(*models)


def test_hidden_edit_needs_invalidate_and_verify_finds_it():
    cached, plain = pair(cache="verify")
    assert_equal(cached, plain)
    for model in (cached, plain):
        model.model.layers[1].self_attn.o_proj.weight.data.mul_(3.0)
    with pytest.raises(RuntimeError, match=r"layers\.1\.self_attn\.o_proj\.weight.*invalidate_weight_cache"):
        cached(IDS)
    invalidate_weight_cache(cached)
    assert_equal(cached, plain)
    assert weight_cache(cached).counts["verified"] > 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(quantized, reentrant):
    cached, plain = pair()
    for model in (cached, plain):
        model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    assert_equal(cached, plain)
    assert len(quantized) == 12 + 2 * 12, "the recomputation of the model without a cache quantizes again"


def test_values_of_an_inference_forward_can_be_trained_on():
    cached, plain = pair()
    with torch.inference_mode():
        cached(IDS)
    before = weight_cache(cached).counts["computed"]
    assert_equal(cached, plain)
    assert weight_cache(cached).counts["computed"] == before


def test_another_precision_is_another_value():
    """Studies exchange a layer's precision without touching the weights."""
    cached, plain = pair()
    for precision in (
        Precision(weight="bf16"),
        Precision(weight="nvfp4"),
        Precision(weight="nvfp4", scale_group="shard"),
    ):
        for model in (cached, plain):
            for _, module in quads_layers(model):
                module.quads.precision = precision
        assert_equal(cached, plain)


def test_a_copy_has_a_cache_of_its_own():
    model, _ = pair()
    model(IDS)
    twin = copy.deepcopy(model)
    assert weight_cache(twin) is not weight_cache(model) and weight_cache(twin).nbytes == 0
    assert len({id(m.quads.cache) for _, m in quads_layers(twin)}) == 1
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    want = twin(IDS).logits
    invalidate_weight_cache(twin)
    assert torch.equal(twin(IDS).logits, want) and not torch.equal(model(IDS).logits, want)


def test_memory_is_one_copy_of_the_quantized_weights():
    model, _ = pair()
    model(IDS)
    amax = 2 * 4
    want = sum(p.nbytes for _, m in quads_layers(model) for p in m.parameters(recurse=False))
    assert weight_cache(model).nbytes == want + amax


def test_report_and_unknown_choices():
    model = tiny_model()
    report = apply_surgery(model, Precision(weight="nvfp4"), Execution(cache="verify"))
    assert report.to_dict()["execution"] == {"backend": "reference", "experts": "loop", "cache": "verify"}
    for wrong in ({"backend": "cuda"}, {"experts": "batched"}, {"cache": "yes"}):
        with pytest.raises(ValueError, match="is unknown; known"):
            Execution(**wrong)


def test_unavailable_backend_stops_before_anything_is_changed(monkeypatch):
    pytest.importorskip("triton")
    from quads.kernels import encode
    from quads.numerics.rac import RacSpec

    monkeypatch.setattr(encode, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = tiny_model()
    for precision, reason in (
        (Precision(weight="nvfp4"), "need a CUDA device"),
        (Precision(weight="fp8"), "no FP8 kernel"),
        (Precision(weight="nvfp4", activation="nvfp4", rac=RacSpec(0.5)), "both RAC passes"),
    ):
        with pytest.raises(RuntimeError, match=f"'triton' is not available here.*{reason}.*reference"):
            apply_surgery(model, precision, Execution(backend="triton"))
    assert not list(quads_layers(model))
