"""What every study shares: the checkpoint, its captured files, and the trainer's log-probs, each computed once.

Contract: the captures are of this checkpoint and of modes the studies ask for; anything else is an error that names
what to run. Nothing is cached on disk: on the toy a rung costs a second.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file
from torch import Tensor

from quads.config import Arm, ConfigError, Diagnostics, Experiment
from quads.diagnostics import capture, ladder
from quads.diagnostics.capture import Dump, EngineMode
from quads.diagnostics.metrics import GapSettings
from quads.layers.setup import Precision

log = logging.getLogger(__name__)
Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """How to condense rows for reading: mean +- standard deviation over seeds of `values`, one line per `keys`."""

    title: str
    keys: tuple[str, ...]
    values: tuple[str, ...]


@dataclass(frozen=True)
class Study:
    """Result of one study: rows of the CSV, one figure, tables of the Markdown, sentences that qualify the numbers."""

    rows: list[Row]
    figure: Figure
    tables: list[Table]
    notes: list[str] = field(default_factory=list)


class Context:
    """See the module docstring; `modes`: engines beside those of the studies.

    Raises ConfigError when captures and checkpoint do not match.
    """

    def __init__(
        self,
        experiment: Experiment,
        arms: Sequence[Arm],
        model: Path,
        captures: Path,
        modes: Mapping[str, EngineMode] | None = None,
    ) -> None:
        self.experiment, self.arms, self.model, self.captures = experiment, list(arms), model, captures
        self.manifest = capture.load_manifest(captures)
        self.checkpoint_sha256 = capture.checkpoint_sha256(model)
        if self.manifest["checkpoint_sha256"] != self.checkpoint_sha256:
            raise ConfigError(
                f"{captures} was captured from checkpoint {self.manifest['checkpoint_sha256'][:12]}, {model} is "
                f"{self.checkpoint_sha256[:12]}; run `python -m quads.diagnose capture` on it, into another folder"
            )
        self.modes = capture.engine_modes(self.arms, self.settings) | dict(modes or {})
        self._dumps: dict[str, Dump] = {}
        self._scored: dict[Any, ladder.Scored] = {}

    @property
    def settings(self) -> Diagnostics:
        """The experiment's diagnostics section."""
        return self.experiment.diagnostics

    @property
    def device(self) -> str:
        """Where the trainer's side runs."""
        return self.experiment.runtime.device

    @property
    def gap_settings(self) -> GapSettings:
        """Clip range and micro-batch of the gap metrics."""
        grpo = self.experiment.grpo
        return GapSettings(grpo.clip_low, grpo.clip_high, self.settings.microbatch_sequences)

    @cached_property
    def rac_mode(self) -> EngineMode:
        """W4A4 with static block RAC at `mask_k`: the mode whose masks stand for RAC where a study needs one."""
        return self.modes[capture.rac_engine(self.settings.mask_k, self.arms).id]

    def mode(self, mode_id: str) -> EngineMode:
        """A captured mode by id."""
        return self.modes[mode_id]

    def dump(self, mode_id: str) -> Dump:
        """The captured file of a mode. Raises ResultFileError when it was not captured."""
        if mode_id not in self._dumps:
            self._dumps[mode_id] = capture.load_dump(self.captures, mode_id)
        return self._dumps[mode_id]

    def has_hidden(self, mode_id: str) -> bool:
        """Whether the blocks of this mode's engine were captured."""
        return capture.hidden_path(self.captures, mode_id).is_file()

    def hidden(self, mode_id: str) -> dict[str, Tensor]:
        """Block inputs and outputs of the engine (quads.diagnostics.layerwise)."""
        return load_file(capture.hidden_path(self.captures, mode_id))

    def masks(self, mode: EngineMode) -> dict[str, Tensor] | None:
        """The static masks that the engine of this mode used, or None."""
        return load_file(capture.masks_path(self.captures, mode)) if mode.mode.needs_masks else None

    def model_at(self, precision: Precision, *, masks: EngineMode | None = None, stored: bool = False) -> Any:
        """The trainer's model at a precision; `masks` is the mode whose static masks it takes."""
        chosen = self.masks(masks) if masks is not None and precision.rac is not None else None
        return ladder.load_model(self.model, precision, masks=chosen, stored=stored, device=self.device)

    def score(
        self, precision: Precision, mode_id: str, *, masks: EngineMode | None = None, stored: bool = False
    ) -> ladder.Scored:
        """The trainer's log-probs of the tokens that engine `mode_id` sampled; each is computed once."""
        key = (precision, mode_id, masks.id if masks is not None and precision.rac is not None else None, stored)
        if key not in self._scored:
            begun = time.monotonic()
            model = self.model_at(precision, masks=masks, stored=stored)
            tokens = self.dump(mode_id).tokens
            self._scored[key] = ladder.score(model, tokens, tokens_per_forward=self.settings.tokens_per_forward)
            spent, count = time.monotonic() - begun, len(self._scored)
            log.info("scored rung %d: trainer %s/%s on tokens of %s, %.1f s", count, precision.weight,
                     precision.activation, mode_id, spent)  # fmt: skip
        return self._scored[key]

    def trainer_precision(self, arm: Arm) -> Precision:
        """The arm's own trainer: the P of its decomposition."""
        t = arm.trainer
        return Precision(t.weight, t.activation, arm.weight_scale_group, skip=arm.keep_high_precision)

    @property
    def distinct_arms(self) -> list[Arm]:
        """The first arm of every pair of trainer and engine: arms that differ in the loss alone agree at step 0."""
        found: dict[Any, Arm] = {}
        for arm in self.arms:
            found.setdefault((self.trainer_precision(arm), capture.arm_engine(arm).id), arm)
        return list(found.values())

    def seeds(self, mode_id: str) -> list[tuple[int, Tensor]]:
        """(seed, bool [B]: its sequences) of a dump."""
        seed_B = self.dump(mode_id).values["seed"]
        return [(seed, seed_B == seed) for seed in self.settings.seeds]

    def calibration_like_tokens(self, mode_id: str, count: int = 64, *, seed: int | None = None) -> Tensor:
        """int64 [b, T]: first sequences of one (the commonest) length, for studies that need whole activations.

        Of all seeds, or of one.
        """
        tokens = self.dump(mode_id).tokens
        if seed is not None:
            tokens = tokens.take(self.dump(mode_id).values["seed"] == seed)
        length = int(torch.mode(tokens.length).values)
        return tokens.ids[tokens.length == length][:count, :length]
