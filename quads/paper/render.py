"""Rows as Markdown for people: shares in percent, intervals in brackets, one short line per arm.

Differs from the CSV, which holds every column at full precision; this is the part that fits on a page, with the run
ids in a second table, because a number without its run is not evidence.
"""

from __future__ import annotations

from collections.abc import Sequence

from quads.config import Experiment
from quads.evaluation.stats import Interval
from quads.paper.cells import HEADER, MISSING, PaperTable, display_rows, seeds_words
from quads.paper.ledger import Entry, Ledger
from quads.paper.tables import Row, describe, few_steps


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


Grid = tuple[list[str], list[list[str]]]  # header and body of a table, in words


def main_grid(rows: Sequence[Row]) -> Grid:
    """Accuracy: start, end in the own engine, end in BF16, difference to the BF16 arm, status."""
    header = ["arm", "trainer", "rollout", "old log-probs", "seeds", "pass@1 start", "pass@1 own engine"]
    header += ["pass@1 BF16 engine", "own, minus BF16 arm", "training", "status"]
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
                percent(row.difference_own, signed=True) + _over_seeds(row.difference_own_over_seeds),
                row.training,
                row.status,
            ]
        )
    return header, body


def _over_seeds(value: Interval | None) -> str:
    if value is None:
        return ""
    return seeds_words(Interval(100 * value.estimate, 100 * value.low, 100 * value.high), "points", signed=True)


def gap_grid(rows: Sequence[Row]) -> Grid:
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
    return header, body


def run_table(rows: Sequence[Row]) -> str:
    """Which runs, configurations and commits the numbers above come from."""

    def code(values: Sequence[str]) -> str:
        return " ".join(f"`{v}`" for v in values)

    body = [[r.arm.name, code(r.run_ids), code(r.config_hashes), code([c[:10] for c in r.commits])] for r in rows]
    return markdown_table(["arm", "run id", "config hash", "commit"], body)


def cells_table(table: PaperTable, ledger: Ledger) -> str:
    """Cells of a paper table, each with the labels of its sources, and the list of these sources below."""
    body = [[*said.values(), " ".join(map(ledger.label, k)) or MISSING] for said, k in display_rows(table, ledger)]
    cited = dict.fromkeys(key for cell in table.cells for key in cell.sources)
    return markdown_table([*HEADER, "sources"], body) + "\n" + source_list([ledger.get(k) for k in cited], ledger)


def source_list(entries: Sequence[Entry], ledger: Ledger) -> str:
    """One line per source: label, title, file, config hash, commit."""
    return "".join(f"- {ledger.label(e.key)}: {ledger.describe(e)}\n" for e in entries)


def tables_page(table: PaperTable, ledger: Ledger) -> str:
    """One paper table as a Markdown page of its own."""
    return f"# {table.title}\n\n{cells_table(table, ledger)}\n{table.note}\n"


def page(
    experiment: Experiment,
    rows: Sequence[Row],
    claims: PaperTable,
    gap_order: Sequence[str],
    ledger: Ledger,
    benchmarks: str = "",
) -> str:
    """The whole Markdown page; `benchmarks` is the section of render_benchmarks."""
    evaluation = experiment.evaluation
    warning = few_steps(rows, experiment.diagnostics.collapse)
    banner = f"\n**{warning}**\n" if warning else ""
    return f"""# {experiment.title}
{banner}
{markdown_table(*main_grid(rows))}
pass@1 in percent on the held-out chains of the training task: mean over {evaluation.samples_per_problem} samples per \
problem, temperature {evaluation.temperature:g}; start: one sample per problem, Wilson interval. Brackets are \
{100 * evaluation.confidence:g} % intervals: bootstrap over problems ({evaluation.bootstrap} resamples), paired for \
differences. They do not cover training seeds: where several ran, those show as a standard deviation and, for \
differences, as Student's interval over seeds. Status compares end with start in the arm's own engine, over problems \
and over seeds.

{markdown_table(*gap_grid(rows))}
Gap = |log pi_trainer - log pi_rollout| on rollout tokens. Mean gaps from large to small: {" > ".join(gap_order)}.

{benchmarks}
## Beside the paper

{cells_table(claims, ledger)}
{claims.note} The paper trains a 25B model on mathematics and code and gives no intervals.

## Runs

{run_table(rows)}"""
