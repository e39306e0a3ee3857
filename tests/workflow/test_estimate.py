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
    assert all(name in text for name in paper.arms) and "Rates: measured on H200" in text and "32 GPUs" in text


def test_an_experiment_without_rates_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert estimate.main(["--experiment", "configs/toy.yaml"]) == 1
    assert "states no `rates`" in capsys.readouterr().err


def test_qat_costs_training_time_and_a_bf16_engine_decodes_at_the_bf16_rate() -> None:
    small = load_experiment("gpu_small")
    rates = small.rates
    assert rates is not None and rates.qat_overhead > 1
    plain = small.model_copy(update={"rates": rates.model_copy(update={"qat_overhead": 1.0})})
    arm = load_arm("qat_only")
    assert estimate.train_row(small, arm).gpu_hours > estimate.train_row(plain, arm).gpu_hours
    both = estimate.evaluate_row(small, arm).gpu_hours
    own, bf16 = (
        estimate.evaluate_row(
            small.model_copy(update={"evaluation": small.evaluation.model_copy(update={"engines": (engine,)})}), arm
        ).gpu_hours
        for engine in ("own", "bf16")
    )
    assert own > bf16 and both == pytest.approx(own + bf16)


def test_a_factor_of_an_unknown_mode_is_refused() -> None:
    paper = load_experiment("paper")
    assert paper.rates is not None
    for factor in ({"w4a4_rac": 0.5}, {"w4a4": 0.0}):
        with pytest.raises(ValueError, match="decode_factor"):
            type(paper.rates).model_validate({**paper.rates.model_dump(), "decode_factor": factor})
