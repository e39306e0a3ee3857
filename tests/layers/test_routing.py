"""Routing plan and combination against a loop over (token, choice)."""

import torch

from quads.layers.routing import combine, route


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
