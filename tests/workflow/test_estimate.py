"""GPU-hour estimates: the arithmetic by hand, and what is refused."""

import pytest

from quads import estimate
from quads.config import load_arm, load_arms, load_experiment


def test_paper_arithmetic_by_hand() -> None:
    paper, arm = load_experiment("paper"), load_arm("bf16")
    rates = paper.rates
    assert rates is not None
    samples = 260 * 256 * 16
    decode = samples * rates.response_tokens / rates.decode_tokens_per_s
    update = samples * (rates.response_tokens + 3072) / rates.train_tokens_per_s
    hours = (decode + update) / 3600 + 32 * rates.start_minutes / 60
    row = estimate.train_row(paper, arm)
    assert row.gpu_hours == pytest.approx(hours) and row.tokens == samples * rates.response_tokens


def test_slow_modes_seeds_and_engines_count() -> None:
    small = load_experiment("gpu_small")
    plain, slow = (estimate.train_row(small, load_arm(name)).gpu_hours for name in ("bf16", "nvfp4_naive"))
    assert slow > 2 * plain
    three = small.model_copy(update={"seeds": (0, 1, 2)})
    assert estimate.train_row(three, load_arm("bf16")).gpu_hours == pytest.approx(3 * plain)
    one = small.model_copy(update={"evaluation": small.evaluation.model_copy(update={"engines": ("own",)})})
    both = estimate.evaluate_row(small, load_arm("bf16"))
    assert estimate.evaluate_row(one, load_arm("bf16")).gpu_hours == pytest.approx(both.gpu_hours / 2)


def test_table_names_every_arm_and_the_source_of_the_rates() -> None:
    paper = load_experiment("paper")
    text = estimate.table(paper, estimate.estimate(paper, load_arms(paper)))
    assert all(name in text for name in paper.arms) and "assumed, not measured" in text and "32 GPUs" in text


def test_an_experiment_without_rates_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate.main(["--experiment", "configs/toy.yaml"]) == 1
    assert "states no `rates`" in capsys.readouterr().err
