"""The weight cache under FSDP2, whose all-gathered parameters keep address and version while their values change."""

import copy

import pytest
import torch
from tiny_moe import tiny_model
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from quads.layers.execution import Execution
from quads.layers.setup import Precision
from quads.layers.surgery import apply_surgery, weight_cache

IDS = torch.randint(0, 43, (4, 10), generator=torch.Generator().manual_seed(0))
KEPT = 14


def sharded(mesh, cache: str, layers: bool = True, **options):
    model = tiny_model()
    apply_surgery(model, Precision(weight="nvfp4"), Execution(cache=cache))
    for layer in model.model.layers if layers else ():
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def step(model, optimizer, by_hand: str | None = None) -> list[float]:
    """Two micro-batches and an update; the losses. by_hand: no torch optimizer, only versions tell of the update."""
    losses = []
    for ids in IDS.split(2):
        loss = torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
    if by_hand is None:
        optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters() if by_hand else ():
            if by_hand == "local":
                parameter.to_local().sub_(parameter.grad.to_local(), alpha=0.1)
            else:
                parameter.sub_(parameter.grad, alpha=0.1)
    model.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("by_hand", "reshard", "bf16"),
    [
        (None, True, False),
        (None, False, True),
        ("dtensor", True, True),
        ("dtensor", False, False),
        ("local", True, False),
        ("local", False, True),
    ],
)
def test_training_is_equal_and_quantizes_once(mesh, by_hand, reshard, bf16):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else None
    options = {"reshard_after_forward": reshard} | ({"mp_policy": policy} if policy else {})
    models = [sharded(mesh, cache, **options) for cache in ("on", "off")]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
    for i in range(3):
        cached, plain = (step(m, o, by_hand) for m, o in zip(models, optimizers, strict=True))
        assert cached == plain, i
    counts = weight_cache(models[0]).counts
    # reused: the second micro-batch's 14, and the shared amax of k and v, which a hit on them does not ask for
    assert counts["computed"] == 3 * KEPT and counts["bypassed"] == 0 and counts["reused"] >= 3 * 12
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())


def test_load_state_dict_between_steps(mesh):
    models = [sharded(mesh, cache) for cache in ("on", "off")]
    start = copy.deepcopy(models[0].state_dict())
    for model in models:
        step(model, torch.optim.SGD(model.parameters(), lr=0.5))
    with torch.no_grad():
        after = [model(IDS).logits for model in models]
    assert torch.equal(*after)
    for model in models:
        model.load_state_dict(copy.deepcopy(start))
    with torch.no_grad():
        back = [model(IDS).logits for model in models]
    assert torch.equal(*back) and not torch.equal(back[0], after[0])


def test_one_group_for_the_whole_model_is_never_kept(mesh, caplog):
    """Its parameters are gathered before the model's own hooks run: no shard is seen, so nothing may be reused."""
    models = [sharded(mesh, cache, layers=False) for cache in ("on", "off")]
    for i in range(2):
        cached, plain = (step(m, None, "dtensor") for m in models)
        assert cached == plain, i
    counts = weight_cache(models[0]).counts
    assert counts["computed"] == counts["reused"] == 0 < counts["bypassed"]
    assert "no reliable version" in caplog.text


def test_the_trap_is_real(mesh):
    """What a cache keyed on the gathered parameter would see: the same version and address, another value."""
    model = sharded(mesh, "off")
    seen = []
    hook = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda m, _: seen.append((m.weight._version, m.weight.detach().clone()))
    )
    for _ in range(2):
        step(model, None, "dtensor")
    hook.remove()
    assert seen[0][0] == seen[-1][0] and not torch.equal(seen[0][1], seen[-1][1])
