"""What differs from the paper in this very experiment, in sentences; what a setting decides is read from it."""

from __future__ import annotations

from collections.abc import Sequence

from quads.config import Experiment
from quads.paper.sources import Source


def deviations(experiment: Experiment, sources: Sequence[Source]) -> list[str]:
    """Sentences for the report, most important first."""
    arms = {s.arm.name: s.arm for s in sources}
    backends = sorted({str((s.train.get("receipt") or {}).get("backend", "not recorded")) for s in sources})
    out = [
        "Software: vLLM and verl (FSDP2) instead of SGLang and Megatron-LM; the paper has no public code.",
        _model(experiment),
        f"Engine: NVFP4 products are {', '.join(backends)}. Emulation gives the numerics, never a speed.",
        "Numbers of the paper that have no counterpart here (its benchmarks, its speeds) stay empty and say why.",
    ]
    rac = next((a.rollout.rac for a in arms.values() if a.rollout.rac), None)
    if rac is not None:
        out.append(
            f"RAC: {rac.granularity} masks, {rac.mask}, k = {100 * rac.k:g} %, score {rac.score}; the paper leaves the "
            "unit of the mask, its statistic and its staticness open."
        )
    if any(a.rollout.weight == "fp8" for a in arms.values()):
        out.append("FP8: the trainer of the FP8 arm computes in BF16; the paper's trains in FP8.")
    old = sorted({a.correction.old_log_probs for a in arms.values()})
    out.append(
        f"PPO ratio: old log-probs come from the {' or the '.join(old)}; the paper does not say which it used. "
        f"Dual clip: {'off' if experiment.grpo.dual_clip is None else f'{experiment.grpo.dual_clip:g}'}."
    )
    seeds = len(experiment.seeds)
    out.append(
        f"Seeds: {seeds} training seed{'s' if seeds > 1 else ''}; intervals of accuracies redraw problems, not "
        "training seeds. The paper gives no intervals and no seeds."
    )
    return out


def _model(experiment: Experiment) -> str:
    """One sentence. A pretrained checkpoint brings its own outliers."""
    checkpoint = experiment.model.checkpoint
    if checkpoint is not None:
        return f"Model: {checkpoint.repo or checkpoint.path}; the paper trains an in-house 25B-A2.8B model."
    strength = experiment.warmup.outliers.strength
    injected = (
        f"outlier channels of strength {strength:g} are injected, because a model this small has none"
        if strength > 1
        else "no outlier channels are injected"
    )
    return f"Model and task: {experiment.title}; the paper trains an in-house 25B-A2.8B model; {injected}."
