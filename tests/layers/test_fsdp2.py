"""Surgery under FSDP2: one gloo rank, fully_shard per decoder layer; gradients, state dict, calibration and recorded
layers as without it.
"""

import copy

import torch
from tiny_moe import tiny_model
from torch.distributed.fsdp import fully_shard

from quads.layers.blocks import recorded
from quads.layers.setup import Precision
from quads.layers.surgery import apply_surgery, quantized_weights
from quads.numerics.rac import RacSpec
from quads.trainer.calibration import calibrate


def test_fsdp2_equals_plain_model(mesh):
    plain = tiny_model()
    apply_surgery(plain, Precision(weight="nvfp4"))
    sharded = copy.deepcopy(plain)
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    ids = torch.randint(0, 43, (4, 10), generator=torch.Generator().manual_seed(0))

    for step in range(2):  # the second forward sees updated weights
        losses = []
        for model in (plain, sharded):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss = torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == losses[1], step
    want = plain.state_dict()
    got = {name: value.full_tensor() for name, value in sharded.state_dict().items()}
    assert list(got) == list(want) and all(torch.equal(got[n], want[n]) for n in want)

    ours, theirs = dict(quantized_weights(sharded)), dict(quantized_weights(plain))
    assert len(ours) == 12 and all(torch.equal(ours[n], theirs[n]) for n in theirs)
    mask, spec = torch.ones_like(ids), RacSpec(0.5)
    a, b = calibrate(sharded, ids, mask, spec), calibrate(plain, ids, mask, spec)
    assert len(a) == 8 and all(torch.equal(a[k], b[k]) for k in b)


def test_recorded_layers_of_a_sharded_model_with_checkpointing(mesh):
    """One copy of each output, also where a backward runs every layer a second time."""
    plain = tiny_model()
    apply_surgery(plain, Precision(weight="nvfp4"))
    sharded = copy.deepcopy(plain).train()
    sharded.gradient_checkpointing_enable()
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    ids = torch.randint(0, 43, (4, 10), generator=torch.Generator().manual_seed(0))
    with recorded(plain, lambda x: x[0, :3]) as want, torch.no_grad():
        plain(ids)
    with recorded(sharded, lambda x: x[0, :3]) as got:
        sharded(ids, use_cache=False).logits.sum().backward()
        sharded(ids.flip(0), use_cache=False)
    assert list(got) == list(want) and len(got) == 6
    for key, (x,) in want.items():
        assert len(got[key]) == 1 and torch.equal(got[key][0], x) and not got[key][0].requires_grad
