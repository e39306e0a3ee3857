"""verl's custom_reward_function for the stock agent loop: the same graders, found by data_source.

Contract: compute_score(data_source, solution_str, ground_truth, extra_info) -> {"score", "acc", "status"}, always with
all three keys (verl's reward managers append per key). verl decodes without special tokens, so a cut response looks
finished; the chain grader infers it from the length, others grade what is there. The inline agent loop does not come
through here: it has the tokens. A failure of the grader scores 0 here, because this interface cannot mask a sample;
its status says so and the count is logged. Bound the tests of a code sample where its row is made
(quads.rewards.code: Task.bounded, as_ground_truth).
"""

from __future__ import annotations

from typing import Any

from quads.data import chain as chain_data
from quads.rewards import chain
from quads.rewards.registry import grader


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> dict[str, Any]:
    """Grade one decoded response. Raises ValueError for a data source without a grader."""
    if data_source == chain_data.NAME:
        found = chain.compute_score(data_source, solution_str, ground_truth, extra_info)
        return {**found, "status": "correct" if found["score"] else "wrong"}
    grade = grader(data_source)(solution_str, ground_truth, True)
    return {"score": grade.score, "acc": grade.score, "status": grade.status}
