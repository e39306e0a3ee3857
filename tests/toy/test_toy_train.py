"""Warm-up: schedule and balance loss by hand, decoding against transformers, exclusion, determinism, the skill."""

import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from quads.config import Data, Experiment, Model, Warmup
from quads.data import chain
from quads.rewards.chain import grade_tokens
from quads.toy import train
from quads.toy.model import make_model

NOTHING = np.empty(0, dtype=np.int64)
SMALL = Data(operations=2, train_prompts=8, eval_prompts=8, calibration_prompts=4)
SHORT = Warmup(clean_steps=12, noisy_steps=4, batch=16)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_learning_rates_by_hand():
    rates = train.learning_rates(Warmup(clean_steps=31, noisy_steps=20, clean_lr=3.0, noisy_lr=1.0))
    assert len(rates) == 51
    assert rates[0] == pytest.approx(0.1) and rates[29] == rates[30] == 3.0
    assert rates[31] == pytest.approx(0.1)  # noisy: 1/10 of the rate, no decay yet
    assert rates[31 + 10] == pytest.approx(1 - 0.45) and rates[-1] == pytest.approx(1 - 0.9 * 19 / 20)


def test_balance_loss_against_brute_force_and_transformers():
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    probabilities = logits.softmax(-1)
    expected = 0.0
    for e in range(8):
        share = sum(e in row.argsort(descending=True)[:2] for row in logits) / 50
        expected += 8 / 2 * share * probabilities[:, e].mean().item()
    got = train.balance_loss([logits], k=2).item()
    assert got == pytest.approx(expected, rel=1e-5)
    # theirs sums the k slots without dividing by k
    assert got == pytest.approx(load_balancing_loss_func((logits,), num_experts=8, top_k=2).item() / 2, rel=1e-5)


def test_balance_loss_is_a_mean_over_layers_and_one_at_balance():
    even = torch.eye(4).repeat(3, 1) * 1e-6
    skewed = torch.tensor([[9.0, 0.0, 0.0, 0.0]]).repeat(12, 1)
    assert train.balance_loss([even], k=1).item() == pytest.approx(1.0, rel=1e-4)
    assert train.balance_loss([skewed], k=1).item() == pytest.approx(4.0, rel=1e-2)
    both = train.balance_loss([even, skewed], k=1).item()
    assert both == pytest.approx((1 + train.balance_loss([skewed], k=1).item()) / 2, rel=1e-4)


def test_greedy_answers_equal_transformers_generate():
    model = make_model(Model(), seed=0).eval()
    prompts = torch.from_numpy(chain.prompt_ids(chain.draw(32, 6, "+-*", np.random.default_rng(0))))
    ours = train.answer(model, prompts, 7, None)
    theirs = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=7)
    theirs = theirs[:, prompts.shape[1] :]
    for a, b in zip(ours.tolist(), theirs.tolist(), strict=True):
        stop = a.index(41) + 1 if 41 in a else 7
        assert a[:stop] == b[:stop]  # generate pads after the end mark


def test_sampling_follows_the_softmax():
    """First sampled token of one prompt, 10,000 times, against the model's own probabilities."""
    model = make_model(Model(), seed=0).eval()
    prompt = torch.tensor([[42, 3, 15, 32, 40]])
    with torch.no_grad():
        expected = model(prompt).logits[0, -1].softmax(-1)
    drawn = train.answer(model, prompt.expand(10_000, -1), 1, torch.Generator().manual_seed(0)).flatten()
    frequency = torch.bincount(drawn, minlength=43) / 10_000
    standard_error = (expected * (1 - expected) / 10_000).sqrt()
    assert ((frequency - expected).abs() <= 5 * standard_error).all()


def test_token_reward_equals_the_grader():
    rng = np.random.default_rng(0)
    digits = rng.integers(0, 3, (4000, 2))
    answers = rng.choice([0, 1, 2, 41, 42, 15], (4000, 3), p=[0.2, 0.2, 0.2, 0.3, 0.05, 0.05])
    got = train.is_right(torch.from_numpy(answers), torch.from_numpy(digits)).tolist()
    graded = [
        grade_tokens(answer, chain.text_of(truth)).score == 1.0
        for answer, truth in zip(answers.tolist(), digits.tolist(), strict=True)
    ]
    assert got == graded
    assert 50 < sum(got) < 2000


def test_excluded_problems_are_never_drawn():
    data = Data(operations=1, operators="+", train_prompts=10, eval_prompts=5, calibration_prompts=2)
    excluded = chain.keys(chain.draw_new(40, 1, "+", np.random.default_rng(9), NOTHING))
    drawn = train.draw_unseen(5000, data, np.random.default_rng(0), excluded)
    assert len(drawn) == 5000
    assert not np.isin(chain.keys(drawn), excluded).any()
    assert len(np.unique(chain.keys(drawn))) == 60  # and all the others are


def test_demonstrations_are_right_without_noise_and_not_with_it():
    for noise, right in ((0.0, 64), (0.9, 20)):
        ids, answers = train.demonstrations(Data(), 64, noise, np.random.default_rng(0), NOTHING)
        assert ids.shape == (64, 16) and answers.shape == (64, 7)
        assert torch.equal(ids[:, 9:], answers)
        texts = [chain.text_of(row) for row in ids.tolist()]
        count = sum(chain.check(text[: text.index("=") + 1], text[text.index("=") + 1 :]) for text in texts)
        assert count == 64 if noise == 0.0 else count < right


def test_training_lowers_the_loss_and_repeats_bit_for_bit():
    runs = []
    for _ in range(2):
        model = make_model(Model(), seed=0)
        losses = train.train(model, SMALL, SHORT, NOTHING)
        runs.append((losses, model.state_dict()))
    assert len(runs[0][0]) == 16
    assert min(runs[0][0][-3:]) < runs[0][0][0] - 0.5
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(weight, runs[1][1][name]) for name, weight in runs[0][1].items())


def test_a_diverging_warm_up_stops_and_names_the_step():
    wild = Warmup(clean_steps=40, noisy_steps=0, batch=8, clean_lr=1e30)
    with pytest.raises(FloatingPointError, match=r"at step \d+; lower warmup.clean_lr"):
        train.train(make_model(Model(), seed=0), SMALL, wild, NOTHING)


@pytest.mark.slow
def test_the_default_warm_up_leaves_a_skill_that_rl_can_sharpen():
    """Greedy nearly always right, samples about half the time: measured 1.000 and .555 (512 problems, s.e. .022)."""
    toy = Experiment(name="toy", title="defaults", arms=("bf16",))
    model = make_model(toy.model, toy.warmup.seed)
    train.train(model, toy.data, toy.warmup, NOTHING)
    problems = train.draw_unseen(512, toy.data, np.random.default_rng(5), NOTHING)
    accuracy = train.measure(model, problems, seed=5)
    assert accuracy.greedy >= 0.97
    assert 0.45 <= accuracy.sampled <= 0.65
