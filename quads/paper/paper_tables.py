"""The paper's tables and figures as cells: Table 2, Fig. 8, Table 3, Fig. 7, throughput, and the list of claims.

    claims       every claim once, with the verdict that a reader looks for first
    table2       average pass@1 per arm, and the four benchmarks where they were evaluated
    ablation     Fig. 8: naive, QAT alone, QAT + RAC, and the share of the loss that QAT alone recovers
    table3       share k of compensated channels against the largest gap: study `k_sweep` (step 0) and trained arms
    layers       Fig. 7: symmetric against asymmetric by layer: study `fig7` (step 0) and trained arms
    throughput   rollout speed, native only; emulated and modelled rows under their own names

Contract: numbers of the paper come from quads.paper.claims, numbers here from sources of the ledger, verdicts from
quads.paper.status; a missing source becomes "not run" with the command or the machine that is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from quads.config import Experiment
from quads.evaluation.stats import Interval, bootstrap_mean, paired_difference
from quads.paper import claims, seeds, status
from quads.paper.cells import Cell, PaperTable
from quads.paper.ledger import Ledger, key_of
from quads.paper.rollout_bench import Bench, KernelBar
from quads.paper.sources import Source
from quads.paper.study_files import StudyFile
from quads.paper.tables import FloatArray, gap_interval, group, mean_per_problem, resampling

# Study -> what the report reads it for; each may be absent.
STUDIES = ("decomposition", "k_sweep", "fig7", "matrix", "masks")
# Over finished runs: taken in where it exists, never waited for.
TRAINED = "trained"
# Paper's benchmark -> stems of ours, most recent first.
OUR_NAMES = {
    "LiveCodeBench": ("livecodebench_v6", "livecodebench_v5", "livecodebench_v6_new"),
    "HMMT25": ("hmmt_feb25",),
    "AIME24": ("aime24",),
    "AIME25": ("aime25",),
}
HELD_OUT = "pass@1 on the held-out task, own engine"


@dataclass(frozen=True)
class Inputs:
    """Everything that a report is made of, read and registered in the ledger."""

    experiment: Experiment
    sources: Sequence[Source]
    ledger: Ledger
    studies: Mapping[str, StudyFile | None] = field(default_factory=dict)
    benches: Sequence[Bench] = ()
    kernels: Sequence[KernelBar] = ()

    def study(self, name: str) -> StudyFile | None:
        """A study, or None where it was not run."""
        return self.studies.get(name)

    def no_study(self) -> status.Verdict:
        """What a cell says whose study is absent."""
        return status.not_run(f"snakemake diagnose_{self.experiment.name}")


def keys_of(runs: Sequence[Source]) -> tuple[str, ...]:
    """Source keys of runs."""
    return tuple(key_of(r.run_id) for r in runs)


def seeds_of(runs: Sequence[Source]) -> tuple[int, ...]:
    """Training seeds of runs, each once."""
    return tuple(dict.fromkeys(r.seed for r in runs))


def score(runs: Sequence[Source], x: Inputs) -> Interval | None:
    """pass@1 in percent through the own engine, interval over problems."""
    means = mean_per_problem(runs, "own")
    return None if means is None else bootstrap_mean(100 * means, **resampling(x.experiment.evaluation))


def table_2(x: Inputs) -> PaperTable:
    """Arms of Table 2."""
    arms: dict[str | None, list[Source]] = {runs[0].arm.paper_row: runs for runs in group(x.sources).values()}
    known = {"BF16 RL": "bf16", "FP8 RL": "fp8", "naive NVFP4 RL": "nvfp4_naive", "QUADS": "quads"}
    cells = [_average(row, arms.get(row), arms.get("BF16 RL"), known[row], x) for row in claims.TABLE_2]
    for column, name in enumerate(claims.BENCHMARKS):
        cells += [_benchmark(row, column, name, arms, x) for row in claims.TABLE_2]
    return PaperTable(
        "table2",
        "Table 2: pass@1 by arm",
        "Judged is the difference to the BF16 arm in percentage points: paper differences below "
        f"{claims.VISIBLE:g} points count as level. The averages of the paper are over its four benchmarks; here the "
        "held-out problems of the training task stand for them. Intervals redraw problems; with several seeds the "
        "interval over seeds stands beside them, and the status needs both.",
        tuple(cells),
    )


def _average(row: str, runs: list[Source] | None, base: list[Source] | None, arm: str, x: Inputs) -> Cell:
    paper, reference = claims.TABLE_2[row][-1], row == "BF16 RL"
    difference = None if reference else round(paper - claims.TABLE_2["BF16 RL"][-1], 2)
    if runs is None:
        verdict = claims.missing_arms([arm], x.experiment)
        return Cell(row, HELD_OUT, "percent", verdict, paper, "Q", paper_difference=difference, against="BF16")
    here = None if reference or base is None else claims.paired_points(runs, base, x.experiment.evaluation)
    margin = x.experiment.evaluation.noninferiority_margin
    by_seed = claims.points_over_seeds(runs, base, x.experiment.evaluation) if base and here else None
    return Cell(
        row,
        HELD_OUT,
        "percent",
        claims.row_verdict(difference, here, margin, by_seed, reference=reference),
        paper,
        "Q",
        score(runs, x),
        "problems",
        difference,
        here,
        "" if reference else "BF16",
        seeds_of(runs),
        keys_of([*runs, *(base or [])] if here else runs),
        by_seed,
    )


def _benchmark(row: str, column: int, name: str, arms: Mapping[str | None, list[Source]], x: Inputs) -> Cell:
    paper = claims.TABLE_2[row][column]
    evaluated = [n for n in OUR_NAMES[name] if n in x.experiment.evaluation.benchmarks.names]
    runs, base = arms.get(row), arms.get("BF16 RL")
    if not evaluated or runs is None:
        why = f"{OUR_NAMES[name][0]} is not among this experiment's benchmarks" if not evaluated else f"no arm {row}"
        return Cell(row, name, "percent", status.not_run(why), paper, "Q")

    def scores(run: Source) -> FloatArray:
        return 100 * np.asarray(run.eval["engines"]["own"]["benchmarks"][evaluated[0]]["per_problem"], dtype=np.float64)

    def means(of: Sequence[Source]) -> FloatArray:
        mean: FloatArray = np.mean([scores(r) for r in of], axis=0)
        return mean

    evaluation = x.experiment.evaluation
    here = bootstrap_mean(means(runs), **resampling(evaluation))
    other = by_seed = None
    if base is not None and row != "BF16 RL":
        by_seed = seeds.difference(runs, base, evaluation, lambda run: float(scores(run).mean()))
        other = paired_difference(means(runs), means(base), **resampling(evaluation))
    difference = None if row == "BF16 RL" else round(paper - claims.TABLE_2["BF16 RL"][column], 2)
    verdict = claims.row_verdict(
        difference, other, evaluation.noninferiority_margin, by_seed, reference=row == "BF16 RL"
    )
    keys = keys_of([*runs, *(base or [])] if other else runs)
    against = "" if difference is None else "BF16"
    return Cell(
        row, f"{name} ({evaluated[0]})", "percent", verdict, paper, "Q", here, "problems", difference, other, against,
        seeds_of(runs), keys, by_seed,
    )  # fmt: skip


def ablation(x: Inputs) -> PaperTable:
    """Fig. 8."""
    arms = group(x.sources)
    steps = (
        ("naive", "nvfp4_naive", claims.TABLE_2["naive NVFP4 RL"][-1], "bf16", -21.78),
        ("W4A16 QAT only", "qat_only", claims.FIGURE_8["W4A16 QAT only"], "nvfp4_naive", 19.7),
        ("QAT + RAC (QUADS)", "quads", claims.TABLE_2["QUADS"][-1], "qat_only", 1.8),
    )
    cells = [_step(*step, arms, x) for step in steps]
    share = next(j for j in claims.judge_claims(x.sources, x.experiment) if j.claim.measure == "recovered")
    cells.append(claim_cell(share, "share of the loss that QAT alone recovers"))
    return PaperTable(
        "ablation",
        "Figure 8: the ablation",
        "Each step is judged against the one named beside it. The share is (QAT only - naive) / (BF16 - naive); the "
        f"paper's words are judged as a share above {claims.MOST:g}.",
        tuple(cells),
    )


def _step(
    row: str, name: str, paper: float, against: str, difference: float, arms: Mapping[str, list[Source]], x: Inputs
) -> Cell:
    absent = [n for n in (name, against) if n not in arms]
    if absent:
        verdict = claims.missing_arms(absent, x.experiment)
        own = arms.get(name)
        if own is None:
            return Cell(row, HELD_OUT, "percent", verdict, paper, "Q", paper_difference=difference, against=against)
        # The arm itself ran: its number stands, only the comparison is missing.
        return Cell(
            row, HELD_OUT, "percent", verdict, paper, "Q", score(own, x), "problems", difference, None, against,
            seeds_of(own), keys_of(own),
        )  # fmt: skip
    runs, base = arms[name], arms[against]
    here = claims.paired_points(runs, base, x.experiment.evaluation)
    margin = x.experiment.evaluation.noninferiority_margin
    by_seed = claims.points_over_seeds(runs, base, x.experiment.evaluation) if here else None
    verdict = claims.row_verdict(difference, here, margin, by_seed)
    if here is not None and abs(difference) < claims.VISIBLE:
        # RAC's 1.8 points are a claim of their own in the paper, although its benchmarks cannot show them.
        verdict = status.jointly(status.greater(here), status.greater(by_seed) if by_seed else None)
    return Cell(
        row, HELD_OUT, "percent", verdict, paper, "Q", score(runs, x), "problems", difference, here, against,
        seeds_of(runs), keys_of([*runs, *base]), by_seed,
    )  # fmt: skip


def claim_cell(judged: claims.Judged, row: str | None = None) -> Cell:
    """A claim about two arms as a cell."""
    claim = judged.claim
    pair = f"{claim.greater} - {claim.smaller}"
    measures: dict[str, str] = {
        "pass@1": f"pass@1, {pair}",
        "gap": f"mean gap, {pair}",
        "collapsed": f"share of seeds of {claim.greater} that collapse (detector, or end below own start)",
        "recovered": f"share of bf16 - {claim.smaller} that {claim.greater} recovers",
    }
    if claim.measure == "collapsed":
        over = "" if judged.here is None else "seeds"
    else:
        several = " and seeds" if judged.over_seeds else ""
        over = "" if judged.here is None else "steps" + several if claim.measure == "gap" else "problems"
    return Cell(
        row or claim.text,
        measures[claim.measure],
        claims.UNITS[claim.measure],  # type: ignore[arg-type]
        judged.verdict,
        claim.paper,
        claim.grade,
        judged.here,
        over,
        seeds=seeds_of(judged.runs) if judged.here else (),
        sources=keys_of(judged.runs) if judged.here else (),
        over_seeds=judged.over_seeds,
    )


def trained_gap(row: str, name: str, against: str | None, key: str, paper: tuple[float | None, str], x: Inputs) -> Cell:
    """`key` of a trained arm over its last steps, and its difference to another arm (claimed: smaller)."""
    arms = group(x.sources)
    absent = [n for n in (name, against) if n is not None and n not in arms]
    measure = f"{key} of the trained arm, last steps"
    if absent:
        return Cell(row, measure, "nats", claims.missing_arms(absent, x.experiment), *paper)
    runs = arms[name]
    here = gap_interval(runs, x.experiment.evaluation, key)
    other = claims.gap_difference(runs, arms[against], x.experiment.evaluation, key) if against else None
    if here is None or (against and other is None):
        return Cell(row, measure, "nats", status.not_run("no finite value in these runs"), *paper)
    by_seed = claims.gap_over_seeds(runs, arms[against], x.experiment.evaluation, key) if against else None
    verdict = status.REFERENCE
    if other:
        on_seeds = status.greater(by_seed, sign=-1) if by_seed else None
        verdict = status.jointly(status.greater(other, sign=-1), on_seeds, "steps")
    used = [*runs, *(arms[against] if against else [])]
    return Cell(
        row,
        measure,
        "nats",
        verdict,
        *paper,
        here,
        "steps",
        None,
        other,
        against or "",
        seeds_of(runs),
        keys_of(used),
        by_seed,
    )
