"""Where the gap comes from after training: a run's last checkpoint in its own engine (own masks) and in a BF16 engine.

    run.csv          one row per engine x trainer: gap metrics, and for the arm's own pair every term of decompose.py
    run_layers.csv   per quantized input: QSNR, crest factor, RAC energy of the run's masks, overlap with the best ones
    trained.csv, trained_layers.csv     the same rows of all runs; their spread is over training seeds

Rows: own engine with the arm's own trainer; BF16 engine with the arm's trainer and with a BF16 one (the floor of these
weights). Prompts: `diagnostics.trained_prompts`, of the first seed, evaluation set, sampled anew by each engine.
Masks are those the run sent with its last weights (calibrated on them); arms without RAC get masks calibrated now, in
run_layers.csv only. Differs from the step-0 studies in the weights, and from training's own log in that the terms are
split against the deployed engine and its numerics.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from quads.config import Arm, ConfigError, Experiment, Run
from quads.diagnostics import capture, figures, figures_arms
from quads.diagnostics.capture import EngineMode
from quads.diagnostics.context import Context, Row, Study, Table
from quads.diagnostics.decompose import TERMS, summary
from quads.diagnostics.ladder import static_masks
from quads.diagnostics.layers import layer_table
from quads.diagnostics.measure import arm_decomposition, gap_rows, precision_name
from quads.files import ResultFileError, read_result
from quads.layers.setup import Precision
from quads.numerics.rac import RacSpec
from quads.rollout.mode import RolloutMode

HOW = ("mean_token_abs", "p99_token_abs", "max_token_abs")


@dataclass(frozen=True)
class TrainedRun:
    """What is needed of a finished run."""

    run: Run
    checkpoint: Path
    masks: Path | None
    step: int

    @classmethod
    def load(cls, run: Run, train: Path) -> TrainedRun:
        """From TRAIN/result.json. Raises ConfigError for another run or a checkpoint that is gone."""
        path = train / "result.json"
        found = read_result(path, "training result", ("run_id", "checkpoint", "rac_masks", "steps"))
        if found["run_id"] != run.id:
            raise ConfigError(f"{path} is of run {found['run_id']!r}, this configuration is {run.id!r}")
        masks = Path(found["rac_masks"]) if found["rac_masks"] else None
        for needed in (Path(found["checkpoint"]), masks):
            if needed is not None and not needed.exists():
                raise ConfigError(f"{path} names {needed}, which is gone; train the run again or give its new folder")
        return cls(run, Path(found["checkpoint"]), masks, int(found["steps"]))

    @property
    def arm(self) -> Arm:
        """The run's arm."""
        return self.run.arm

    @property
    def modes(self) -> dict[str, EngineMode]:
        """The arm's own engine, then BF16 (scored in float32 only where it is the arm's own)."""
        own = capture.arm_engine(self.arm)
        plain = EngineMode(RolloutMode(scale_group=self.arm.weight_scale_group), own.skip, False)
        return {mode.id: mode for mode in (plain, own)}  # own wins where it is BF16 itself

    @property
    def own_masks(self) -> dict[str, Path]:
        """Mask file by mode id."""
        own = capture.arm_engine(self.arm)
        if not own.mode.needs_masks:
            return {}
        if self.masks is None:
            raise ConfigError(f"run {self.run.id} rolls out with static RAC masks, but its result names no mask file")
        return {own.id: self.masks}

    @property
    def origin(self) -> dict[str, Any]:
        """Weight version of the capture."""
        return {"run_id": self.run.id, "step": self.step}


def small(experiment: Experiment) -> Experiment:
    """The experiment with the sizes of a run's capture: fewer prompts, one seed, no block recordings."""
    full = experiment.diagnostics
    update = {"prompts": min(full.prompts, full.trained_prompts), "seeds": full.seeds[:1], "layer_tokens": 0}
    return experiment.model_copy(update={"diagnostics": full.model_copy(update=update)})


def run_study(context: Context, trained: TrainedRun) -> Study:
    """Rows of one run (see the module docstring)."""
    arm, modes = trained.arm, trained.modes
    own = capture.arm_engine(arm)
    plain = next(mode for mode in modes.values() if mode.mode.name == "bf16")
    trainer = context.trainer_precision(arm)
    floor = Precision(scale_group=arm.weight_scale_group, skip=own.skip)
    keys = {"arm": arm.name, "seed": trained.run.seed, "run_id": trained.run.id, "step": trained.step}
    rows: list[Row] = []
    for engine, mode, precision in dict.fromkeys([("own", own, trainer), ("bf16", plain, trainer),
                                                  ("bf16", plain, floor)]):  # fmt: skip
        scored = context.score(precision, mode.id, masks=context.rac_mode)
        (row,) = gap_rows(context, scored, mode.id)
        row |= {**keys, "engine": engine, "rollout": mode.id, "trainer": precision_name(precision)}
        row["weights_different"] = context.dump(mode.id).meta["weights"]["different"]
        rows.append(row | (_terms(context, arm) if engine == "own" else {}))
    values = ("mean_token_abs_d", "max_token_abs_d", *(f"mean_token_abs_{t}" for t in TERMS))
    table = Table("After training", ("arm", "seed", "engine", "trainer"), values)
    return Study(_ordered(rows), figures_arms.trained(rows, []), [table])


def _ordered(rows: list[Row]) -> list[Row]:
    first = ("arm", "seed", "run_id", "step", "engine", "rollout", "trainer")
    return [{key: row[key] for key in (*first, *(k for k in row if k not in first))} for row in rows]


def _terms(context: Context, arm: Arm) -> Row:
    """Columns <statistic>_<term> of the decomposition, and the term with the largest mean."""
    parts = arm_decomposition(context, arm)
    if arm.trainer.weight == arm.rollout.weight and bool((parts.terms["delta_weight"] != 0).any()):
        raise ValueError(f"arm {arm.name} trains with its rollout's weights, but delta_weight is not 0")
    _, everything = context.seeds(capture.arm_engine(arm).id)[0]
    found = {row["term"]: row for row in summary(parts, everything) if HOW[0] in row}
    columns: Row = {f"{how}_{term}": row[how] for term, row in found.items() for how in HOW}
    columns["largest_term"] = max(TERMS, key=lambda t: columns[f"{HOW[0]}_{t}"])
    return columns


def run_layers(context: Context, trained: TrainedRun, calibration: Tensor) -> Study:
    """Per quantized input of the trained model at the engine's weights; masks as the module docstring says."""
    own = capture.arm_engine(trained.arm)
    masks = context.masks(own)
    spec = own.mode.rac or RacSpec(context.settings.mask_k)
    if masks is None:
        masks = static_masks(trained.checkpoint, spec, calibration, precision=own.trainer_weights,
                             device=context.device)  # fmt: skip
    keys = {"arm": trained.arm.name, "seed": trained.run.seed, "run_id": trained.run.id,
            "masks": "own" if own.mode.needs_masks else "calibrated now"}  # fmt: skip
    table = layer_table(context.model_at(own.trainer_weights), context.calibration_like_tokens(own.id), spec, masks)
    rows: list[Row] = [{**keys, "granularity": spec.granularity, **row} for row in table]
    return Study(rows, figures.layer_bars(rows), [_layers(rows)])


def _layers(rows: Sequence[Row]) -> Table:
    text = ("arm", "seed", "run_id", "masks", "granularity", "layer", "channels")
    return Table("Layers after training", ("layer", "arm", "masks"), tuple(k for k in rows[0] if k not in text))


def collect(folders: Sequence[Path], step0: Path | None) -> dict[str, Study]:
    """The studies `trained` and `trained_layers` over finished run folders; step0: folder of the step-0 studies.

    Raises ResultFileError for a folder without its tables.
    """
    rows = [row for folder in folders for row in read_table(folder / "run.csv")]
    layers = [row for folder in folders for row in read_table(folder / "run_layers.csv")]
    before = read_table(step0 / "decomposition.csv") if step0 is not None else []
    measured = ("mean_token_abs_d", "max_token_abs_d", "mean_seq_max_token_abs_d")
    parts = tuple(f"mean_token_abs_{t}" for t in (*TERMS, "num_storage", "num_bf16", "num_decode"))
    health = ("ess_seq", "clipped_share_token", "truncated_share", "rollout_reward", "weights_different")
    values = (*measured, *parts, *health)
    arms = {row["arm"] for row in rows}
    shown = Table("After training", ("engine", "arm", "trainer"), values)
    notes = [
        "± is over training seeds; each run is sampled on its own prompts and by its own engine",
        "largest term of every run: " + "; ".join(_largest(rows)),
    ]
    figure = figures_arms.trained(rows, [row for row in before if row["arm"] in arms])
    first = dict.fromkeys(row["arm"] for row in layers)
    shape = [row for row in layers if row["arm"] == next(reversed(first))]
    return {
        "trained": Study(rows, figure, [shown], notes),
        "trained_layers": Study(layers, figures.layer_bars(shape), [_layers(layers)], [
            f"figure: arm {shape[0]['arm']}", "masks `own`: those the run's engine used with its last weights"]),
    }  # fmt: skip


def _largest(rows: Sequence[Row]) -> list[str]:
    return [f"{r['arm']} seed {r['seed']}: {r['largest_term']}" for r in rows if r["engine"] == "own"]


def read_table(path: Path) -> list[Row]:
    """Rows of a CSV of these studies, numbers as numbers. Raises ResultFileError when it is missing."""
    if not path.is_file():
        raise ResultFileError(f"{path}: missing; make it with `python -m quads.diagnose`")
    with path.open(newline="") as file:
        return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> Any:
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return text


def sources(folders: Sequence[Path]) -> dict[str, Any]:
    """Checkpoint hash and commit by run id, and one hash over all of them, of the folders' run.json."""
    found = {}
    for folder in folders:
        meta = read_result(folder / "run.json", "diagnostics of a run", ("origin", "checkpoint_sha256", "commit"))
        found[meta["origin"]["run_id"]] = {key: meta[key] for key in ("checkpoint_sha256", "commit", "origin")}
    together = hashlib.sha256(repr(sorted((k, v["checkpoint_sha256"]) for k, v in found.items())).encode())
    return {"checkpoint_sha256": together.hexdigest(), "runs": found}
