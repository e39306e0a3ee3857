"""Everything that a report folder holds, made from inputs that were read: texts, figures, then the page.

    table.{csv,md} curves.csv paper.csv claims.csv [benchmarks.csv tests.csv gap_parts.csv]     as before, flat
    {reward,gap,accuracy[,gap_parts]}.{svg,png}                                   curves and accuracies
    tables/<name>.{csv,md,tex}   figures/<name>.{svg,png}                         the paper's tables and figures
    sources.json   index.html                                                    where every number comes from; the page

Contract: the same inputs give the same bytes. To add a figure to the page, return one more `Plot` from `plots`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from matplotlib.figure import Figure

from quads import provenance
from quads.paper import benchmarks, claims, curves, figures, latex, paper_figures, render, render_benchmarks, tables
from quads.paper.cells import PaperTable, interval, records
from quads.paper.decomposition_figure import gap_parts_figure, parts_records
from quads.paper.deviations import deviations
from quads.paper.markup import svg_of
from quads.paper.page import Contents, Drawing
from quads.paper.page import render as render_page
from quads.paper.paper_tables import Inputs, keys_of
from quads.paper.render import Grid
from quads.paper.study_files import StudyFile, over_seeds
from quads.paper.summary_tables import all_tables

TERMS = ("total", "delta_weight", "delta_act", "delta_num")


@dataclass(frozen=True)
class Plot:
    """A figure made here. `place` is its file stem in the folder, `section` where the page shows it ("" nowhere)."""

    place: str
    section: str
    title: str
    caption: str
    figure: Figure


class Report:
    """One report; every part is computed once."""

    def __init__(self, x: Inputs, *, more: bool = False) -> None:
        self.x, self.more = x, more
        x.ledger.add_runs(x.sources)
        self.evaluation = x.experiment.evaluation
        self.sandboxes = sorted({str(s.eval["sandbox"]) for s in x.sources if s.eval.get("sandbox")})

    @cached_property
    def rows(self) -> list[tables.Row]:
        """The table of arms."""
        return tables.build_rows(self.x.sources, self.evaluation, self.x.experiment.diagnostics.collapse)

    @cached_property
    def tables(self) -> list[PaperTable]:
        """The paper's tables, the claims first."""
        return all_tables(self.x)

    @cached_property
    def scores(self) -> list[benchmarks.Record]:
        """Benchmarks, one record per arm, engine and benchmark."""
        return benchmarks.benchmark_records(self.x.sources, self.evaluation)

    @cached_property
    def tests(self) -> list[benchmarks.Record]:
        """Every arm against BF16."""
        return benchmarks.comparisons(self.x.sources, self.evaluation, self.x.experiment.diagnostics.collapse)

    @cached_property
    def order(self) -> list[str]:
        """Arms by falling mean gap."""
        return claims.order_of_gaps(self.x.sources)

    def texts(self) -> dict[str, str]:
        """Relative path -> text of every file but the page and report.json."""
        x, sources = self.x, self.x.sources
        section = render_benchmarks.section(self.scores, self.tests, self.evaluation, self.sandboxes)
        out = {
            "table.csv": tables.to_csv([tables.record(r) for r in self.rows]),
            "table.md": render.page(x.experiment, self.rows, self.tables[0], self.order, x.ledger, section),
            "curves.csv": tables.to_csv(tables.curve_records(sources)),
            "paper.csv": tables.to_csv(claims.compare_rows(sources, self.evaluation)),
            "claims.csv": tables.to_csv(claims.claim_records(claims.judge_claims(sources, x.experiment))),
            "sources.json": json.dumps(x.ledger.to_json(), indent=1) + "\n",
        }
        if self.scores:
            out |= {"benchmarks.csv": tables.to_csv(self.scores), "tests.csv": tables.to_csv(self.tests)}
        if parts := parts_records(sources):
            out["gap_parts.csv"] = tables.to_csv(parts)
        for table in self.tables:
            stem = f"tables/{table.name}"
            out[f"{stem}.csv"] = tables.to_csv(records(table, x.ledger))
            out[f"{stem}.md"] = render.tables_page(table, x.ledger)
            out[f"{stem}.tex"] = latex.cells_document(table, x.ledger)
        for name, (title, grid, note) in self.grids().items():
            items = [f"{x.ledger.label(k)}: {x.ledger.describe(x.ledger.get(k))}" for k in keys_of(sources)]
            out[f"tables/{name}.md"] = f"# {title}\n\n{render.markdown_table(*grid)}\n{note}\n"
            out[f"tables/{name}.tex"] = latex.document(title, *grid, note, items)
        return out

    def grids(self) -> dict[str, tuple[str, Grid, str]]:
        """Tables of what was measured, without the paper: file stem -> title, table, note. Their CSVs lie beside."""
        return {
            "arms": ("Accuracy by arm", render.main_grid(self.rows), "Columns at full precision: table.csv."),
            "gaps": ("Mismatch by arm", render.gap_grid(self.rows), "Columns at full precision: table.csv."),
            "curves": (
                "Training curves, mean over seeds",
                curves.curves_grid(self.x.sources),
                "Every step of every run: curves.csv.",
            ),
        }

    def plots(self) -> list[Plot]:
        """Every figure, in the order of the page."""
        x, name = self.x, self.x.experiment.name
        by_name = {t.name: t for t in self.tables}
        reward, gap = figures.reward_figure(x.sources, name), figures.gap_figure(x.sources, name)
        accuracy = figures.accuracy_figure(self.rows, name, self.evaluation.confidence)
        ablation = paper_figures.ablation(by_name["table2"], by_name["ablation"])
        parts = gap_parts_figure(x.sources, name)
        measured = [] if parts is None else [
            Plot("gap_parts", "curves", "Parts of the gap during training", "Mean over tokens of the absolute value of "
                 "each term, measured on a step's own rollouts before its update.", parts)
        ]  # fmt: skip
        return [
            Plot("accuracy", "arms", "Accuracy at the start and at the end", "pass@1 in percent per arm, in its own "
                 "engine and in a BF16 engine on the same weights; bars are intervals over problems.", accuracy),
            Plot("reward", "curves", "Reward", "Mean reward of the rollouts by step; thin as recorded, thick a centred "
                 "mean over five steps.", reward),
            Plot("gap", "curves", "Log-prob gap", "|log p trainer - log p rollout| of the sampled tokens by step, "
                 "before each update, log scale; thick the mean over tokens, thin the largest token.", gap),
            *measured,
            Plot("figures/ablation", "ablation", "The ablation", "Hollow diamonds: the paper; dots: here, with "
                 "intervals over problems.", ablation),
            Plot("figures/table3", "table3", "Largest gap against k", "Left the paper's trained model, right step 0 "
                 "here, with Student's intervals over the study's seeds.", paper_figures.table3(by_name["table3"])),
            Plot("figures/layers", "layers", "Symmetric minus asymmetric", "Above (right of) zero the symmetric "
                 "trainer mismatches more, as the paper says; below (left of) it less.",
                 paper_figures.layers(by_name["layers"])),
            Plot("figures/throughput", "throughput", "Rollout speed", "Hollow diamonds: the paper; dots: native "
                 "measurements here.", paper_figures.throughput(by_name["throughput"])),
        ]  # fmt: skip

    def page(self, plots: Sequence[Plot], files: Sequence[str], out: Path) -> str:
        """index.html."""
        drawings = [
            Drawing(Path(p.place).name, p.section, p.title, p.caption, svg_of(p.figure)) for p in plots if p.section
        ]
        x = self.x
        contents = Contents(
            experiment=x.experiment,
            more=self.more,
            ledger=x.ledger,
            tables=self.tables,
            drawings=[*drawings, *self._study_drawings()],
            arms=render.main_grid(self.rows),
            gaps=render.gap_grid(self.rows),
            arm_keys=[keys_of(runs) for runs in tables.group(x.sources).values()],
            benchmarks=self._benchmark_grids(),
            studies=self._study_grids(),
            deviations=deviations(x.experiment, x.sources),
            warning=tables.few_steps(self.rows, x.experiment.diagnostics.collapse),
            commit=provenance.commit(),
            files=files,
        )
        return render_page(contents, out)

    def _benchmark_grids(self) -> list[tuple[str, Grid, str, bool]]:
        if not self.scores:
            return []
        score_note, test_note = render_benchmarks.notes_of(self.evaluation, self.sandboxes)
        return [
            ("Scores (percent)", render_benchmarks.score_grid(self.scores), score_note, True),
            ("Macro average and tests against BF16", render_benchmarks.test_grid(self.tests), test_note, True),
            ("Rates, answers and tokens", render_benchmarks.rate_grid(self.scores), render_benchmarks.RATE_NOTE, False),
        ]

    def _study_grids(self) -> list[tuple[str, Grid | None, str]]:
        found = self.x.study("decomposition")
        caption = "Decomposition by arm: mean over tokens of the absolute value (nats), mean [interval] over seeds"
        if found is None:
            return [(caption, None, self.x.no_study().why)]
        return [(caption, decomposition_grid(found, self.evaluation.confidence), found.key)]

    def _study_drawings(self) -> list[Drawing]:
        """Figures of the studies as they lie on disk."""
        said: Mapping[str, tuple[str, str, bool]] = {
            "decomposition": ("Decomposition", "The gap and its three terms by arm, and the parts of delta_num.", True),
            "matrix": ("Trainer x rollout", "Mean gap of every pair of precisions, mean over seeds.", False),
            "fig7": ("Layer by layer", "Trainers of every precision against the engine's own layer outputs.", True),
            "trained": ("After training", "Gap at the start and after training, and its terms after training.", True),
            "masks": ("Masks", "Gap, activation part and dependence on the batch for every kind of mask.", True),
        }
        out = []
        for name, (title, caption, themed) in said.items():
            study = self.x.study(name)
            svg = study.folder / f"{name}.svg" if study is not None else None
            if study is not None and svg is not None and svg.is_file():
                bars = "" if name == "matrix" else " Bars span the seeds."  # a heat map has none
                words = f"{caption}{bars} Source: {self.x.ledger.label(study.key)}."
                drawing = Drawing(f"study-{name}", "decomposition", title, words, svg.read_text("utf-8"), themed)
                out.append(drawing)
        return out


def decomposition_grid(study: StudyFile, confidence: float) -> Grid:
    """Arms down, total and terms across."""
    body = []
    for arm in study.values("arm"):
        row = [str(arm)]
        for term in TERMS:
            level = "total" if term == "total" else "term"
            values = list(study.by_seed("mean_token_abs", arm=arm, term=term, level=level).values())
            row.append(interval(over_seeds(values, confidence), "nats"))
        body.append(row)
    return ["arm", *TERMS], body
