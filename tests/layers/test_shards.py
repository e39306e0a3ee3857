"""A shard of a weight, given the amax of the whole, is that slice of the quantized whole; the ranks are simulated."""

import pytest
import torch

from quads.layers.weights import SCALE_GROUPS, quantize_rows

WIDTHS = (32, 16, 16)  # rows of the whole q, k, v


def weights(*leading: int) -> torch.Tensor:
    """[..., 64, 96], its loudest element in the last quarter, so that the first shards would scale otherwise."""
    w = torch.randn(*leading, sum(WIDTHS), 96, generator=torch.Generator().manual_seed(3))
    w[..., -1, -1] = 40.0
    return w


def shards_of(w: torch.Tensor, size: int, inner: bool) -> tuple[list[torch.Tensor], list[int]]:
    """One tensor per rank and the rows of its parts."""
    if inner:
        return [part.contiguous() for part in w.chunk(size, -1)], list(WIDTHS)
    parts = [part.chunk(size, -2) for part in w.split(WIDTHS, -2)]
    return [torch.cat(of_rank, -2) for of_rank in zip(*parts, strict=True)], [n // size for n in WIDTHS]


def everywhere(shards: list[torch.Tensor], widths: list[int], fmt: str):
    """What the collective gives, by brute force over all shards: the maximum of what every rank asks for."""

    def amax(local: torch.Tensor) -> torch.Tensor:
        stored = [w.bfloat16().float().abs() for w in shards]
        if fmt == "fp8":
            return torch.stack([w.amax(-1, keepdim=True) for w in stored]).amax(0)
        every = [torch.stack([p.amax((-2, -1), keepdim=True) for p in w.split(widths, -2)]) for w in stored]
        assert every[0].shape == local.shape
        return torch.stack(every).amax(0)

    return amax


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("inner", [False, True], ids=["rows", "inner"])
@pytest.mark.parametrize("scale_group", SCALE_GROUPS)
@pytest.mark.parametrize("fmt", ["nvfp4", "fp8", "bf16"])
@pytest.mark.parametrize("leading", [(), (3,)], ids=["linear", "experts"])
def test_shards_are_slices_of_the_whole(size, inner, scale_group, fmt, leading):
    w = weights(*leading)
    if inner and size == 4:
        w = torch.cat([w, w[..., :32]], -1)  # K = 128: every shard keeps a multiple of 16
    whole = quantize_rows(w, fmt, WIDTHS, scale_group, "w")
    shards, widths = shards_of(w, size, inner)
    qs, _ = shards_of(whole.qs, size, inner)
    rcp = [whole.rcp] * size if inner else shards_of(whole.rcp, size, False)[0]
    alone = 0
    for rank, shard in enumerate(shards):
        got = quantize_rows(shard, fmt, widths, scale_group, "w", everywhere(shards, widths, fmt), inner)
        assert torch.equal(got.qs, qs[rank]) and torch.equal(got.rcp, rcp[rank])
        alone += int((quantize_rows(shard, fmt, widths, scale_group, "w").qs != qs[rank]).sum())
    assert (alone > 0) == (fmt == "nvfp4" or (fmt == "fp8" and inner)), "the scale of a shard alone differs"


@pytest.mark.parametrize(("fmt", "inner"), [("nvfp4", False), ("nvfp4", True), ("fp8", True)])
def test_a_broken_shard_is_an_error_on_every_rank(fmt, inner):
    with pytest.raises(ValueError, match=r"layer\.w.*(not finite|infinity)"):
        quantize_rows(weights(), fmt, WIDTHS, "fused", "layer.w", lambda x: torch.full_like(x, torch.inf), inner)
