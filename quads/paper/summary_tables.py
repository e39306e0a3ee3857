"""Throughput as cells, and the list of claims that a reader sees first; `all_tables` builds every table in order.

throughput   ratios of native rollout speeds beside the paper's; then what else was timed, without a claim: emulated
             and modelled rollouts, kernels, whole training steps
claims       claims about arms (quads.paper.claims), about the studies, about exact weights and about speed
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from quads.evaluation.stats import Interval
from quads.paper import claims, paper_tables, status, step0_tables
from quads.paper.cells import Cell, PaperTable, Unit
from quads.paper.paper_tables import Inputs, claim_cell, keys_of, seeds_of
from quads.paper.rollout_bench import BenchRow, Phase, ratio
from quads.paper.study_files import paired
from quads.paper.tables import group

BLACKWELL = "needs Blackwell: native NVFP4"
RATIOS = (
    ("quads_over_fp8", "QUADS rollouts are faster than FP8's", "w4a4+rac", "fp8"),
    ("w4a4_over_fp8", "plain W4A4 is faster than FP8", "w4a4", "fp8"),
    ("w4a4_over_quads", "RAC costs 5 to 9 % of rollout speed", "w4a4", "w4a4+rac"),
)
PHASES: tuple[Phase, ...] = ("decode", "prefill")
COST = 0.09  # RAC costs at most this share, says the paper


def all_tables(x: Inputs) -> list[PaperTable]:
    """Every table; the claims first."""
    table3, layers, speed = step0_tables.table_3(x), step0_tables.layers(x), throughput(x)
    first = claims_table(x, table3, layers, speed)
    return [first, paper_tables.table_2(x), paper_tables.ablation(x), table3, layers, speed]


def throughput(x: Inputs) -> PaperTable:
    """Rollout speed, then what was timed without a claim."""
    cells = [_ratio(x, *case, phase) for case in RATIOS for phase in PHASES]
    cells += [_rounds(bench.key, rows) for bench in x.benches for rows in _by_shape(bench.rows)]
    for bar in x.kernels:
        bound = f"{'>=' if bar.better == 'higher' else '<='} {bar.required:g}"
        why = f"the paper times no kernel; own bound {bound}, measured {bar.value:.4g}: "
        here = Interval(bar.value, bar.value, bar.value)
        verdict = status.Verdict("no claim", why + {"aim": "met, its aim too"}.get(bar.verdict, bar.verdict))
        cells.append(Cell(bar.what, "kernel benchmark", "ratio", verdict, here=here, sources=(bar.key,)))
    cells += [_step_speed(name, x) for name in group(x.sources)]
    return PaperTable(
        "throughput",
        "Throughput",
        "Only native NVFP4 says anything about the paper's speeds. Emulated rows time the emulation, roofline rows "
        "are a model, and whole training steps include generation, update and weight sync of this machine.",
        tuple(cells),
    )


def _ratio(x: Inputs, name: str, text: str, over: str, under: str, phase: Phase) -> Cell:
    paper, grade = claims.THROUGHPUT[name]
    measure = f"{over} / {under}, {phase}, native"
    benches = [b for b in x.benches if any(r.backend == "native" for r in b.rows)]
    here = ratio([b.rows for b in benches], over, under, phase, x.experiment.evaluation.confidence)
    if here is None:
        return Cell(text, measure, "ratio", status.not_run(BLACKWELL), paper, grade)
    less_one = Interval(here.estimate - 1, here.low - 1, here.high - 1)
    verdict = status.greater(less_one, at_most=COST if name == "w4a4_over_quads" else None)
    return Cell(text, measure, "ratio", verdict, paper, grade, here, "shapes", sources=tuple(b.key for b in benches))


def _by_shape(rows: Sequence[BenchRow]) -> list[list[BenchRow]]:
    """The rounds of one mode, server, phase and shape together, in order of their first."""
    found: dict[tuple[object, ...], list[BenchRow]] = {}
    for row in rows:
        found.setdefault((row.mode, row.rollout_backend, row.shape), []).append(row)
    return list(found.values())


def _rounds(key: str, rows: Sequence[BenchRow]) -> Cell:
    row, values = rows[0], sorted(r.value for r in rows)
    shape = f"batch {row.batch}, {row.prompt_tokens} + {row.response_tokens} tokens"
    words = {"native": "measured", "emulated": "emulation, no speed claim", "roofline": "model, not measured"}
    unit: Unit = "seconds" if row.phase == "sync" else "tokens/s"
    return Cell(
        f"rollout {row.mode}", f"{row.phase}, {_served(row)}, {shape}, median of rounds", unit,
        status.Verdict("no claim", words[row.backend]),
        here=Interval(median(values), values[0], values[-1]),
        interval_over=f"lowest and highest of {len(values)} rounds", sources=(key,),
    )  # fmt: skip


def _served(row: BenchRow) -> str:
    """native, emulated or roofline, and where it is known by what and how."""
    how = {True: "CUDA graphs", False: "eager", None: None}[row.rollout_graphs]
    known = ", ".join(word for word in (row.rollout_backend, how) if word)
    return f"{row.backend} ({known})" if known else row.backend


def _step_speed(name: str, x: Inputs) -> Cell:
    runs = group(x.sources)[name]
    values = [float(s["tokens_per_s"]) for r in runs for s in r.steps if s.get("tokens_per_s") is not None]
    measure = "generated tokens per second of a whole step, median"
    if not values:
        return Cell(f"training {name}", measure, "tokens/s", status.not_run("not recorded by this run"))
    middle = sorted(values)[len(values) // 2]
    words = f"rollout {runs[0].arm.rollout.mode}: this machine, emulated where NVFP4"
    return Cell(
        f"training {name}", measure, "tokens/s", status.Verdict("no claim", words),
        here=Interval(middle, middle, middle), seeds=seeds_of(runs), sources=keys_of(runs),
    )  # fmt: skip


def claims_table(x: Inputs, table3: PaperTable, layers: PaperTable, speed: PaperTable) -> PaperTable:
    """Every claim once."""
    judged = claims.judge_claims(x.sources, x.experiment)
    cells = [claim_cell(j) for j in judged if j.claim.measure != "gap"]
    cells += [claim_cell(j) for j in judged if j.claim.measure == "gap"]
    cells.insert(len(cells) - 1, _weights(x))
    cells += [*_sweep_claims(x, table3), *_layer_claims(x, layers)]
    cells += [c for c in speed.cells if c.measure.endswith("decode, native")]
    cells.append(
        Cell("72.9 % on average over the four benchmarks at 25B", "average pass@1", "percent",
             status.not_run("needs a cluster, a model of that size and its data"), claims.TABLE_2["QUADS"][-1], "Q")
    )  # fmt: skip
    return PaperTable(
        "claims",
        "The paper's claims",
        "Statuses are computed from the interval here by one rule (quads/paper/status.py): reproduced when the whole "
        "interval lies where the claim says (for level: within the margin of "
        f"{x.experiment.evaluation.noninferiority_margin:g} points), contradicted when it lies on the other side, "
        "inconclusive when it holds 0, partly in between. With two or more seeds that is asked of the interval over "
        "problems (or steps) and of the one over seeds (Student's t, paired by seed): both must hold. They "
        "speak of direction at this scale. Paper grades: A "
        "abstract, S summaries, Q machine summary of the full text, X derived from those.",
        tuple(cells),
    )


def _weights(x: Inputs) -> Cell:
    text, measure = "one shared QDQ path: weight error exactly 0", "weights that differ, engine against QAT trainer"
    runs = [
        s for s in x.sources if s.train["delta_weight"] is not None and s.arm.trainer.weight == s.arm.rollout.weight
        and s.arm.trainer.weight != "bf16"
    ]  # fmt: skip
    if not runs:
        return Cell(text, measure, "count", status.not_run("no QAT arm in this experiment"), 0.0, "A")
    count = sum(int(s.train["delta_weight"]["different"]) for s in runs)
    of = sum(int(s.train["delta_weight"]["elements"]) for s in runs)
    return Cell(
        text, measure, "count", status.zero(count, of), 0.0, "A", Interval(count, count, count), "all elements",
        seeds=seeds_of(runs), sources=keys_of(runs),
    )  # fmt: skip


def _sweep_claims(x: Inputs, table3: PaperTable) -> list[Cell]:
    """The gap falls with k at every step; k = 100 % reaches the BF16 floor. Channel masks, largest token."""
    study = x.study("k_sweep")
    column, words = next(iter(step0_tables.LARGEST.items()))
    falls, reaches = "the largest gap falls with every step of k (Table 3)", "RAC on all channels reaches the BF16 gap"
    claimed = round((claims.GAP_NAIVE - claims.TABLE_3[100.0]) / (claims.GAP_NAIVE - claims.GAP_BF16), 3)
    paper = round(claims.TABLE_3[100.0] - claims.GAP_NAIVE, 3)
    steps = [c for c in table3.cells if c.measure.startswith(f"{words}, channel")]
    if study is None:
        return [
            Cell(falls, f"{words}, k = 100 % - 0 %", "nats", x.no_study(), paper, "X"),
            Cell(reaches, "share of the way to the floor", "share", x.no_study(), claimed, "X"),
        ]
    confidence = x.experiment.evaluation.confidence
    where = {"granularity": "channel", "trainer": step0_tables.QAT_TRAINER}
    full, none = (study.by_seed(column, k=k, **where) for k in (1.0, 0.0))
    whole = paired(full, none, confidence)
    verdict = step0_tables.steps_fall(steps, whole)
    if whole is None or verdict is None:
        absent = status.not_run("diagnostics.k of this experiment has not both 0 and 1")
        return [Cell(falls, f"{words}, k = 100 % - 0 %", "nats", absent, paper, "X")]
    share = step0_tables.share_closed(study, "channel", column, confidence)
    seeds, key = tuple(full), (study.key,)
    cells = [
        Cell(falls, f"{words}, k = 100 % - 0 %, channel masks, step 0", "nats", verdict, paper, "X", whole,
             "seeds of the study", seeds=seeds, sources=key)
    ]  # fmt: skip
    if share is not None:
        at_least = step0_tables.REACHED
        cells.append(
            Cell(reaches, f"share of the way to the floor ({words}; claimed: above {at_least:g}), step 0", "share",
                 status.greater(share, at_least=at_least), claimed, "X", share, "seeds of the study", seeds=seeds,
                 sources=key)
        )  # fmt: skip
    return cells


def _layer_claims(x: Inputs, layers: PaperTable) -> list[Cell]:
    """One claim for each rollout that the paper may mean: a symmetric W4A4 trainer mismatches more in every layer."""
    cells = []
    for trainer, rollout in step0_tables.PAIRS[:2]:
        text = f"symmetric QAT mismatches more in every layer (Fig. 7), rollout {rollout}"
        measure = f"{step0_tables.BUILT_UP}, {step0_tables.pair_words(trainer, rollout)}"
        parts = [c for c in layers.cells if c.measure == f"{measure}, step 0"]
        if not parts:
            cells.append(Cell(text, measure, "relative", x.no_study(), grade="Q"))
            continue
        last = [c for c in parts if c.row.endswith("stream")][-1]
        cells.append(
            Cell(
                text, f"{measure}, {last.row}, symmetric - asymmetric, step 0", "relative",
                status.several([c.verdict for c in parts]), None, "Q", last.here_difference, last.interval_over,
                seeds=last.seeds, sources=last.sources,
            )
        )  # fmt: skip
    return cells
