# SPDX-License-Identifier: Apache-2.0
"""W2 quantized beside the first grouped product: the bits of one after the other. Streams: tests/kernels, on a GPU."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from tiny_moe import tiny_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from quads.layers import grouped
from quads.layers.execution import Execution
from quads.layers.setup import LayerSetup, Precision
from quads.layers.surgery import apply_surgery

IDS = torch.randint(0, 43, (4, 8), generator=torch.Generator().manual_seed(0))


def gaussian(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
def test_gradients_are_autograds_own(needed: tuple[bool, bool]) -> None:
    ends = torch.tensor([3, 3, 10, 12], dtype=torch.int32)
    found = []
    for beside in (True, False):
        x = gaussian(12, 32, seed=1).requires_grad_(needed[0])
        w = gaussian(4, 16, 32, seed=2).requires_grad_(needed[1])
        y = grouped._ProductBeside.apply(x, w, ends, 4) if beside else torch._grouped_mm(x, w.mT, ends)
        gate, up = y.chunk(2, dim=-1)
        leaves = [t for t in (x, w) if t.requires_grad]
        found.append((y, *torch.autograd.grad(torch.tanh(gate) * up, leaves, gaussian(12, 8, seed=3))))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b) and bool(a.any())


def trained(mesh, cache: str = "off", checkpoint: bool | None = None, autocast: bool = False) -> list[torch.Tensor]:
    """Two SGD steps of two micro-batches; losses and the parameters after them."""
    model = tiny_model() if autocast else tiny_model().bfloat16()
    apply_surgery(model, Precision("nvfp4"), Execution(experts="grouped", cache=cache))
    if checkpoint is not None:
        model.train().gradient_checkpointing_enable({"use_reentrant": checkpoint})
        model.enable_input_require_grads()
    if mesh is not None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        for ids in IDS.split(2):
            with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
                loss = model(ids, use_cache=False).logits.float().square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses + [p.full_tensor() if mesh is not None else p.detach() for p in model.parameters()]


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def both(monkeypatch: pytest.MonkeyPatch, mesh=None, **choices) -> list[list[torch.Tensor]]:
    found = []
    for beside in (4, None):
        monkeypatch.setattr(grouped, "BESIDE", beside)
        found.append(trained(mesh, **choices))
    return found


@pytest.mark.parametrize(
    "choices",
    [{}, {"cache": "on"}, {"checkpoint": False}, {"checkpoint": True}, {"autocast": True}],
    ids=str,
)
def test_training_is_equal(choices: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(torch.equal(a, b) for a, b in zip(*both(monkeypatch, **choices), strict=True))


def test_training_is_equal_under_fsdp2(mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(torch.equal(a, b) for a, b in zip(*both(monkeypatch, mesh), strict=True))


@pytest.mark.parametrize(("cache", "order"), [("off", ["gate_up_proj", "product", "down_proj", "product"]),
                                              ("on", ["gate_up_proj", "down_proj", "product", "product"])])  # fmt: skip
def test_w2_is_quantized_after_the_first_product_was_launched(cache, order, monkeypatch) -> None:
    """Unless it may be a kept value: the product would give up SMs for nothing."""
    model = tiny_model(num_hidden_layers=1).bfloat16()
    apply_surgery(model, Precision("nvfp4"), Execution(experts="grouped", cache=cache))
    seen: list[str] = []
    fake, product = LayerSetup.fake, torch._grouped_mm

    def spy(self, w, amax, param):
        seen.extend([param] if w.ndim == 3 else [])
        return fake(self, w, amax, param)

    monkeypatch.setattr(LayerSetup, "fake", spy)
    monkeypatch.setattr(torch, "_grouped_mm", lambda *a: seen.append("product") or product(*a))
    monkeypatch.setattr(grouped, "BESIDE", 4)
    model(IDS)
    assert seen == order
