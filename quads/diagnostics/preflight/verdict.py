"""ok | risky | will hurt | unknown: the predicted gap beside runs that were trained to the end. No torch.

    ok         gap < OK_BELOW      geometric middle of: the largest gap without a measured loss, the next larger gap
    will hurt  gap >= HURT_FROM    geometric middle of: the smallest gap from which on every run lost at least LOSS
                                   points, the next smaller gap
    risky      between them; the runs there lost 3 to 5 points
    unknown    a gap that is no number, too few scored tokens, or prompt tokens only and the verdict would change
               within a factor PROMPT_MARGIN

Both limits are computed from EVIDENCE, the only home of these numbers: this project's toy (154k parameters, 60 GRPO
steps, arithmetic, vLLM on CPU). Gap: mean |log pi_trainer - log pi_rollout| before the first update. Points: pass@1 in
the arm's own engine minus the BF16 arm's, percent, with the 95 % interval over problems. Gaps of toy_s1 and toy_s8 are
those of one training batch, which at strength 12 shows 0.7 to 0.8 of the captured gap: the limits are rather strict.
What this cannot say: whether the limits hold for a model of real size. A gap at step 0 is no training result, it moves
with training, and importance correction changes what a gap does (nvfp4_naive with truncated importance sampling lost
12.8 points instead of 71.2). Nothing here is calibrated on the paper's 25B model, whose gaps are largest-token values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LOSS = 5.0
# On the toy the gap on prompt tokens was 1.6 to 3.0 times that on sampled responses (docs/preflight.md).
PROMPT_MARGIN = 3.0
LEVELS = ("ok", "risky", "will hurt")


@dataclass(frozen=True)
class Evidence:
    """One trained arm; source: table of the points / table of the gap, below docs/."""

    run: str
    gap: float
    points: float
    low: float
    high: float
    source: str


_S12, _SEEDS, _ALL, _S8, _S1 = (
    "measured/toy/table.md, diagnostics.md",
    "measured/toy_3seeds/table.md, measured/toy_3seeds/diagnose/decomposition.md",
    "measured/toy_all/table.md, diagnostics.md",
    "measured/toy_s8/table.md, measured/toy_s8/curves.csv (step 1)",
    "measured/toy_s1/table.md, measured/toy_s1/curves.csv (step 1)",
)
EVIDENCE = (
    Evidence("toy_all w4a16 (W4A16 / W4A16)", 0.0065, 0.3, -0.8, 1.4, _ALL),
    Evidence("toy_all fp8 (BF16 / FP8)", 0.0225, -0.1, -1.1, 0.8, _ALL),
    Evidence("toy_s1 quads (W4A16 / W4A4+RAC)", 0.0406, -3.5, -4.8, -2.3, _S1),
    Evidence("toy_s8 quads (W4A16 / W4A4+RAC)", 0.0408, -3.3, -4.7, -2.0, _S8),
    Evidence("toy_3seeds quads (W4A16 / W4A4+RAC)", 0.0511, -5.1, -6.1, -4.0, _SEEDS),
    Evidence("toy quads (W4A16 / W4A4+RAC)", 0.0620, -3.7, -4.6, -2.9, _S12),
    Evidence("toy_s1 qat_only (W4A16 / W4A4)", 0.0730, -6.3, -8.1, -4.7, _S1),
    Evidence("toy_s1 nvfp4_naive (BF16 / W4A4)", 0.0826, -8.9, -10.9, -6.8, _S1),
    Evidence("toy_s8 qat_only (W4A16 / W4A4)", 0.1035, -13.2, -15.5, -11.1, _S8),
    Evidence("toy_all rac_only (BF16 / W4A4+RAC)", 0.113, -54.9, -59.0, -50.7, _ALL),
    Evidence("toy_all qat_symmetric (W4A4 / W4A4)", 0.140, -13.4, -16.0, -10.9, _ALL),
    Evidence("toy_s8 nvfp4_naive (BF16 / W4A4)", 0.1615, -30.7, -34.1, -27.3, _S8),
    Evidence("toy_3seeds qat_only (W4A16 / W4A4)", 0.198, -47.8, -50.9, -44.9, _SEEDS),
    Evidence("toy qat_only (W4A16 / W4A4)", 0.210, -36.1, -39.0, -33.3, _S12),
    Evidence("toy_3seeds nvfp4_naive (BF16 / W4A4)", 0.243, -73.6, -76.6, -70.6, _SEEDS),
    Evidence("toy nvfp4_naive (BF16 / W4A4)", 0.247, -71.2, -74.0, -68.3, _S12),
)


def limits(evidence: tuple[Evidence, ...]) -> tuple[float, float]:
    """(OK_BELOW, HURT_FROM) of the module docstring."""
    runs = sorted(evidence, key=lambda e: e.gap)
    # Runs before the first one whose interval excludes 0, and runs before the tail in which everyone lost LOSS.
    harmless = next(i for i, e in enumerate(runs) if e.high < 0)
    harmful = next(i for i in range(len(runs)) if all(e.points <= -LOSS for e in runs[i:]))
    middle = [math.sqrt(runs[i - 1].gap * runs[i].gap) for i in (harmless, harmful)]
    return middle[0], middle[1]


OK_BELOW, HURT_FROM = limits(EVIDENCE)


@dataclass(frozen=True)
class Verdict:
    """level, and the sentence that justifies it."""

    level: str
    reason: str


def level_of(gap: float) -> str:
    """The level of a mean gap (nats) measured on rollout tokens."""
    return LEVELS[0] if gap < OK_BELOW else LEVELS[2] if gap >= HURT_FROM else LEVELS[1]


def nearest(gap: float, count: int = 2) -> list[Evidence]:
    """The trained runs whose gap is closest, by ratio."""
    return sorted(EVIDENCE, key=lambda e: abs(math.log(max(gap, 1e-9) / e.gap)))[:count]


def judge(gap: float, low: float, high: float, *, tokens: int, minimum: int, basis: str) -> Verdict:
    """Verdict on a predicted mean gap with its 95 % interval; basis as in quads.diagnostics.preflight.sequences."""
    if not all(map(math.isfinite, (gap, low, high))):
        return Verdict(
            "unknown", f"gap {gap:.3g} [{low:.3g}, {high:.3g}] is not finite: a trainer or rollout overflows"
        )
    if tokens < minimum:
        return Verdict("unknown", f"{tokens} scored tokens are fewer than {minimum}: give more or longer sequences")
    level = level_of(gap)
    near = "; ".join(f"{e.run} at {e.gap:.3g}: {e.points:+.1f} points" for e in nearest(gap))
    if basis == "prompt":
        ends = level_of(gap / PROMPT_MARGIN), level_of(gap * PROMPT_MARGIN)
        if len({level, *ends}) > 1:
            return Verdict(
                "unknown",
                f"gap {gap:.3g} is on prompt tokens, from which that on responses can differ by a factor "
                f"{PROMPT_MARGIN:g}: {ends[0]} to {ends[1]}; give responses or --generate",
            )
    crossed = [name for name, limit in (("ok", OK_BELOW), ("will hurt", HURT_FROM)) if low < limit < high]
    doubt = f"; the interval [{low:.3g}, {high:.3g}] crosses the limit of {' and '.join(crossed)}" if crossed else ""
    return Verdict(level, f"gap {gap:.3g}; nearest trained runs: {near}{doubt}")
