"""The chunked head against autograd on whole arrays in float64: values, gradients, memory kept."""

from __future__ import annotations

import pytest
import torch
from tolerances import TOLERANCES

from quads.trainer import head


def whole(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_prob = logits.double().log_softmax(-1)
    return log_prob.gather(-1, labels[..., None])[..., 0], -(log_prob.exp() * log_prob).sum(-1)


@pytest.mark.parametrize("shape", [(1,), (7,), (head.CHUNK + 1,), (3, 500)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_match_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    logits = (4 * torch.randn(*shape, 53, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(53, shape, generator=generator)
    found = head.log_probs(logits, labels), head.entropy(logits)
    expected = whole(logits, labels)
    limit = TOLERANCES["chunked_head"].limit
    for own, truth in zip(found, expected, strict=True):
        assert own.dtype == torch.float32 and own.shape == torch.Size(shape)
        assert (own - truth).abs().max() <= limit
    upstream = torch.randn(shape, generator=generator)
    for own, which in zip(found, (0, 1), strict=True):
        mine = torch.autograd.grad(own, logits, upstream)[0]
        theirs = torch.autograd.grad(whole(logits, labels)[which], logits, upstream.double())[0]
        assert mine.dtype == dtype
        # The same rounding to the logits' dtype at the end; float32 sums before it may move it by one unit.
        unit = torch.finfo(dtype).eps * theirs.abs().double() + limit
        assert ((mine.double() - theirs.double()).abs() <= unit).all()


def test_agrees_with_the_function_it_replaces() -> None:
    from_verl = pytest.importorskip("verl.utils.torch_functional")
    logits, labels = torch.randn(2000, 31), torch.randint(31, (2000,))
    limit = TOLERANCES["chunked_head"].limit
    assert (head.log_probs(logits, labels) - from_verl.logprobs_from_logits_v2(logits, labels)).abs().max() <= limit
    assert (head.entropy(logits) - from_verl.entropy_from_logits(logits)).abs().max() <= limit


def test_keeps_the_logits_alone_for_backward() -> None:
    logits = torch.randn(4 * head.CHUNK, 17, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        total = head.log_probs(logits, torch.zeros(4 * head.CHUNK, dtype=torch.long)).sum() + head.entropy(logits).sum()
    floats = [x for x in kept if x.is_floating_point() and x.numel() >= head.CHUNK * 17]
    assert all(x.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr() for x in floats)
    total.backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


def test_without_gradients_nothing_is_kept() -> None:
    with torch.no_grad():
        assert not head.log_probs(torch.randn(5, 3), torch.zeros(5, dtype=torch.long)).requires_grad


def test_shapes_that_do_not_match_are_named() -> None:
    with pytest.raises(ValueError, match=r"logits \(4, 3\) and labels \(5,\)"):
        head.log_probs(torch.zeros(4, 3), torch.zeros(5, dtype=torch.long))
