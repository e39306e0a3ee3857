"""One run = one arm with one seed, fully resolved; its hash names the result's path.

    hash = sha256(canonical JSON of the run)[:10]

Contract: only what can change a training result is in a Run, so that a new arm, a new seed, an evaluation setting or
a tracking address never moves a finished run to another path.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel

from quads.config.arms import Arm, Frozen, RolloutPrecision
from quads.config.diagnostics import Collapse
from quads.config.errors import ConfigError
from quads.config.experiment import Data, Experiment, Grpo, Model, Runtime, Warmup

# Fields of a run that change how it is shown, scheduled or saved, never what it computes: they are not in its hash.
COSMETIC: dict[str, set[str]] = {
    "arm": {"title", "paper_row"},
    "grpo": {"save_every"},
    # trainer_backend and weight_cache: equal bits whatever they say (tests/layers, tests/kernels); trainer_experts not.
    "runtime": {"memory_gib", "object_store_mib", "trainer_backend", "weight_cache"},
}

# Runtime fields that came after results existed: in a hash only when they say other than what was always done.
LATER = ("rollout_backend", "rollout_graphs", "chunked_head")


class Run(Frozen):
    """Everything that training depends on."""

    arm: Arm
    seed: int
    model: Model
    data: Data
    warmup: Warmup
    grpo: Grpo
    runtime: Runtime
    decompose_every: int = 0
    collapse: Collapse = Collapse()

    @property
    def id(self) -> str:
        """Folder name: arm, seed and config hash."""
        return f"{self.arm.name}-seed{self.seed}-{config_hash(self)}"


def not_capturable(rollout: RolloutPrecision) -> str | None:
    """Why no backend's layers of this mode can be captured in a CUDA graph, or None.

    The rule of quads.kernels.backend.graph_safe without torch (a test holds them equal); the engine asks that one.
    """
    if rollout.rac is not None and rollout.rac.mask == "batch":
        return "a batch mask needs the scores of all rows first"
    if rollout.rac is not None and rollout.rac.mask == "token" and rollout.rac.granularity != "block16":
        return "no kernel selects a token mask by channel"
    return None


def _at_default(runtime: Runtime) -> set[str]:
    return {name for name in LATER if getattr(runtime, name) == Runtime.model_fields[name].default}


def canonical_json(model: BaseModel) -> str:
    """The model as JSON with sorted keys: configs that compute the same give the same text."""
    exclude: Any = None
    if isinstance(model, Run):
        exclude = {**COSMETIC, "runtime": COSMETIC["runtime"] | _at_default(model.runtime)}
        # Unless it may stop the run, the detector only says what it saw.
        if not model.grpo.stop_on_collapse:
            exclude["collapse"] = True
    elif isinstance(model, Runtime):
        exclude = _at_default(model)
    return json.dumps(model.model_dump(mode="json", exclude=exclude), sort_keys=True, separators=(",", ":"))


def config_hash(*models: BaseModel) -> str:
    """Ten hex digits over the canonical JSON of the given models, in order."""
    digest = hashlib.sha256("\n".join(canonical_json(m) for m in models).encode())
    return digest.hexdigest()[:10]


def model_hash(config: Run | Experiment) -> str:
    """Ten hex digits over what decides the checkpoint that training starts from."""
    if config.model.checkpoint is not None:
        return config_hash(config.model)
    return config_hash(config.model, config.data, config.warmup)


def resolve_run(experiment: Experiment, arm: Arm, seed: int) -> Run:
    """The run of `arm` with `seed` under `experiment`. ConfigError for graphs with an arm that cannot be captured."""
    reason = not_capturable(arm.rollout) if experiment.runtime.rollout_graphs else None
    if reason:
        raise ConfigError(
            f"runtime.rollout_graphs=true, but arm {arm.name} (mode {arm.rollout.mode}) cannot be captured: {reason}; "
            "set it to false or leave the arm out"
        )
    return Run(
        arm=arm,
        seed=seed,
        model=experiment.model,
        data=experiment.data,
        warmup=experiment.warmup,
        grpo=experiment.grpo,
        runtime=experiment.runtime,
        decompose_every=experiment.diagnostics.training_every,
        collapse=experiment.diagnostics.collapse,
    )
