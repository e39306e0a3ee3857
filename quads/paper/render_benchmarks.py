"""The benchmark section of a report: scores, macro averages and tests, rates; and how to read them.

One interval per cell: problems redrawn (and their samples with them), which is what a score on other problems of the
same kind may do. The narrower one, decoding noise alone, is a column of benchmarks.csv and tests.csv.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quads.config import Evaluation
from quads.paper.cells import MISSING
from quads.paper.render import Grid, markdown_table, number

Record = Mapping[str, Any]
NOTES = {
    "chain_depth": "`chain_depth<d>`: chains of the trained length whose result depends on the last d operations; "
    "graded by the mathematical grader on a box that an adapter puts around the last digit.",
    "chain_code": "`chain_code`: sandbox plumbing at toy scale; an adapter puts the answer into a one-line program, "
    "which runs in the sandbox.",
}


def section(scores: Sequence[Record], tests: Sequence[Record], evaluation: Evaluation, sandboxes: Sequence[str]) -> str:
    """The whole section; "" where no benchmark is configured."""
    if not scores:
        return ""
    score_note, test_note = notes_of(evaluation, sandboxes)
    return f"""## Benchmarks

{markdown_table(*score_grid(scores))}
{score_note}

{markdown_table(*test_grid(tests))}
{test_note}

{markdown_table(*rate_grid(scores))}
{RATE_NOTE}
"""


RATE_NOTE = "Grading failed: the grader or its sandbox failed twice; such samples are masked, never wrong."


def notes_of(evaluation: Evaluation, sandboxes: Sequence[str]) -> tuple[str, str]:
    """How to read the scores, and how to read the tests."""
    notes = " ".join(text for key, text in NOTES.items() if any(key in n for n in evaluation.benchmarks.names))
    level = ", ".join(sandboxes) or "no program was run"
    confidence = f"{100 * evaluation.confidence:g} %"
    scores = (
        f"avg@k in percent; brackets: {confidence} interval, problems redrawn with their samples (the interval "
        f"of decoding noise alone is in benchmarks.csv). {notes} Isolation of programs: {level}."
    )
    tests = (
        "Macro average: unweighted mean over benchmarks, problems redrawn within each. Difference to the BF16 arm in "
        "the same kind of engine: paired; p: two-sided sign-flip test; Holm over the arms of one engine. Non-inferior: "
        f"the interval and Holm's p both exclude a loss of {evaluation.noninferiority_margin:g} points, a margin fixed "
        "in the configuration; runs of too few steps for the collapse detector never count."
    )
    return scores, tests


def score_grid(scores: Sequence[Record]) -> Grid:
    """avg@k per arm and engine, one column per benchmark."""
    names = list(dict.fromkeys(r["benchmark"] for r in scores))
    cells = {(r["arm"], r["engine"], r["benchmark"]): _score(r) for r in scores}
    rows = list(dict.fromkeys((r["arm"], r["engine"]) for r in scores))
    first = {r["benchmark"]: r for r in scores}
    header = ["arm", "engine", *(f"{n} ({first[n]['problems']} x {first[n]['samples_per_problem']})" for n in names)]
    return header, [[arm, engine, *(cells[arm, engine, n] for n in names)] for arm, engine in rows]


def _score(r: Record) -> str:
    return f"{_percent(r['avg_at_k'])} {_ends(r, 'problems')}"


def _ends(r: Record, name: str) -> str:
    if r[f"{name}_low"] is None:
        return MISSING
    return f"[{_percent(r[f'{name}_low'])}, {_percent(r[f'{name}_high'])}]"


def _percent(share: float | None) -> str:
    return number(None if share is None else 100 * share, "{:.1f}")


def test_grid(tests: Sequence[Record]) -> Grid:
    """Macro averages, and every arm against BF16."""
    header = ["arm", "engine", "macro average", "seeds (sd)", "minus BF16 arm", "p", "p (Holm)", "non-inferiority"]
    body = []
    for r in tests:
        difference = MISSING
        if r["difference_to_bf16"] is not None:
            ends = (r["difference_to_bf16"], r["difference_low"], r["difference_high"])
            difference = "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * v for v in ends))
        body.append(
            [
                r["arm"],
                r["engine"],
                f"{_percent(r['macro_average'])} {_ends(r, 'macro_problems')}",
                f"{r['seeds_seeds']} ({_percent(r['seeds_sd'])})",
                difference,
                number(r["p"], "{:.4f}") + (" exact" if r["p_exact"] else ""),
                number(r["p_holm"], "{:.4f}"),
                r["non_inferiority"] or MISSING,
            ]
        )
    return header, body


def rate_grid(scores: Sequence[Record]) -> Grid:
    """pass@k, maj@k, truncation, no answer, statuses and tokens."""
    header = ["arm", "engine", "benchmark", "pass@k", "maj@k", "official %", "cut %", "no answer %", "grading failed"]
    header += ["statuses", "tokens mean / median / p95"]
    body = [
        [
            *(r["arm"], r["engine"], r["benchmark"]),
            f"{_percent(r['pass_at_k'])} (k={r['pass_k']})",
            *(_percent(r[k]) for k in ("maj_at_k", "official_share", "truncated_share", "no_answer_share")),
            str(r["grading_failed"]),
            r["statuses"].replace(":", " "),
            " / ".join(number(r[f"tokens_{k}"], "{:.1f}") for k in ("mean", "median", "p95")),
        ]
        for r in scores
    ]
    return header, body
