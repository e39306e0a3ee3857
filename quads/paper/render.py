"""Rows as Markdown for people: shares in percent, intervals in brackets, one short line per arm.

Differs from the CSV, which holds every column at full precision; this is the part that fits on a page, with the run
ids in a second table, because a number without its run is not evidence.
"""

from __future__ import annotations

from collections.abc import Sequence

from quads.config import Experiment
from quads.evaluation.stats import Interval
from quads.paper.tables import Row, describe

MISSING = "-"


def percent(value: Interval | None, *, signed: bool = False) -> str:
    """`93.0 [91.2, 94.6]`; a sign in front for differences."""
    if value is None:
        return MISSING
    form = "{:+.1f} [{:+.1f}, {:+.1f}]" if signed else "{:.1f} [{:.1f}, {:.1f}]"
    return form.format(*(100 * v for v in (value.estimate, value.low, value.high)))


def nats(value: Interval | None) -> str:
    """Three significant digits, the ends in brackets."""
    return MISSING if value is None else f"{value.estimate:.3g} [{value.low:.3g}, {value.high:.3g}]"


def number(value: float | None, form: str = "{:.3g}") -> str:
    """One number, or the mark for "does not exist"."""
    return MISSING if value is None else form.format(value)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A GitHub Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def main_table(rows: Sequence[Row]) -> str:
    """Accuracy: start, end in the own engine, end in BF16, difference to the BF16 arm, status."""
    header = ["arm", "trainer", "rollout", "old log-probs", "seeds", "pass@1 start", "pass@1 own engine"]
    header += ["pass@1 BF16 engine", "own, minus BF16 arm", "status"]
    body = []
    for row in rows:
        words = describe(row.arm)
        spread = "" if row.own_sd_over_seeds is None else f", sd over seeds {100 * row.own_sd_over_seeds:.1f}"
        body.append(
            [
                row.arm.name,
                *(words["trainer"], words["rollout"], words["old_log_probs"]),
                " ".join(map(str, row.seeds)),
                percent(row.start),
                percent(row.own) + spread,
                percent(row.bf16),
                percent(row.difference_own, signed=True),
                row.status,
            ]
        )
    return markdown_table(header, body)


def gap_table(rows: Sequence[Row]) -> str:
    """Mismatch between rollout and trainer, and what a step costs."""
    last = ", ".join(str(n) for n in sorted({row.last_steps for row in rows}))
    header = ["arm", f"gap mean, last {last} steps (nats)", "interval over", "gap max", "k3", "ESS", "clipped %"]
    header += ["weights that differ trainer/engine", "s per step (median)"]
    body = [
        [
            row.arm.name,
            nats(row.gap_mean),
            row.gap_resampled,
            *(number(row.gap_max), number(row.k3), number(row.ess, "{:.3f}")),
            number(None if row.clipped_share is None else 100 * row.clipped_share, "{:.2f}"),
            number(row.delta_weight_different, "{:d}"),
            number(row.seconds_per_step, "{:.2f}"),
        ]
        for row in rows
    ]
    return markdown_table(header, body)


def run_table(rows: Sequence[Row]) -> str:
    """Which runs, configurations and commits the numbers above come from."""

    def code(values: Sequence[str]) -> str:
        return " ".join(f"`{v}`" for v in values)

    body = [[r.arm.name, code(r.run_ids), code(r.config_hashes), code([c[:10] for c in r.commits])] for r in rows]
    return markdown_table(["arm", "run id", "config hash", "commit"], body)


def claims_table(records: Sequence[dict[str, object]]) -> str:
    """The paper's claims beside the differences measured here."""
    body = []
    for r in records:
        here = MISSING
        if r["here_difference"] is not None:
            form = "{:+.1f} [{:+.1f}, {:+.1f}]" if r["unit"] == "points" else "{:+.3g} [{:+.3g}, {:+.3g}]"
            here = form.format(r["here_difference"], r["here_low"], r["here_high"])
        paper = MISSING if r["paper_difference"] is None else f"{r['paper_difference']:+.2f}"
        pair = f"{r['greater']} - {r['smaller']}" + (" (level)" if r["relation"] == "level" else "")
        body.append(
            [
                str(r["claim"]),
                f"{r['measure']} ({r['unit']})",
                pair,
                f"{paper} ({r['paper_grade']})",
                here,
                str(r["status"]),
            ]
        )
    return markdown_table(["claim", "measure", "difference", "paper (grade)", "here", "status"], body)


def page(
    experiment: Experiment,
    rows: Sequence[Row],
    claims: Sequence[dict[str, object]],
    gap_order: Sequence[str],
    benchmarks: str = "",
) -> str:
    """The whole Markdown page; `benchmarks` is the section of render_benchmarks."""
    evaluation = experiment.evaluation
    return f"""# {experiment.title}

{main_table(rows)}
pass@1 in percent on the held-out chains of the training task: mean over {evaluation.samples_per_problem} samples per \
problem, temperature {evaluation.temperature:g}; start: one sample per problem, Wilson interval. Brackets are \
{100 * evaluation.confidence:g} % intervals: bootstrap over problems ({evaluation.bootstrap} resamples), paired for \
differences. They do not cover training seeds: those show as a standard deviation where several ran. Status compares \
end with start in the arm's own engine.

{gap_table(rows)}
Gap = |log pi_trainer - log pi_rollout| on rollout tokens. Mean gaps from large to small: {" > ".join(gap_order)}.

{benchmarks}
## Beside the paper

{claims_table(claims)}
The paper trains a 25B model on mathematics and code; only directions can be compared. It gives no intervals; its \
grades: A abstract, S public summaries, Q machine summary, X derived.

## Runs

{run_table(rows)}"""
