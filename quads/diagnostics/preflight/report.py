"""A whole pre-flight: from a folder and a prompts file to one JSON-ready dict.

    run(folder, prompts, settings, device) -> {"model", "sequences", "verdicts", "pairs", "search", "layers", "drift",
                                               "cost", "shift", "thresholds", "evidence", "settings", "seconds", ...}

Contract: every check of the folder and of the prompts comes before the first layer is read; no number is stated
without the tokens it was taken on. Differs from a study in that nothing is averaged over seeds: the interval is a
bootstrap over the sequences of the file.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from quads import provenance
from quads.bench.roofline import CHIPS
from quads.config import ConfigError, Preflight
from quads.diagnostics.preflight import cost, head, sequences, stream, verdict
from quads.diagnostics.preflight.checkpoint import Checkpoint, make_skeleton
from quads.diagnostics.preflight.variants import default_rac, make_streams, rac_name, search_specs
from quads.layers.setup import Precision
from quads.layers.surgery import SurgeryReport, apply_surgery

log = logging.getLogger(__name__)

Row = dict[str, Any]
WORST = 5
# column -> (what a bad value is, sentence)
OFFENDERS = {
    "weight_qsnr_db_nvfp4": (min, "NVFP4 weights"),
    "activation_qsnr_db_nvfp4": (min, "NVFP4 activations"),
    "activation_qsnr_db_nvfp4_rac": (min, "NVFP4 activations with RAC"),
    "dead_zone_share_of_nonzero": (max, "activations that NVFP4 turns into 0"),
    "rac_energy_share_static": (min, "residual energy that the calibrated mask captures"),
}


def run(folder: Path, prompts: Path, settings: Preflight, device: str) -> Row:
    """Everything that preflight.json holds. Raises ConfigError with what to do for input that cannot be used."""
    begun = time.monotonic()
    skeleton = make_skeleton(folder)
    read = sequences.read_sequences(prompts, folder, skeleton.config.vocab_size, settings)
    surgery, checkpoint = _open(folder, skeleton, settings)
    if settings.generate:
        read = sequences.generate(folder, read, settings, device)
    calibration, scored = sequences.split(read, settings.calibration_share)
    streams = make_streams(settings)
    chunks = [list(sequences.chunks(part, settings.tokens_per_forward)) for part in (scored, calibration)]
    hidden = sum(2 if s.engine else 4 for s in streams) * sum(map(len, scored.ids)) * skeleton.config.hidden_size
    log.info(
        "%s: %d layers, %d streams; %d sequences scored (%d tokens, basis %s), %d calibrate; "
        "hidden states take %.2f GiB",
        type(skeleton).__name__, len(skeleton.model.layers), len(streams), len(scored.ids), scored.scored_tokens,
        read.basis, len(calibration.ids), hidden / 2**30,
    )  # fmt: skip
    done = stream.run_layers(checkpoint, streams, *chunks, default_rac(settings), device)
    scores = head.score_pairs(checkpoint, streams, done, chunks[0], scored, device, settings.seed)
    pairs = head.pair_rows(scores, streams, settings)
    result = {
        "model": _model(folder, skeleton, surgery),
        "sequences": {
            "basis": read.basis,
            "scored": len(scored.ids),
            "scored_tokens": scored.scored_tokens,
            "calibration": len(calibration.ids),
            "cut": read.cut,
        },
        "verdicts": verdicts(pairs, scored.scored_tokens, read.basis, settings),
        "pairs": pairs,
        "search": search(pairs, done, settings),
        "layers": done.layers,
        "worst": worst(done.layers),
        "drift": done.drift,
        "shift": {name: value[scores.mask].double().mean().item() for name, value in scores.shift.items()},
        "cost": _costs(surgery, skeleton, settings),
        "limits": {"ok_below": verdict.OK_BELOW, "will_hurt_from": verdict.HURT_FROM, "loss": verdict.LOSS},
        "evidence": [asdict(e) for e in verdict.EVIDENCE],
        "settings": settings.model_dump(mode="json"),
        "seconds": round(time.monotonic() - begun, 1),
        "peak_gpu_bytes": torch.cuda.max_memory_allocated(device) if device.startswith("cuda") else None,
        "commit": provenance.commit(),
        "hardware": provenance.hardware(),
        "versions": provenance.versions("torch", "transformers"),
    }
    return _json_ready(result)


def _open(folder: Path, skeleton: torch.nn.Module, settings: Preflight) -> tuple[SurgeryReport, Checkpoint]:
    try:
        surgery = apply_surgery(skeleton, Precision("nvfp4", "nvfp4", skip=settings.keep_high_precision))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{folder}: NVFP4 cannot be used on this model: {error}") from error
    return surgery, Checkpoint(folder, skeleton)


def _model(folder: Path, skeleton: torch.nn.Module, surgery: SurgeryReport) -> Row:
    return {
        "folder": folder.name,
        "class": type(skeleton).__name__,
        "parameters": sum(p.numel() for p in skeleton.parameters()),
        "layers": len(skeleton.model.layers),
        "quantized_modules": surgery.quantized,
        "kept_modules": len(surgery.rows) - surgery.quantized,
    }


def verdicts(pairs: Sequence[Row], tokens: int, basis: str, settings: Preflight) -> list[Row]:
    """One row per asked rollout x trainer: level, reason and the numbers behind it."""
    names = {**{name: name for name in settings.rollouts}, "w4a4+rac": rac_name(default_rac(settings))}
    rows = []
    for rollout in settings.rollouts:
        for trainer in settings.trainers:
            pair = next(r for r in pairs if (r["trainer"], r["rollout"]) == (trainer, names[rollout]))
            gap, low, high = (pair[k] for k in ("expected_mean_token_abs_d", "interval_low", "interval_high"))
            given = verdict.judge(gap, low, high, tokens=tokens, minimum=settings.minimum_tokens, basis=basis)
            rows.append(
                {"rollout": names[rollout], "trainer": trainer, "verdict": given.level, "reason": given.reason,
                 "gap": gap, "interval_low": low, "interval_high": high, "p99": pair["drawn_p99_token_abs_d"],
                 "max": pair["drawn_max_token_abs_d"], "clipped_share": pair["drawn_clipped_share_token"]}
            )  # fmt: skip
    return rows


def search(pairs: Sequence[Row], done: stream.Pass, settings: Preflight) -> Row | None:
    """The grid and, per trainer, the cheapest setting whose gap is at most the target (None: none reaches it)."""
    specs = search_specs(settings)
    if not specs:
        return None
    rows = []
    for spec in specs:
        name = rac_name(spec)
        counts = done.selected[f"rollout:{name}"]
        share = sum(a for a, _ in counts) / sum(b for _, b in counts)
        for trainer in settings.trainers:
            pair = next(r for r in pairs if (r["trainer"], r["rollout"]) == (trainer, name))
            rows.append(
                {"trainer": trainer, "k": spec.k, "granularity": spec.granularity, "mask": spec.mask,
                 "selected_channel_share": share, "gap": pair["expected_mean_token_abs_d"],
                 "reached": pair["expected_mean_token_abs_d"] <= settings.gap}
            )  # fmt: skip
    found = {}
    for trainer in settings.trainers:
        # Fewest compensated channels first: that is what the second pass costs. Static before token: no ranking at run
        # time.
        good = [r for r in rows if r["trainer"] == trainer and r["reached"]]
        order = sorted(good, key=lambda r: (r["selected_channel_share"], r["mask"] == "token", r["gap"]))
        found[trainer] = order[0] if order else None
    return {"target": settings.gap, "rows": rows, "found": found}


def worst(layers: Sequence[Row]) -> dict[str, list[Row]]:
    """Per column of OFFENDERS the inputs with the worst values."""
    found = {}
    for column, (kind, _) in OFFENDERS.items():
        ranked = sorted(layers, key=lambda row: row[column], reverse=kind is max)
        found[column] = [{"layer": row["layer"], "value": row[column]} for row in ranked[:WORST]]
    return found


def _costs(surgery: SurgeryReport, skeleton: torch.nn.Module, settings: Preflight) -> list[Row]:
    rac = default_rac(settings)
    rollouts = [(name, name, 0.0) for name in ("bf16", *settings.rollouts) if name in cost.UNITS]
    if "w4a4+rac" in settings.rollouts:
        rollouts.append((rac_name(rac), "w4a4", rac.k))
    config = skeleton.config
    # The embedding is read, not multiplied; a tied head is the embedding.
    parameters = sum(p.numel() for p in skeleton.parameters())
    return cost.cost_rows(
        surgery.rows, parameters, getattr(config, "num_experts_per_tok", 1), rollouts, CHIPS[settings.chip]
    )


def is_hurt(result: Row) -> bool:
    """Whether any verdict is `will hurt`."""
    return any(row["verdict"] == "will hurt" for row in result["verdicts"])


def _json_ready(value: Any) -> Any:
    """Floats that JSON does not have become None."""
    if isinstance(value, dict):
        return {key: _json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
