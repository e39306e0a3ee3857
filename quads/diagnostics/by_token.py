"""Studies that look at single tokens: where in a response and at which entropy, definitions of max, policy ratios.

Each arm with its own trainer against its own engine, on the tokens that the engine sampled; one row per seed and bin.
Definitions of every quantity: metrics.py. Differs from training's log in that all arms see step-0 weights.
"""

from __future__ import annotations

from typing import Any

from quads.diagnostics import capture, figures, figures_arms, metrics
from quads.diagnostics.context import Context, Row, Study, Table
from quads.diagnostics.decompose import TERMS
from quads.diagnostics.measure import arm_decomposition, gap_rows

DEFINITIONS = (
    "max_token_abs_d",
    "mean_microbatch_max_token_abs_d",
    "mean_seq_max_token_abs_d",
    "p999_token_abs_d",
    "p99_token_abs_d",
    "max_seq_mean_token_abs_d",
    "max_seq_abs_sum_d",
    "max_token_abs_prob_diff",
    "mean_token_abs_d",
)
QUADRANTS = tuple(f"share_token_adv_{a}_d_{d}" for a in ("pos", "neg") for d in ("pos", "neg"))
RATIOS = ("ess_token", "ess_seq", "chi2_token", "chi2_seq", "clipped_share_token", "truncated_share", "k1", "k2", "k3",
          "rollout_reward")  # fmt: skip


def tokens(context: Context) -> Study:
    """Total gap and its terms of every arm by response position and by the decile of the trainer's entropy."""
    rows: list[Row] = []
    for arm in context.arms:
        mode = capture.arm_engine(arm)
        mask = context.dump(mode.id).tokens.mask
        entropy = context.score(context.trainer_precision(arm), mode.id).entropy
        parts = arm_decomposition(context, arm)
        for seed, own in context.seeds(mode.id):
            merged: dict[tuple[Any, Any], Row] = {}
            for term in ("total", *TERMS):
                value = (parts.total if term == "total" else parts.terms[term])[own]
                bins = [*metrics.by_position(value, mask[own]), *metrics.by_entropy(value, entropy[own], mask[own])]
                for row in bins:
                    kept = merged.setdefault((row["by"], row["bin"]), {"arm": arm.name, "seed": seed, **row})
                    kept[f"mean_token_abs_{term}"] = row["mean_token_abs_d"]
            rows += merged.values()
    columns = ("tokens", "bin_mean", "mean_token_abs_d", *(f"mean_token_abs_{t}" for t in TERMS))
    tables = [Table("Gap by position and entropy", ("by", "bin", "arm"), columns)]
    return Study(rows, figures.tokens(_distinct(context, rows)), tables)


def definitions(context: Context) -> Study:
    """Every definition of the largest gap side by side: which one a number means decides how arms compare."""
    rows: list[Row] = []
    for arm in context.arms:
        mode = capture.arm_engine(arm)
        scored = context.score(context.trainer_precision(arm), mode.id, masks=context.rac_mode)
        for table in gap_rows(context, scored, mode.id):
            rows += [
                {"arm": arm.name, "definition": name, "seed": table["seed"], "value": table[name]}
                for name in DEFINITIONS
            ]
    floor = {(r["definition"], r["seed"]): r["value"] for r in rows if r["arm"] == "bf16"}
    for row in rows:
        base = floor.get((row["definition"], row["seed"]))
        row["over_bf16_arm"] = row["value"] / base if base else None
    tables = [Table("Definitions of the largest gap", ("definition", "arm"), ("value", "over_bf16_arm"))]
    notes = ["unit: nats, but for max_token_abs_prob_diff (a probability); over_bf16_arm: ratio of one seed's values"]
    return Study(rows, figures_arms.definitions(_distinct(context, rows), DEFINITIONS), tables, notes)


def quadrants(context: Context) -> Study:
    """sign(advantage) x sign(d), effective sample size, chi2, truncated and clipped shares, KL estimates per arm."""
    rows: list[Row] = []
    for arm in context.arms:
        mode = capture.arm_engine(arm)
        scored = context.score(context.trainer_precision(arm), mode.id, masks=context.rac_mode)
        for table in gap_rows(context, scored, mode.id):
            chosen = {name: table[name] for name in (*QUADRANTS, "share_token_no_sign", *RATIOS) if name in table}
            rows.append({"arm": arm.name, "seed": table["seed"], **chosen})
    tables = [
        Table("Sign of advantage and gap", ("arm",), (*QUADRANTS, "share_token_no_sign")),
        Table("Policy ratios", ("arm",), RATIOS),
    ]
    notes = [
        "advantage as in GRPO, within a prompt's samples; share_token_no_sign: the group agrees (advantage 0) or d = 0",
        "with a negative advantage and d > 0 the clipped policy loss has no bound: share_token_adv_neg_d_pos",
        "k1, k2, k3, chi2 estimate divergences because every arm's tokens were sampled by its own engine at "
        "temperature 1",
    ]
    return Study(rows, figures_arms.quadrants(_distinct(context, rows), QUADRANTS), tables, notes)


def _distinct(context: Context, rows: list[Row]) -> list[Row]:
    """Rows of one arm for every trainer and engine: the others would lie on top of it in a figure."""
    names = {arm.name for arm in context.distinct_arms}
    return [row for row in rows if row["arm"] in names]
