"""The step-0 studies: each a function Context -> Study (rows, figure, tables, notes). No training, no engine.

    decomposition   delta_weight + delta_act + delta_num per arm, delta_num's parts, weight check, routing
    tokens          gap and its terms by response position and by decile of the trainer's entropy, per arm
    definitions     every definition of the largest gap, and how many times that of the bf16 arm it is
    quadrants       sign(advantage) x sign(d), ESS, chi2, truncation and clipping, per arm
    fig7            per layer: symmetric, asymmetric and BF16 trainers against the rollout's own layer outputs
    layers          per layer: QSNR, dead zone, RAC energy, mask overlap
    k_sweep         share k of compensated blocks: gap against the QAT trainer and against BF16
    masks           granularity x staticness at one k, and how much a sequence's log-probs depend on its batch
    matrix          every trainer precision x every rollout precision
    fp8             FP8 rollout beside NVFP4 ones, against BF16 and own-format trainers, decomposed
    scales          granularity of the activation global scale (emulated)
    drift           perturbation test per layer, and amplification of engine drift in the log-probs
    outliers        injected outlier channels weaker, off, as trained (emulated)

The rollout side is what the real engine said while generating (`logp` of a capture); the trainer side is the surgery
model on the same tokens. Each row belongs to one seed (its own prompts and samples).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quads.diagnostics import capture, drift, figures, ladder, layers, metrics, scales
from quads.diagnostics import outliers as outlier_channels
from quads.diagnostics.by_token import definitions, quadrants, tokens
from quads.diagnostics.context import Context, Row, Study, Table
from quads.diagnostics.decompose import TERMS, summary
from quads.diagnostics.layerwise import fig7
from quads.diagnostics.measure import NO_KERNEL, arm_decomposition, gap_rows, gap_with_terms, precision_name, replayed
from quads.layers.setup import Precision

GAP = ("mean_token_abs_d", "p99_token_abs_d", "max_token_abs_d", "mean_seq_max_token_abs_d", "k3", "ess_seq")


def decomposition(context: Context) -> Study:
    """Per arm and seed: every term; per arm: weight check and routing agreement."""
    rows: list[Row] = []
    for arm in context.arms:
        mode = capture.arm_engine(arm)
        parts = arm_decomposition(context, arm)
        if arm.trainer.weight == mode.mode.weight and bool((parts.terms["delta_weight"] != 0).any()):
            raise ValueError(f"arm {arm.name} trains with its rollout's weights, but delta_weight is not 0")
        keys = {"arm": arm.name, "trainer": precision_name(context.trainer_precision(arm)), "rollout": mode.id}
        for seed, own in context.seeds(mode.id):
            rows += [{**keys, "seed": seed, **row} for row in summary(parts, own)]
        weights = context.dump(mode.id).meta["weights"]
        note = f"elements that differ, engine against trainer, of {weights['elements']} in {weights['tensors']} tensors"
        rows.append({**keys, "level": "weights", "term": "different", "value": weights["different"], "note": note})
        if context.dump(mode.id).routed is not None:
            for name, value in replayed(context, mode)[2].items():
                rows.append({**keys, "level": "routing", "term": name, "value": value, "note": "engine prefill"})
    shown = ("mean_token_abs", "p99_token_abs", "max_token_abs")
    tables = [
        Table("Terms", ("arm", "level", "term"), shown),
        Table("Weights and routing", ("arm", "level", "term", "note"), ("value",)),
    ]
    notes = [NO_KERNEL, "routing is that of prefill, one sequence at a time; decode's own routing is not recorded"]
    return Study(rows, figures.decomposition(rows, [a.name for a in context.distinct_arms]), tables, notes)


def layer_study(context: Context) -> Study:
    """Per layer on tokens of the RAC engine, with the static masks that engines of both granularities used."""
    model = context.model_at(context.rac_mode.trainer_weights)
    rows: list[Row] = []
    for granularity in capture.GRANULARITIES:
        mode = context.modes[capture.rac_engine(context.settings.mask_k, context.arms, granularity=granularity).id]
        masks_, rac = context.masks(mode), mode.mode.rac
        assert masks_ is not None and rac is not None
        for seed, _ in context.seeds(context.rac_mode.id):
            tokens_ = context.calibration_like_tokens(context.rac_mode.id, seed=seed)
            table = layers.layer_table(model, tokens_, rac, masks_)
            rows += [{"granularity": granularity, "seed": seed, **row} for row in table]
    columns = tuple(key for key in rows[0] if key not in ("granularity", "layer", "channels", "seed"))
    return Study(rows, figures.layer_bars(rows), [Table("Layers", ("granularity", "layer"), columns)])


def k_sweep(context: Context) -> Study:
    """Gap against k for a QAT trainer (T1) and a BF16 one, with delta_act and delta_num of T1; and the BF16 floor."""
    rows: list[Row] = []
    for granularity in capture.GRANULARITIES:
        for k in context.settings.k:
            mode = context.modes[capture.rac_engine(k, context.arms, granularity=granularity).id]
            share = _selected_share(context, mode)
            for trainer in (mode.trainer_weights, Precision(skip=mode.skip)):
                keys = {"granularity": granularity, "k": k, "trainer": precision_name(trainer), "rollout": mode.id}
                rows += gap_with_terms(context, mode, trainer, selected_channel_share=share, **keys)
    plain = next((m for m in context.modes.values() if m.mode.name == "bf16"), None)
    if plain is not None:
        keys = {"granularity": "none", "k": "floor", "trainer": "bf16/bf16", "rollout": plain.id}
        rows += gap_with_terms(context, plain, plain.trainer_weights, **keys)
    values = ("selected_channel_share", *GAP, "mean_microbatch_max_token_abs_d", "rollout_reward",
              "mean_token_abs_delta_act", "mean_token_abs_delta_num")  # fmt: skip
    notes = ["ceil(k n) units of n are compensated: with few blocks the share really selected exceeds k (its column)"]
    return Study(rows, figures.k_sweep(rows), [Table("k sweep", ("granularity", "trainer", "k"), values)], notes)


def _selected_share(context: Context, mode: capture.EngineMode) -> float:
    """Channels with a second pass over all channels, all layers together."""
    masks_ = context.masks(mode)
    if masks_ is None:
        return 0.0
    return sum(int(m.sum()) for m in masks_.values()) / sum(m.numel() for m in masks_.values())


def masks(context: Context) -> Study:
    """Granularity x staticness at one k; batch dependence is a term of delta_num of its own."""
    rows: list[Row] = []
    cases = [("none", "none", context.modes[capture.rac_engine(0.0, context.arms).id])] if _has_plain(context) else []
    for granularity, mask in capture.MASKS:
        mode = capture.rac_engine(context.settings.mask_k, context.arms, granularity=granularity, mask=mask)
        cases.append((granularity, mask, context.modes[mode.id]))
    for granularity, mask_kind, mode in cases:
        trainer = mode.trainer_weights
        new = gap_with_terms(
            context, mode, trainer, granularity=granularity, mask=mask_kind, trainer=precision_name(trainer)
        )
        t2 = context.score(mode.trainer, mode.id, masks=mode).logp
        for row, (_, own) in zip(new, context.seeds(mode.id), strict=True):
            row |= _batch_terms(context, mode, t2, own)
        rows += new
    shown = ("mean_token_abs_d", "max_token_abs_d", "k3", "rollout_reward", "mean_token_abs_delta_act",
             "mean_token_abs_delta_num", "mean_token_abs_num_alone", "mean_token_abs_num_batch",
             "max_token_abs_num_batch", "mean_token_abs_num_decode")  # fmt: skip
    notes = [
        "delta_num = num_alone (engine, one sequence at a time, minus T2) + num_batch (among others minus alone) "
        "+ num_decode (recorded while generating minus prefill); signed sums, on the sequences scored alone as well",
        "num_batch includes the engine's own bf16 batch effects: compare with the rows `none` and `token`",
    ]
    return Study(rows, figures.masks(rows), [Table("Masks", ("granularity", "mask"), shown)], notes)


def _batch_terms(context: Context, mode: capture.EngineMode, t2: Tensor, own_B: Tensor) -> Row:
    """delta_num of the sequences that were also scored alone, in three steps: T2 -> alone -> in a batch -> decode."""
    values = context.dump(mode.id).values
    keep = torch.isfinite(values["single"]) & context.dump(mode.id).tokens.mask & own_B[:, None]
    steps = [t2, *(values[name] for name in ("single", "prefill", "logp"))]
    found: Row = {}
    for name, after, before in zip(("num_alone", "num_batch", "num_decode"), steps[1:], steps[:-1], strict=True):
        size = (after.double() - before.double())[keep].abs()
        found[f"mean_token_abs_{name}"], found[f"max_token_abs_{name}"] = size.mean().item(), size.max().item()
    return found


def _has_plain(context: Context) -> bool:
    return capture.rac_engine(0.0, context.arms).id in context.modes


def matrix(context: Context) -> Study:
    """Every trainer precision x every rollout mode of the arms, on the tokens that the rollout sampled."""
    rac = context.rac_mode
    group, skip = rac.mode.scale_group, rac.skip
    trainers = {
        "bf16": Precision(scale_group=group, skip=skip),
        "fp8": Precision("fp8", "fp8", group, skip=skip),
        "w4a16": Precision("nvfp4", "bf16", group, skip=skip),
        "w4a4": Precision("nvfp4", "nvfp4", group, skip=skip),
        "w4a4+rac": rac.trainer,
    }
    rollouts = {mode.mode.name: mode for mode in map(capture.arm_engine, context.arms)}
    rows: list[Row] = []
    for rollout in sorted(rollouts, key=list(trainers).index):
        mode = rollouts[rollout]
        for name, precision in trainers.items():
            scored = context.score(precision, mode.id, masks=rac)
            rows += gap_rows(context, scored, mode.id, trainer=name, rollout=rollout)
    return Study(rows, figures.matrix(rows), [Table("Matrix", ("rollout", "trainer"), (*GAP, "clipped_share_token"))])


def fp8(context: Context) -> Study:
    """FP8 rollout beside the NVFP4 ones: three trainers each, decomposed."""
    rows: list[Row] = []
    seen: dict[str, Any] = {}
    for arm in context.arms:
        seen.setdefault(capture.arm_engine(arm).id, arm)
    for mode_id, arm in seen.items():
        mode = context.modes[mode_id]
        trainers = dict.fromkeys([Precision(scale_group=mode.mode.scale_group, skip=mode.skip), mode.trainer_weights])
        if mode.mode.rac is None:
            trainers[mode.trainer] = None
        for precision in trainers:
            parts = arm_decomposition(context, arm, precision)
            for seed, own in context.seeds(mode_id):
                terms = {row["term"]: row for row in summary(parts, own) if row["level"] in ("total", "term")}
                rows.append(
                    {"rollout": mode_id, "trainer": precision_name(precision), "seed": seed}
                    | {f"mean_token_abs_{t}": terms[t]["mean_token_abs"] for t in ("total", *TERMS)}
                    | {f"max_token_abs_{t}": terms[t]["max_token_abs"] for t in ("total", *TERMS)}
                )
    values = tuple(f"mean_token_abs_{t}" for t in ("total", *TERMS))
    return Study(rows, figures.stacked(rows), [Table("Formats", ("rollout", "trainer"), values)])


def scale_study(context: Context) -> Study:
    """T2 - T1 for three granularities of the activation global scale, without and with RAC."""
    mode = context.rac_mode
    dump, keep = context.dump(mode.id), context.dump(mode.id).tokens.mask
    t1 = context.score(mode.trainer_weights, mode.id)
    calibration = context.calibration_like_tokens(mode.id)
    rows: list[Row] = []
    for with_rac in (False, True):
        for granularity in scales.GRANULARITIES:
            model = context.model_at(mode.trainer_weights)
            constant = scales.calibrated_amax(model, calibration) if granularity == "constant" else None
            counter = scales.with_scale(
                model, granularity, masks=context.masks(mode) if with_rac else None, constant=constant
            )
            t2 = ladder.score(model, dump.tokens, tokens_per_forward=context.settings.tokens_per_forward)
            for seed, own in context.seeds(mode.id):
                table = metrics.gap_table(t1.logp[own], t2.logp[own], keep[own], context.gap_settings)
                rows.append(
                    {"rac": with_rac, "scale": granularity, "seed": seed, **table, "clipped_rows": counter.share}
                )
    notes = [
        "emulated: d is T1 - T2 in float32 on tokens of the RAC engine (not sampled from either: k1, k2, k3 are no KL)",
        "a constant scale clips rows above the calibrated range; calibration tokens are part of the scored ones",
    ]
    return Study(rows, figures.scales(rows), [Table("Scales", ("rac", "scale"), (*GAP[:4], "clipped_rows"))], notes)


def drift_study(context: Context) -> Study:
    """Perturbation test per layer, and |E_pre - T2| of every mode over that of the BF16 engine."""
    mode = context.rac_mode
    masks_, rac = context.masks(mode), mode.mode.rac
    assert masks_ is not None and rac is not None
    model = context.model_at(mode.trainer_weights)
    tokens_ = context.calibration_like_tokens(mode.id)
    settings = context.settings
    rows = drift.amplification_table(model, tokens_, rac, masks_, settings.noise, settings.seeds)
    whole: dict[tuple[str, int], float] = {}
    for arm in context.arms:
        own_mode = capture.arm_engine(arm)
        dump = context.dump(own_mode.id)
        t2 = context.score(own_mode.trainer, own_mode.id, masks=own_mode, stored=True).logp.double()
        for seed, own in context.seeds(own_mode.id):
            keep = dump.tokens.mask & own[:, None]
            whole[own_mode.id, seed] = (dump.values["prefill"].double() - t2)[keep].abs().mean().item()
    for (name, seed), size in whole.items():
        base = whole.get(("bf16", seed))
        ratio = size / base if base else None
        rows.append({"layer": "log-probs", "quantizer": name, "seed": seed, "mean_token_abs_drift": size,
                     "amplification_over_bf16_engine": ratio})  # fmt: skip
    tables = [
        Table("Perturbation", ("quantizer", "noise_over_rms"), ("amplification_change_over_noise",)),
        Table("Log-probs: engine prefill against T2", ("layer", "quantizer"),
              ("mean_token_abs_drift", "amplification_over_bf16_engine")),
    ]  # fmt: skip
    return Study(rows, figures.drift(rows), tables, ["rows of the first table average over layers, seeds give the +-"])


def outlier_study(context: Context) -> Study:
    """T2 - T0 and its terms at other strengths of the injected channels, on tokens of the BF16 engine."""
    outliers = context.experiment.warmup.outliers
    outlier_channels.injected_strength(context.model, outliers)
    mode = context.rac_mode
    rac = mode.mode.rac
    assert rac is not None
    source = capture.EngineMode(mode.mode.__class__(), mode.skip, True).id
    if source not in context.modes:
        source = mode.id
    tokens_, keep = context.dump(source).tokens, context.dump(source).tokens.mask
    rows: list[Row] = []
    for strength in context.settings.outlier_strengths:
        rungs = _rungs_at(context, strength, mode, tokens_)
        for seed, own in context.seeds(source):
            row: Row = {"strength": strength, "seed": seed}
            for name, (after, before) in rungs.items():
                size = (after.double() - before.double())[keep & own[:, None]].abs()
                row |= {f"mean_token_abs_{name}": size.mean().item(), f"max_token_abs_{name}": size.max().item()}
            rows.append(row)
    values = tuple(key for key in rows[0] if key.startswith("mean_"))
    notes = [f"emulated, tokens of engine {source}; in the trainer's float32 arithmetic, without engine drift"]
    return Study(rows, figures.outliers(rows), [Table("Outliers", ("strength",), values)], notes)


def _rungs_at(
    context: Context, strength: float, mode: capture.EngineMode, tokens_: ladder.Tokens
) -> dict[str, tuple[Tensor, Tensor]]:
    """Named differences (after, before) of rungs at one strength; masks are calibrated anew."""
    from transformers import AutoModelForCausalLM

    from quads.trainer.calibration import calibrate

    rac = mode.mode.rac
    assert rac is not None

    def scored(precision: Precision, masks_: dict[str, Tensor] | None = None) -> Tensor:
        model = AutoModelForCausalLM.from_pretrained(context.model, dtype=torch.float32, local_files_only=True)
        outlier_channels.rescale(model, context.experiment.warmup.outliers, strength)
        ladder.prepare_model(model.to(context.device), precision, masks=masks_)
        if precision == mode.trainer_weights and not found:
            ids = context.calibration_like_tokens(context.rac_mode.id)
            found.update(calibrate(model, ids, torch.ones_like(ids), rac))
        return ladder.score(model, tokens_, tokens_per_forward=context.settings.tokens_per_forward).logp

    found: dict[str, Tensor] = {}
    group, skip = mode.mode.scale_group, mode.skip
    t0 = scored(Precision(scale_group=group, skip=skip))
    t1 = scored(mode.trainer_weights)
    t2 = scored(Precision("nvfp4", "nvfp4", group, skip=skip))
    t2_rac = scored(mode.trainer, found)
    t_fp8 = scored(Precision("fp8", "fp8", group, skip=skip))
    return {
        "w4a4_T2_minus_T0": (t2, t0),
        "weight_T1_minus_T0": (t1, t0),
        "act_w4a4_T2_minus_T1": (t2, t1),
        "act_rac_T2_minus_T1": (t2_rac, t1),
        "fp8_T2_minus_T0": (t_fp8, t0),
    }


STUDIES: dict[str, Callable[[Context], Study]] = {
    "decomposition": decomposition,
    "tokens": tokens,
    "definitions": definitions,
    "quadrants": quadrants,
    "fig7": fig7,
    "layers": layer_study,
    "k_sweep": k_sweep,
    "masks": masks,
    "matrix": matrix,
    "fp8": fp8,
    "scales": scale_study,
    "drift": drift_study,
    "outliers": outlier_study,
}
