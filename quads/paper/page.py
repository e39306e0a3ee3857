"""The report as one HTML file that a reader opens first: verdicts, arms, figures, tables, deviations, sources.

Every number in a table leads to its source list entry by the labels beside it (S1, S2, ...), and from there to the
result file and the resolved configuration, which is in the page as well: two steps, also without the results folder.
Contract: no request leaves the file (no script, font, image or style from elsewhere); links are relative.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from quads.config import Experiment
from quads.paper.cells import HEADER, Cell, PaperTable, count_words, display_rows
from quads.paper.ledger import UNKNOWN, Entry, Ledger
from quads.paper.markup import STYLE, Markup, details, figure, inline_svg, join, link, pill, prose, table, tag, text
from quads.paper.render import Grid
from quads.paper.status import JUDGED

Section = tuple[str, str, Markup]  # id, title, content


@dataclass(frozen=True)
class Drawing:
    """A figure for the page: SVG text of matplotlib. `section` is the id of the section that shows it."""

    name: str
    section: str
    title: str
    caption: str
    svg: str
    themed: bool = True


@dataclass(frozen=True)
class Contents:
    """What goes into the page. `grids`: (section, caption, grid, source keys by row or None)."""

    experiment: Experiment
    more: bool
    ledger: Ledger
    tables: Sequence[PaperTable]
    drawings: Sequence[Drawing]
    arms: Grid
    gaps: Grid
    arm_keys: Sequence[Sequence[str]]
    benchmarks: Sequence[tuple[str, Grid, str, bool]] = ()
    studies: Sequence[tuple[str, Grid | None, str]] = ()
    deviations: Sequence[str] = ()
    warning: str = ""
    commit: str = ""
    files: Sequence[str] = field(default_factory=tuple)


def render(x: Contents, out: Path) -> str:
    """The whole file, to lie in the folder `out` (links are relative to it)."""
    sections = [
        _verdicts(x),
        _arms(x),
        ("curves", "Training curves", _figures(x, "curves")),
        ("paper", "The paper's tables and figures", _paper(x)),
        ("decomposition", "Where the gap comes from", _studies(x)),
        *([("benchmarks", "Benchmarks", _benchmarks(x))] if x.benchmarks else []),
        ("deviations", "Deviations from the paper", tag("ul", *(tag("li", d) for d in x.deviations))),
        ("reproduce", "Reproduce", _reproduce(x)),
        ("sources", "Sources", _sources(x, out)),
    ]
    title = f"QUADS, reproduced: {x.experiment.title}"
    navigation = tag("ul", *(tag("li", link(f"#{name}", said)) for name, said, _ in sections))
    warning = [tag("p", tag("b", x.warning))] if x.warning else []
    body = [
        tag(
            "header",
            tag("h1", title),
            tag("p", _lead(x), class_="lead"),
            *warning,
            tag("nav", navigation, aria_label="Sections"),
        ),
        tag("main", *(tag("section", tag("h2", said), content, id=name) for name, said, content in sections)),
        tag("footer", tag("p", f"Made by python -m quads.report, commit {x.commit}. Experiment {x.experiment.name}.")),
    ]
    head = [
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup('<meta name="color-scheme" content="light dark">'),
        tag("title", title),
        Markup(f"<style>{STYLE}</style>"),
    ]
    page = tag("html", tag("head", *head), tag("body", *body), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _lead(x: Contents) -> str:
    runs = [e for e in x.ledger.entries() if e.kind == "run"]
    machines = " / ".join(dict.fromkeys(e.hardware for e in runs))
    what = "NVFP4 reinforcement learning for MoE models beside the paper (arXiv 2607.15810)."
    return f"{what} {len(runs)} runs on {machines}."


def _verdicts(x: Contents) -> Section:
    claims = x.tables[0]
    counts = count_words(claims.cells)
    chips = tag("ul", *(tag("li", tag("b", str(n)), " ", pill(w)) for w, n in counts.items()), class_="counts")
    judged = sum(counts.get(w, 0) for w in JUDGED)
    said = f"{len(claims.cells)} claims, {judged} of them measured in this experiment."
    content = join(
        [
            tag("p", said),
            chips,
            cells_table(claims, x.ledger, hidden_caption=True),
            tag("p", claims.note, class_="note"),
        ]
    )
    return "verdict", "What holds here", content


def _arms(x: Contents) -> Section:
    grids = [("Accuracy by arm (percent)", x.arms), ("Mismatch between rollout and trainer", x.gaps)]
    shown = [_sourced(caption, grid, x.arm_keys, x.ledger) for caption, grid in grids]
    note = (
        f"Brackets: {100 * x.experiment.evaluation.confidence:g} % intervals, over problems for accuracies (paired for "
        "differences), over the last steps for gaps; over seeds: Student's interval over training seeds. Gap: "
        "|log pi_trainer - log pi_rollout| on the rollout's own tokens, before the update."
    )
    return "arms", "Arms", join([*shown, tag("p", note, class_="note"), _figures(x, "arms")])


def _sourced(caption: str, grid: Grid, keys: Sequence[Sequence[str]], ledger: Ledger) -> Markup:
    header, body = grid
    rows = [
        [*(pill(v) if h == "status" else v for h, v in zip(header, row, strict=True)), source_links(own, ledger)]
        for row, own in zip(body, keys, strict=True)
    ]
    return table(caption, [*header, "sources"], rows)


def _figures(x: Contents, section: str) -> Markup:
    return join(
        figure(inline_svg(d.svg, f"fig-{d.name}", d.title, d.caption, themed=d.themed), f"{d.title}. {d.caption}")
        for d in x.drawings
        if d.section == section
    )


def _paper(x: Contents) -> Markup:
    parts = []
    for one in x.tables[1:]:
        files = join([link(f"tables/{one.name}.{kind}", kind) for kind in ("csv", "md", "tex")], " ")
        parts += [
            tag("h3", one.title, id=f"table-{one.name}"),
            _figures(x, one.name),
            split_table(one, x.ledger),
            tag("p", f"{one.note} As files: ", files, ".", class_="note"),
        ]
    return join(parts)


NO_COMMIT = ("unknown", UNKNOWN)  # what quads.provenance.commit and the ledger say where there is none
LONG = 14  # rows; a longer table is split by measure, the first part open


def split_table(one: PaperTable, ledger: Ledger) -> Markup:
    """A short table as it is; a long one as a table per measure, all but the first folded."""
    if len(display_rows(one, ledger)) <= LONG:
        return cells_table(one, ledger, hidden_caption=True)
    parts: list[Markup] = []
    for measure, cells in groupby(one.cells, key=_kind):
        part = replace(one, cells=tuple(cells), title=measure)
        shown = cells_table(part, ledger, hidden_caption=bool(parts))
        parts.append(details(f"{measure} ({len(part.cells)} rows)", shown) if parts else shown)
    return join(parts)


def _kind(cell: Cell) -> str:
    """What a part is called: ratios with a claim stay together, and so does what was timed without one."""
    if cell.verdict.word == "no claim":
        return "timed here, without a claim"
    return "ratios of rollout speeds" if cell.unit == "ratio" else cell.measure


def cells_table(one: PaperTable, ledger: Ledger, *, hidden_caption: bool = False) -> Markup:
    """Cells with verdicts as pills; numbers and labels link to their sources."""
    rows = [_row(said, keys, ledger) for said, keys in display_rows(one, ledger)]
    header = ["claim" if one.name == "claims" else "row", *HEADER[1:], "sources"]
    return table(one.title, header, rows, hidden_caption=hidden_caption)


def _row(said: dict[str, str], keys: Sequence[str], ledger: Ledger) -> list[str]:
    words = dict(said)
    if keys:
        words["here"] = link(f"#{keys[0]}", words["here"])
    words["status"] = pill(words["status"])
    return [*words.values(), source_links(keys, ledger)]


def source_links(keys: Sequence[str], ledger: Ledger) -> Markup:
    """Labels of sources, each a link to its entry."""
    if not keys:
        return Markup("-")
    return tag("span", join([link(f"#{ledger.get(k).key}", ledger.label(k)) for k in keys], " "), class_="src")


def _studies(x: Contents) -> Markup:
    intro = (
        "Studies of the warm checkpoint at step 0, without training: fixed tokens, every precision asked about them. "
        "delta_weight + delta_act + delta_num is the whole gap, token by token; shown are means of absolute values, "
        "which do not add up. Definitions: docs/diagnostics.md."
    )
    parts = [tag("p", intro)]
    for caption, grid, key in x.studies:
        if grid is None:
            parts.append(tag("p", f"{caption}: ", pill(f"not run: {key}")))
            continue
        parts += [table(caption, grid[0], grid[1]), tag("p", "Source: ", source_links([key], x.ledger), class_="note")]
    return join([*parts, _figures(x, "decomposition")])


def _benchmarks(x: Contents) -> Markup:
    parts: list[str] = []
    for caption, (header, body), note, open_ in x.benchmarks:
        rows = [[pill(v) if h == "status" else v for h, v in zip(header, row, strict=True)] for row in body]
        shown = join([table(caption, header, rows, cards=open_), tag("p", prose(note), class_="note")])
        parts.append(shown if open_ else details(caption, shown))
    return join(parts)


def _reproduce(x: Contents) -> Markup:
    name = x.experiment.name
    commits = list(dict.fromkeys(e.commit for e in x.ledger.entries() if e.kind == "run"))
    known = [c for c in commits if c.removesuffix("-dirty") not in NO_COMMIT]
    lines = [
        *(f"git checkout {c.removesuffix('-dirty')}" for c in known[:1]),
        f"snakemake {name}{'_all' if x.more else ''}          # train, evaluate, this page",
        f"snakemake diagnose_{name}     # step-0 studies; the report takes them in when it is made again",
        f"snakemake {name}_all          # more arms",
    ]
    text_ = (
        "Each run is named by the hash of its resolved configuration. Seeds fix data, order and warm-up; a training "
        "run is not bit-reproducible, because rollout requests meet the engine in an order that varies."
    )
    several = f" The runs here come from {len(known)} commits: {', '.join(known)}." if len(known) > 1 else ""
    dirty = " A commit marked -dirty had local changes." if any("-dirty" in c for c in commits) else ""
    absent = "" if len(known) == len(commits) else " The code state of these runs was not recorded as a commit."
    if known and absent:
        absent = " The code state of some of these runs was not recorded as a commit."
    return join([tag("pre", tag("code", "\n".join(lines))), tag("p", text_ + several + dirty + absent)])


def _sources(x: Contents, out: Path) -> Markup:
    intro = "Every number above leads here. sources.json holds the same list for programs."
    entries = [_entry(e, x.ledger, out) for e in x.ledger.entries()]
    made = "Files of this report: "
    files = join([link(f, f) for f in x.files], ", ")
    return join([tag("p", intro), *entries, details("Files of this report", tag("p", made, files))])


def _entry(e: Entry, ledger: Ledger, out: Path) -> Markup:
    target = os.path.relpath(ledger.results / e.link if not e.kind == "kernels" else Path(e.link), out)
    facts: list[tuple[str, str]] = [("file", link(target, e.link))]
    facts += [
        (k, v) for k, v in (("run id", e.run_id), ("config hash", e.config_hash), ("code hash", e.code_hash)) if v
    ]
    facts += [("commit", e.commit), ("hardware", e.hardware)]
    if e.versions:
        facts.append(("versions", ", ".join(f"{k} {v}" for k, v in e.versions.items() if v)))
    listed = tag("dl", *(join([tag("dt", k), tag("dd", v)]) for k, v in facts))
    hashes = details("files read, sha256", tag("ul", *(tag("li", tag("code", f"{h} {p}")) for p, h in e.files.items())))
    config = details("resolved configuration", tag("pre", tag("code", _json(e.config)))) if e.config else Markup("")
    label = text(f"{ledger.label(e.key)}: {e.title}")
    return tag("div", tag("h3", label), listed, hashes, config, id=e.key, class_="source")


def _json(value: Any) -> str:
    return json.dumps(value, indent=1)
