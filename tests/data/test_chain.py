"""Chains: a worked example by hand, the generator against the independent checker, keys against brute force."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quads.data import chain


def problem(start: int, *steps: tuple[str, int]) -> chain.Problems:
    return chain.Problems(
        np.array([start]),
        np.array([[chain.OPERATORS.index(o) for o, _ in steps]]),
        np.array([[d for _, d in steps]]),
    )


def test_worked_example():
    # 3+5 = 8; 8*2 = 16 -> 6; 6-7 = -1 -> 9
    worked = problem(3, ("+", 5), ("*", 2), ("-", 7))
    assert chain.prompt_ids(worked).tolist() == [[42, 3, 15, 32, 27, 40]]
    assert chain.text_of(chain.prompt_ids(worked)[0]) == "^3+5*2-7="
    assert chain.answer_ids(chain.answer_digits(worked)).tolist() == [[8, 6, 9, 41]]


def test_vocabulary_has_43_distinct_symbols():
    assert len(chain.SYMBOLS) == len(set(chain.SYMBOLS)) == 43
    assert [chain.ID[s] for s in (chain.ASK, chain.END, chain.START)] == [40, 41, 42]


@pytest.mark.parametrize(
    ("prompt", "answer", "right"),
    [
        ("^3+5*2-7=", "869;", True),
        ("^3+5*2-7=", "869", False),  # not finished
        ("^3+5*2-7=", "969;", False),  # right result, wrong step
        ("^2-9-9=", "34;", True),  # negative: 2-9 = -7 -> 3, -7-9 = -16 -> 4
        ("^0-0=", "0;", True),
        ("^9*9*9*9=", "191;", True),
    ],
)
def test_checker_by_hand(prompt, answer, right):
    assert chain.check(prompt, answer) is right


@given(st.integers(0, 2**31), st.integers(1, 12), st.sampled_from(["+", "-", "*", "+-", "+*", "-*", "+-*"]), st.data())
@settings(max_examples=60, deadline=None)
def test_generator_agrees_with_checker_and_any_other_digit_fails(seed, operations, operators, data):
    drawn = chain.draw(5, operations, operators, np.random.default_rng(seed))
    answers = chain.answer_ids(chain.answer_digits(drawn))
    for ids, answer in zip(chain.prompt_ids(drawn), answers, strict=True):
        prompt, text = chain.text_of(ids), chain.text_of(answer)
        assert set(prompt[2:-1:2]) <= set(operators)
        assert chain.check(prompt, text)
        at = data.draw(st.integers(0, operations - 1))
        other = str((int(text[at]) + data.draw(st.integers(1, 9))) % 10)
        assert not chain.check(prompt, text[:at] + other + text[at + 1 :])
        assert chain.ids_of(prompt + text) == [*ids, *answer]


@pytest.mark.parametrize("prompt", ["3+5=", "^3+5", "^3=", "^3+15=", "^3/5=", "^3+5=\n"])
def test_checker_refuses_what_is_no_prompt(prompt):
    with pytest.raises(ValueError, match="not a chain prompt"):
        chain.check(prompt, "8;")


def test_keys_are_equal_exactly_where_prompts_are():
    every = [problem(s, (o, d)) for s, o, d in itertools.product(range(10), "+-*", range(10))]
    assert len(every) == chain.count_distinct(1, "+-*") == 300
    assert len({int(chain.keys(p)[0]) for p in every}) == 300


def test_keys_of_the_longest_chain_do_not_overflow():
    largest = problem(9, *[("*", 9)] * chain.MAX_OPERATIONS)
    assert int(chain.keys(largest)[0]) == sum(29 * 30**n for n in range(12)) + 9 * 30**12


def test_draw_new_gives_distinct_prompts_outside_the_seen():
    rng = np.random.default_rng(0)
    seen = chain.keys(chain.draw_new(50, 1, "+-*", rng, np.empty(0, dtype=np.int64)))
    fresh = chain.keys(chain.draw_new(100, 1, "+-*", rng, seen))
    assert len(set(fresh.tolist())) == 100
    assert not set(fresh.tolist()) & set(seen.tolist())


def test_draw_new_refuses_to_stall():
    with pytest.raises(ValueError, match=r"only 300 exist with operations=1.*raise data.operations"):
        chain.draw_new(200, 1, "+-*", np.random.default_rng(0), np.empty(0, dtype=np.int64))


@pytest.mark.parametrize(
    ("operations", "operators", "named"), [(0, "+", "operations=0"), (13, "+", "13"), (2, "+/", "/")]
)
def test_draw_names_unusable_arguments(operations, operators, named):
    with pytest.raises(ValueError, match=named):
        chain.draw(1, operations, operators, np.random.default_rng(0))


def test_noise_replaces_the_stated_share_and_the_chain_goes_on_from_it():
    rng = np.random.default_rng(3)
    drawn = chain.draw(20_000, 4, "+-", rng)  # without *, an error never heals except by another replacement
    noisy = chain.answer_digits(drawn, 0.12, rng)
    previous = np.concatenate([drawn.start[:, None], noisy[:, :-1]], axis=1)
    signed = np.where(drawn.operators == 0, drawn.operands, -drawn.operands)
    local_error = noisy != (previous + signed) % 10
    # 80,000 steps, each locally wrong with 0.12 * 0.9 = 0.108: standard error 0.0011
    assert abs(local_error.mean() - 0.108) < 0.005
    clean_rows = ~local_error.any(1)
    assert (noisy[clean_rows] == chain.answer_digits(drawn)[clean_rows]).all()
    assert 0.5 < clean_rows.mean() < 0.75  # 0.892^4 = 0.633


def test_noise_without_a_generator_is_an_error():
    with pytest.raises(ValueError, match="pass rng"):
        chain.answer_digits(problem(1, ("+", 1)), noise=0.5)


def test_ids_of_names_the_unknown_symbol():
    with pytest.raises(ValueError, match=r"\['/'\] not in the vocabulary"):
        chain.ids_of("^3/5=")
