"""Routing plan and combination against a loop over (token, choice)."""

import pytest
import torch

from quads.layers.routing import combine, route, route_on_device


def test_matches_loop_and_drops_foreign_experts():
    generator = torch.Generator().manual_seed(1)
    tokens, slots, experts, width = 11, 3, 5, 4
    ids = torch.randint(-1, experts + 1, (tokens, slots), generator=generator)  # -1 and 5 live elsewhere
    weights = torch.rand(tokens, slots, generator=generator)
    x = torch.randn(tokens, width, generator=generator)
    rows = route(ids, experts)

    expected = torch.zeros(tokens, width)
    hits = torch.zeros(experts, dtype=torch.long)
    for t in range(tokens):
        for s in range(slots):
            if 0 <= ids[t, s] < experts:
                expected[t] += weights[t, s] * x[t] * (int(ids[t, s]) + 1)
                hits[ids[t, s]] += 1
    factor = torch.cat([torch.full((count,), expert + 1.0) for expert, count in rows.experts])
    assert dict(rows.experts) == {e: int(n) for e, n in enumerate(hits) if n}
    assert torch.equal(rows.token, rows.order // slots)
    torch.testing.assert_close(combine(x[rows.token] * factor[:, None], weights, rows), expected)


@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_device_plan_is_the_host_plan(tokens):
    """Same rows in the same order, offsets from the counts, foreign rows behind and worth zero even as NaN."""
    generator = torch.Generator().manual_seed(tokens)
    slots, experts, width = 3, 6, 4
    ids = torch.randint(-1, experts + 2, (tokens, slots), generator=generator)
    ids = torch.where(ids == 2, 4, ids)  # expert 2 gets no rows
    weights = torch.rand(tokens, slots, generator=generator)
    host, device = route(ids, experts), route_on_device(ids, experts)
    own = int(device.offsets[-1])
    assert device.offsets.dtype == torch.int32 and device.offsets.shape == (experts + 1,)
    assert torch.equal(device.order[:own], host.order) and torch.equal(device.token[:own], host.token)
    assert len(device.order) == tokens * slots
    counts = device.offsets.diff().tolist()
    assert [(e, n) for e, n in enumerate(counts) if n] == host.experts and counts[2] == 0

    y = torch.randn(tokens * slots, width, generator=generator)
    y[own:] = float("nan")
    got = combine(y, weights, device)
    assert got.shape == (tokens, width)
    assert torch.equal(got, combine(y[:own], weights, host))


def test_all_rows_elsewhere():
    ids = torch.full((3, 2), -1)
    rows = route_on_device(ids, 4)
    assert rows.offsets.tolist() == [0] * 5
    assert not combine(torch.full((6, 5), float("nan")), torch.ones(3, 2), rows).any()
    assert route(ids, 4).experts == []
