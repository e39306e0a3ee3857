"""Thresholds against the project's own result files, verdicts on made-up gaps, expected gaps by brute force, cost."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path

import pytest
import torch
from preflight_models import save
from tiny_moe import tiny_model
from tolerances import TOLERANCES

from quads.bench.roofline import B200, H200, layer_seconds
from quads.diagnostics.preflight import cost, head, verdict
from quads.diagnostics.preflight.checkpoint import make_skeleton
from quads.layers.setup import Precision
from quads.layers.surgery import apply_surgery

DOCS = Path(__file__).resolve().parents[2] / "docs"


def points_in_table(experiment: str, arm: str) -> tuple[float, float, float]:
    """(own minus BF16, low, high) of docs/measured/<experiment>/table.md."""
    lines = (DOCS / "measured" / experiment / "table.md").read_text().splitlines()
    header = next(line for line in lines if line.startswith("| arm |")).split("|")
    row = next(line for line in lines if line.startswith(f"| {arm} |")).split("|")
    cell = row[[name.strip() for name in header].index("own, minus BF16 arm")]
    numbers = re.findall(r"[-+]?\d+\.\d+", cell)
    return float(numbers[0]), float(numbers[1]), float(numbers[2])


def first_gap(experiment: str, arm: str) -> float:
    with (DOCS / "measured" / experiment / "curves.csv").open() as file:
        rows = [float(r["gap_mean"]) for r in csv.DictReader(file) if r["arm"] == arm and r["step"] == "1"]
    return sum(rows) / len(rows)


@pytest.mark.parametrize("evidence", verdict.EVIDENCE, ids=lambda e: e.run)
def test_evidence_is_what_the_result_files_say(evidence: verdict.Evidence) -> None:
    experiment, arm = evidence.run.split()[:2]
    assert (evidence.points, evidence.low, evidence.high) == points_in_table(experiment, arm)
    if "curves.csv" in evidence.source:
        assert evidence.gap == pytest.approx(first_gap(experiment, arm), abs=5e-4)
    elif "decomposition.md" in evidence.source:
        lines = (DOCS / evidence.source.split(", ")[1]).read_text().splitlines()
        total = next(row for row in lines if row.startswith(f"| {arm} | total | total |"))
        assert evidence.gap == float(re.findall(r"\d\.\d+", total)[0])
    else:
        line = next(
            row for row in (DOCS / "diagnostics.md").read_text().splitlines() if row.startswith(f"| {arm} | 0.")
        )
        assert evidence.gap == float(re.findall(r"\d\.\d+", line)[0])


def test_limits_separate_the_runs() -> None:
    assert verdict.OK_BELOW == pytest.approx(math.sqrt(0.0225 * 0.0406))
    assert verdict.HURT_FROM == pytest.approx(math.sqrt(0.062 * 0.073))
    levels = {e.run.split(" (")[0]: verdict.level_of(e.gap) for e in verdict.EVIDENCE}
    assert levels["toy_all fp8"] == levels["toy_all w4a16"] == "ok"
    assert levels["toy quads"] == levels["toy_s1 quads"] == "risky"
    assert levels["toy nvfp4_naive"] == levels["toy qat_only"] == "will hurt"


def judged(gap: float, *, tokens: int = 1000, basis: str = "response") -> verdict.Verdict:
    return verdict.judge(gap, 0.9 * gap, 1.1 * gap, tokens=tokens, minimum=200, basis=basis)


def test_levels_and_reasons() -> None:
    assert [judged(g).level for g in (0.0, 0.005, 0.05, 0.2)] == ["ok", "ok", "risky", "will hurt"]
    assert "toy nvfp4_naive" in judged(0.25).reason and "-71.2" in judged(0.25).reason
    assert "crosses the limit of will hurt" in judged(0.068).reason and "crosses" not in judged(0.05).reason
    assert judged(0.2, tokens=199).level == "unknown" and "199 scored tokens" in judged(0.2, tokens=199).reason


@pytest.mark.parametrize("gap", [math.nan, math.inf])
@pytest.mark.parametrize("basis", ["response", "prompt"])
def test_a_gap_that_is_no_number_has_no_verdict(gap: float, basis: str) -> None:
    found = judged(gap, basis=basis)
    assert found.level == "unknown" and "not finite" in found.reason and f"{gap:.3g}" in found.reason
    assert verdict.judge(0.01, 0.009, gap, tokens=1000, minimum=200, basis=basis).level == "unknown"


def test_prompt_tokens_need_a_margin() -> None:
    assert judged(0.064, basis="prompt").level == "unknown" and "give responses" in judged(0.064, basis="prompt").reason
    assert judged(0.5, basis="prompt").level == "will hurt" and judged(0.001, basis="prompt").level == "ok"


def test_expected_and_drawn_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    trainer, rollout = (torch.randn(4, 7, generator=generator).log_softmax(-1) for _ in range(2))
    got = head._mean(rollout, (trainer - rollout).abs())
    for i in range(4):
        want = sum(math.exp(float(rollout[i, v])) * abs(float(trainer[i, v]) - float(rollout[i, v])) for v in range(7))
        assert float(got[i]) == pytest.approx(want, rel=1e-5)
    u = torch.rand(20000, dtype=torch.float64, generator=generator)
    drawn = head._draw(rollout[:1].expand(20000, 7), u)
    shares = torch.bincount(drawn, minlength=7) / 20000
    assert float((shares - rollout[0].exp()).abs().max()) <= TOLERANCES["preflight/drawn_shares"].limit


def test_bytes_by_hand(tmp_path: Path) -> None:
    """Tiny Qwen3-MoE: per layer qkv (128 + 64 + 64) x 64, o 64 x 128, 8 experts of 64 x 64 and 64 x 32."""
    skeleton = make_skeleton(save(tiny_model(), tmp_path))
    surgery = apply_surgery(skeleton, Precision("nvfp4", "nvfp4"))
    shapes = cost.gemm_shapes(surgery.rows)
    elements = 2 * (256 * 64 + 64 * 128 + 8 * 64 * 64 + 8 * 64 * 32)
    rows, matrices = 2 * (256 + 64 + 8 * 64 + 8 * 64), 2 * (1 + 1 + 8 + 8)
    total = sum(p.numel() for p in skeleton.parameters())
    rest = 2 * (total - elements)
    table = {r["rollout"]: r for r in cost.cost_rows(surgery.rows, total, 2, [(m, m, 0.0) for m in cost.UNITS])}
    assert sum(s.experts * s.n * s.k for s in shapes) == elements
    assert table["bf16"]["native_bytes"] == 2 * total
    assert table["fp8"]["native_bytes"] == elements + 4 * rows + rest
    assert table["w4a4"]["native_bytes"] == table["w4a16"]["native_bytes"] == elements * 9 // 16 + 4 * matrices + rest
    assert all(r["emulated_bytes"] == 2 * elements + 4 * rows + rest for r in table.values())
    assert table["bf16"]["model_speedup_over_bf16_at_8192_tokens"] == 1.0
    hopper = cost.cost_rows(surgery.rows, total, 2, [(m, m, 0.0) for m in cost.UNITS], H200)
    speeds = {row["rollout"]: row["model_speedup_over_bf16_at_8192_tokens"] for row in hopper}
    assert speeds["bf16"] == 1.0 and speeds["fp8"] is not None and speeds["w4a4"] is None  # no FP4 matrix units


@pytest.mark.parametrize(("rollout", "fmt", "k"), [("fp8", "fp8", 0.0), ("w4a4", "nvfp4", 0.0), ("w4a4", "nvfp4", 0.5)])
def test_modelled_time_is_the_roofline_of_a_30b_layer(rollout: str, fmt: str, k: float) -> None:
    shapes = [
        cost.Shape(n, width, e, e)
        for n, width, e in ((5120, 2048, 1), (2048, 4096, 1), (1536, 2048, 128), (2048, 768, 128))
    ]
    for tokens in cost.TOKENS:
        want = layer_seconds(B200, tokens, fmt, k)
        assert cost.gemm_seconds(shapes, rollout, k, tokens, 8, B200) == pytest.approx(want, rel=1e-12)
