"""verl's reward function and the masking of failed grades."""

import pytest

from quads.integrations.verl.reward import compute_score
from quads.rewards.types import Grade


def test_same_keys_for_every_data_source():
    chain = compute_score("chain", "123456", "123456")
    math = compute_score("math", "so \\boxed{\\frac{1}{2}}", "0.5")
    assert set(chain) == set(math) == {"score", "acc", "status"}
    assert (chain["score"], math["score"]) == (1.0, 1.0)
    assert compute_score("math", "no box", "1")["status"] == "no_answer"


def test_an_unknown_data_source_lists_the_known():
    with pytest.raises(ValueError, match=r"'poems'; known: aime, chain, code, math"):
        compute_score("poems", "", "")


@pytest.mark.stack
def test_a_failed_grade_gets_the_mean_of_its_group():
    from quads.integrations.verl.agent_loop import neutral_scores

    right, wrong, broken = Grade(1.0, "correct"), Grade(0.0, "wrong"), Grade(0.0, "infra_error")
    assert neutral_scores([right, wrong, broken, broken], ["a", "a", "a", "b"]) == [1.0, 0.0, 0.5, 0.0]
