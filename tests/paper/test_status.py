"""The rule for verdicts, case by case, and against a brute force over intervals."""

import itertools

import pytest

from quads.evaluation.stats import Interval
from quads.paper import status
from quads.paper.status import Verdict


def interval(low, high):
    return Interval((low + high) / 2, low, high)


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(1, 2, "reproduced"), (-2, -1, "contradicted"), (-1, 1, "inconclusive"), (0, 1, "inconclusive")],
)
def test_a_direction_needs_the_whole_interval(low, high, word):
    assert status.greater(interval(low, high)).word == word
    mirrored = {"reproduced": "contradicted", "contradicted": "reproduced"}.get(word, word)
    assert status.greater(interval(low, high), sign=-1).word == mirrored


def test_a_claimed_size_is_part_of_the_claim():
    assert status.greater(interval(0.6, 0.8), at_least=0.5).word == "reproduced"
    assert status.greater(interval(0.4, 0.8), at_least=0.5).word == "partly"
    assert status.greater(interval(-0.4, 0.8), at_least=0.5).word == "inconclusive"
    assert status.greater(interval(0.05, 0.08), at_most=0.09).word == "reproduced"
    assert status.greater(interval(0.05, 0.12), at_most=0.09).word == "partly"


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (-1, 1, "reproduced"),
        (0.5, 1, "reproduced"),
        (2.5, 5, "contradicted"),
        (-5, -2.5, "contradicted"),
        (-1, 3, "inconclusive"),
        (1, 3, "partly"),
    ],
)
def test_level_is_judged_by_the_margin(low, high, word):
    assert status.level(interval(low, high), 2.0).word == word
    assert status.level(interval(-high, -low), 2.0).word == word


def test_words_are_exclusive_and_monotone():
    """Over a grid of intervals: moving an interval up never moves a verdict down, and level never depends on sign."""
    rank = {"contradicted": 0, "inconclusive": 1, "reproduced": 2}
    ends = [x / 2 for x in range(-8, 9)]
    for low, high in itertools.combinations(ends, 2):
        now, up = (status.greater(interval(low + d, high + d)) for d in (0.0, 0.5))
        assert rank[now.word] <= rank[up.word]
        assert status.level(interval(low, high), 2.0) == status.level(interval(-high, -low), 2.0)


def test_level_needs_a_margin():
    with pytest.raises(ValueError, match="margin must be positive"):
        status.level(interval(-1, 1), 0.0)


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["reproduced"] * 3, "reproduced"),
        (["reproduced", "inconclusive"], "partly"),
        (["reproduced", "contradicted"], "partly"),
        (["contradicted", "inconclusive"], "contradicted"),
        (["inconclusive"] * 2, "inconclusive"),
        (["reproduced", "not run"], "not run"),
    ],
)
def test_a_claim_of_several_parts(words, word):
    found = status.several([Verdict(w) for w in words])
    assert found.word == word
    if word == "partly":
        assert found.why == f"2 parts: 1 reproduced, 1 {words[1]}"


@pytest.mark.parametrize(
    ("first", "seeds", "word", "why"),
    [
        ((1, 2), (0.5, 2.5), "reproduced", "same direction, over problems and over seeds"),
        ((1, 2), (-1, 4), "inconclusive", "interval over seeds holds 0"),
        ((-1, 4), (1, 2), "inconclusive", "interval over problems holds 0"),
        ((-1, 4), (-2, 5), "inconclusive", "over problems and over seeds: interval holds 0"),
        ((-2, -1), (-3, -0.5), "contradicted", "opposite direction, over problems and over seeds"),
        ((1, 2), (-2, -1), "inconclusive", "intervals over problems and over seeds lie on opposite sides"),
    ],
)
def test_several_seeds_need_both_intervals(first, seeds, word, why):
    found = status.jointly(status.greater(interval(*first)), status.greater(interval(*seeds)))
    assert (found.word, found.why) == (word, why)


def test_one_seed_leaves_the_verdict_and_a_size_needs_both_intervals():
    alone = status.greater(interval(1, 2))
    assert status.jointly(alone, None) == alone
    most = [status.greater(interval(*ends), at_least=0.5) for ends in ((0.6, 0.8), (0.3, 1.1))]
    assert str(status.jointly(*most)) == "partly: same direction, not shown to exceed 0.5 over seeds"
    level = [status.level(interval(*ends), 2.0) for ends in ((2.9, 4.8), (0.7, 7.0))]
    assert str(status.jointly(*level)) == "partly: differs, not shown to exceed 2 over seeds"
    wide = status.level(interval(-1, 5), 2.0)
    assert status.jointly(status.level(interval(-1, 1), 2.0), wide).word == "inconclusive"


def test_zero_is_zero():
    assert str(status.zero(0, 1000)) == "reproduced: 0 of 1,000"
    assert status.zero(1, 1000).word == "contradicted"
