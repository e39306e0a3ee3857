"""Table 3 and Fig. 7 as cells: step-0 studies of the warm checkpoint, and the trained arms where they ran.

    Table 3   largest gap against the share k of compensated channels; every row is judged against the row before it
    Fig. 7    mismatch of a symmetric trainer minus that of an asymmetric (W4A16) one, layer by layer (study `fig7`)

Which "largest" the paper aggregates is not known: two definitions are shown, the largest token and the mean over
sequences of the largest token. Differences are taken seed by seed, Student's interval over the study's seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from quads.evaluation.stats import Interval
from quads.paper import claims, status
from quads.paper.cells import Cell, PaperTable
from quads.paper.paper_tables import Inputs, claim_cell, trained_gap
from quads.paper.study_files import Moments, StudyFile, over_seeds, paired, welch

LARGEST = {"max_token_abs_d": "largest token", "mean_seq_max_token_abs_d": "mean over sequences of the largest token"}
QAT_TRAINER = "nvfp4/bf16"
GRANULARITIES = ("channel", "block16")
REACHED = 0.9  # k = 100 % "reaches" the BF16 floor: this share of the way from k = 0
LOG_PROBS = "log-probs"
BUILT_UP = "built-up mismatch"
MISMATCH = {
    "mean_token_rel_l2": BUILT_UP,
    "mean_same_input_token_rel_l2": "mismatch added on equal inputs",
    "mean_token_abs_d": "log-prob gap",
}
# Symmetric trainer and rollout; the first two are what the paper may mean, the last one shares the RAC masks too.
PAIRS = (("w4a4", "w4a4"), ("w4a4", "w4a4+rac"), ("w4a4+rac", "w4a4+rac"))
ASYMMETRIC = "w4a16"


def paper_gap(k: float) -> tuple[float | None, str]:
    """The paper's largest gap at a share k, and its grade."""
    if k == 0:
        return claims.GAP_NAIVE, "S"
    value = claims.TABLE_3.get(100 * k)
    return value, "Q" if value is not None else ""


def table_3(x: Inputs) -> PaperTable:
    """Largest gap against k."""
    study = x.study("k_sweep")
    cells: list[Cell] = []
    for granularity in GRANULARITIES:
        for column, words in LARGEST.items():
            cells += _sweep(study, granularity, column, words, x)
    naive, quads = (claims.GAP_NAIVE, "S"), (claims.TABLE_3[50.0], "Q")
    cells.append(trained_gap("k = 0 %, QAT trainer", "qat_only", None, "gap_max", naive, x))
    cells.append(trained_gap("k = 50 %, QUADS", "quads", "qat_only", "gap_max", quads, x))
    return PaperTable(
        "table3",
        "Table 3: share k of compensated channels against the largest log-prob gap",
        "Step 0: one warm checkpoint, no training, a W4A16 trainer against the real engine at each k; the last rows "
        "are trained arms. Judged is each step in k: does the largest gap fall? Seeds draw other prompts and samples.",
        tuple(cells),
    )


def _sweep(study: StudyFile | None, granularity: str, column: str, words: str, x: Inputs) -> list[Cell]:
    measure = f"{words}, {granularity} masks, step 0"
    if study is None:
        shares = (0.0, *(k / 100 for k in claims.TABLE_3))
        rows = [(f"k = {100 * k:g} %", *paper_gap(k)) for k in shares] + [("BF16 / BF16", claims.GAP_BF16, "S")]
        return [Cell(row, measure, "nats", x.no_study(), paper, grade) for row, paper, grade in rows]
    confidence = x.experiment.evaluation.confidence
    cells: list[Cell] = []
    before: tuple[float, dict[int, float]] | None = None
    for k in [k for k in study.values("k") if isinstance(k, float)]:
        own = study.by_seed(column, k=k, granularity=granularity, trainer=QAT_TRAINER)
        if not own:
            continue
        paper, grade = paper_gap(k)
        step = paired(own, before[1], confidence) if before else None
        claimed = paper_gap(before[0])[0] if before else None
        fall = round(paper - claimed, 3) if paper is not None and claimed is not None else None
        cells.append(
            Cell(
                f"k = {100 * k:g} %", measure, "nats", status.greater(step, sign=-1) if step else status.REFERENCE,
                paper, grade, over_seeds(list(own.values()), confidence), "seeds of the study",
                fall, step, f"k = {100 * before[0]:g} %" if before else "",
                tuple(own), (study.key,),
            )
        )  # fmt: skip
        before = k, own
    floor = study.by_seed(column, k="floor")
    if floor:
        here = over_seeds(list(floor.values()), confidence)
        cells.append(
            Cell("BF16 / BF16", measure, "nats", status.REFERENCE, claims.GAP_BF16, "S", here, "seeds of the study",
                 seeds=tuple(floor), sources=(study.key,))
        )  # fmt: skip
    return cells


def steps_fall(cells: Sequence[Cell], whole: Interval | None) -> status.Verdict | None:
    """One verdict for a sweep: its last value minus its first, and every step; None where the study was not run."""
    steps = [c.verdict for c in cells if c.here_difference is not None]
    return status.several([status.greater(whole, sign=-1), *steps]) if steps and whole is not None else None


def share_closed(study: StudyFile, granularity: str, column: str, confidence: float) -> Interval | None:
    """(gap at k = 0 - gap at k = 100 %) / (gap at k = 0 - BF16's), seed by seed."""
    where = {"granularity": granularity, "trainer": QAT_TRAINER}
    zero, full = (study.by_seed(column, k=k, **where) for k in (0.0, 1.0))
    floor = study.by_seed(column, k="floor")
    return over_seeds(
        [(zero[s] - full[s]) / (zero[s] - floor[s]) for s in zero if s in full and s in floor and zero[s] != floor[s]],
        confidence,
    )


def layers(x: Inputs) -> PaperTable:
    """Fig. 7."""
    study = x.study("fig7")
    cells: list[Cell] = []
    if study is None:
        cells.append(Cell("every layer", f"{BUILT_UP}, step 0", "relative", x.no_study(), grade="Q"))
    else:
        for metric in MISMATCH:
            for trainer, rollout in PAIRS:
                cells += _layers_of(study, trainer, rollout, metric, x)
    trained = next(j for j in claims.judge_claims(x.sources, x.experiment) if j.claim.greater == "qat_symmetric")
    cells.append(claim_cell(trained, "trained arms"))
    return PaperTable(
        "layers",
        "Figure 7: symmetric against asymmetric QAT, layer by layer",
        "The paper finds a larger layer-wise mismatch for symmetric W4A4 QAT; it gives no numbers that we know, and "
        "not which rollout it compares with: hence plain W4A4 and W4A4 + RAC, and a symmetric trainer with RAC too. "
        "Shown is the symmetric trainer's mismatch and its difference to the asymmetric (W4A16) one's: positive is "
        "what the paper says. Mismatch: |h trainer - h engine| over |h engine| per token, real engine, step 0; the two "
        "trainers are compared as independent samples (Welch), because the study keeps mean, deviation and number of "
        "seeds.",
        tuple(cells),
    )


def pair_words(trainer: str, rollout: str) -> str:
    """A symmetric trainer and the rollout it is compared with, in words."""
    return f"trainer {trainer}, rollout {rollout}"


def layer_words(name: str) -> str:
    """`model.layers.3.mlp` -> `layer 3: mlp`; `model.layers.3` is the residual stream behind the layer."""
    index, _, block = name.removeprefix("model.layers.").partition(".")
    return f"layer {index}: {block or 'stream'}" if index.isdigit() else name


def depth(name: str) -> tuple[int, int]:
    """Order of layer names: by layer, then attention, MLP, the stream behind them; other names last."""
    index, _, block = name.removeprefix("model.layers.").partition(".")
    if not index.isdigit():
        return sys.maxsize, 0
    return int(index), {"self_attn": 0, "": 2}.get(block, 1)


def _layers_of(study: StudyFile, trainer: str, rollout: str, metric: str, x: Inputs) -> list[Cell]:
    cells = []
    names = {str(r["layer"]) for r in study.rows if r["metric"] == metric and r["rollout"] == rollout}
    for layer in sorted(names, key=depth):
        where = {"rollout": rollout, "metric": metric, "layer": layer}
        one, two = (_spread(study, trainer=t, **where) for t in (trainer, ASYMMETRIC))
        if one is None or two is None:
            continue
        confidence = x.experiment.evaluation.confidence
        difference = welch(one, two, confidence)
        cells.append(
            Cell(
                layer_words(layer), f"{MISMATCH[metric]}, {pair_words(trainer, rollout)}, step 0",
                "nats" if layer == LOG_PROBS else "relative", status.greater(difference), None, "Q",
                one.interval(confidence), "seeds of the study", None, difference, "asymmetric",
                tuple(range(one.count)), (study.key,),
            )
        )  # fmt: skip
    return cells


def _spread(study: StudyFile, **where: object) -> Moments | None:
    """Mean, standard deviation and number of seeds of the one row that matches."""
    rows = [r for r in study.rows if all(r.get(k) == v for k, v in where.items())]
    if not rows:
        return None
    mean, count, sd = (rows[0].get(k) for k in ("mean", "seeds", "sd"))
    if len(rows) > 1 or not isinstance(mean, float) or not isinstance(count, float):
        raise ValueError(f"study {study.name}: expected one row with mean and seeds where {where}, got {rows[:2]}")
    return Moments(mean, sd if isinstance(sd, float) else None, int(count))
