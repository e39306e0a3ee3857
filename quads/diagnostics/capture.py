"""Capture: what an engine sampled and every log-prob it gives for it, in one file per engine mode.

    prompts x samples x seeds -> DIR/<mode>.safetensors, DIR/masks-<...>.safetensors, for modes of arms also
    DIR/<mode>.float32.safetensors and DIR/<mode>.hidden.safetensors; DIR/manifest.json (last)

A file holds B sequences, L tokens (prompt + response, right-padded with 0), R response tokens:
    ids int32 [B, L]; start, length, prompt, seed int32 [B]; finished uint8 [B]; reward float32 [B] (NaN: not graded)
    logp     float32 [B, R]   recorded while generating (decode): what training would use
    prefill, repeat           the same tokens scored by prefill in the same engine, twice
    single                    scored one sequence at a time, NaN for sequences that were not
    routed   int16 [B, L, N, S]   experts by MoE layer in the `single` pass, -1: unknown; absent without MoE layers
NaN right of a response. Its metadata is JSON: mode, checkpoint hash (weight version), comparison of the engine's
weights with the trainer's, receipt counts, settings. Sampling at temperature 1, one seed per request.
<mode>.hidden holds the engine's block inputs and outputs of some sequences (quads.diagnostics.layerwise).
The manifest's weight_version: hash of the checkpoint, and run id and step when it comes from a training run; its
routed_experts: how many sequences of each mode have their routing.
Contract: a file is complete or absent, and is reused only when its identity (checkpoint, prompts, settings, mode,
versions) is the one asked for. Differs from logging inside a run: the tokens are fixed, so that every trainer and
engine precision can be asked about the same ones.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from quads.config import Arm, ConfigError, Diagnostics, Experiment
from quads.diagnostics.ladder import Tokens, load_model, static_masks
from quads.diagnostics.prompts import Prompt, make_grade
from quads.diagnostics.stored import bf16_copy, checkpoint_sha256, file_sha256
from quads.evaluation.sampling import Sample
from quads.files import ResultFileError, read_result, write_json_atomic
from quads.layers.setup import Precision
from quads.layers.surgery import quantized_weights
from quads.numerics.rac import RacSpec
from quads.rollout.mode import RolloutMode

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineMode:
    """One engine to capture; `arm_mode`: a mode of an arm, scored in float32 too."""

    mode: RolloutMode
    skip: tuple[str, ...]
    arm_mode: bool

    @property
    def id(self) -> str:
        """File stem: w4a4+rac-k0.5-block16-static-sumsq."""
        rac = self.mode.rac
        parts = [self.mode.name, *([f"k{rac.k:g}", rac.granularity, rac.mask, rac.score] if rac else [])]
        parts += ["shard"] if self.mode.scale_group == "shard" else []
        if self.skip != Arm.model_fields["keep_high_precision"].default:
            parts.append("skip" + hashlib.sha256(repr(self.skip).encode()).hexdigest()[:6])
        return "-".join(parts)

    @property
    def trainer_weights(self) -> Precision:
        """The trainer's precision with this engine's weights and BF16 activations (T1)."""
        return Precision(self.mode.weight, "bf16", self.mode.scale_group, skip=self.skip)

    @property
    def trainer(self) -> Precision:
        """The trainer's emulation of the whole engine (T2)."""
        m = self.mode
        return Precision(m.weight, m.activation, m.scale_group, m.rac, self.skip)


def arm_engine(arm: Arm) -> EngineMode:
    """The engine mode in which an arm rolls out."""
    return EngineMode(RolloutMode.from_arm(arm.model_dump(mode="json")), arm.keep_high_precision, True)


def rac_engine(k: float, arms: Sequence[Arm], **changes: Any) -> EngineMode:
    """W4A4 with RAC at k (k = 0: plain W4A4), other fields of RacSpec by `changes`; skip as in the first arm."""
    rac = RacSpec(k, **changes) if k > 0 else None
    return EngineMode(
        RolloutMode("nvfp4", "nvfp4", rac, arms[0].weight_scale_group), arms[0].keep_high_precision, False
    )


GRANULARITIES = ("block16", "channel")
MASKS = [(granularity, mask) for granularity in GRANULARITIES for mask in ("static", "batch", "token")]


def engine_modes(arms: Sequence[Arm], settings: Diagnostics) -> dict[str, EngineMode]:
    """Every engine that the studies need, by id; modes of arms come first and win."""
    wanted = [arm_engine(arm) for arm in arms]
    wanted += [rac_engine(k, arms, granularity=granularity) for granularity in GRANULARITIES for k in settings.k]
    wanted += [rac_engine(settings.mask_k, arms, granularity=g, mask=m) for g, m in MASKS]
    modes: dict[str, EngineMode] = {}
    for mode in wanted:
        modes.setdefault(mode.id, mode)
    return modes


class CaptureEngine(Protocol):
    """The part of quads.integrations.vllm.score.ScoringEngine that is needed here."""

    receipt: dict[str, Any]

    def __enter__(self) -> CaptureEngine: ...
    def __exit__(self, *error: Any) -> None: ...
    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Sample]: ...
    def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[float]]: ...
    def routing(self, sequence: Sequence[int], start: int) -> tuple[list[float], Any]: ...
    def hidden(self, sequence: Sequence[int]) -> Mapping[str, Tensor]: ...
    def compare(self, trainer: Iterable[tuple[str, Any]]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Dump:
    """One captured file; tensors as in the module docstring (float32_prefill is None where it was not captured)."""

    tokens: Tokens
    values: dict[str, Tensor]
    float32_prefill: Tensor | None
    meta: dict[str, Any]

    def __getattr__(self, name: str) -> Tensor:
        values: dict[str, Tensor] = self.__dict__.get("values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"the dump holds no {name!r}; it holds {', '.join(sorted(values))}")

    @property
    def routed(self) -> Tensor | None:
        """int16 [B, L, N, S], or None when the engine gave none."""
        return self.values.get("routed")

    @property
    def groups(self) -> Tensor:
        """int64 [B]: sequences of one prompt and seed share a number (the group of GRPO's advantage)."""
        return self.values["seed"].long() * (int(self.values["prompt"].max()) + 1) + self.values["prompt"].long()


def load_dump(folder: Path, mode_id: str) -> Dump:
    """A captured file. Raises ResultFileError when it is missing."""
    path = folder / f"{mode_id}.safetensors"
    if not path.is_file():
        raise ResultFileError(f"{path}: missing; make it with `python -m quads.diagnose capture --out {folder}`")
    values = load_file(path)
    extra = folder / f"{mode_id}.float32.safetensors"
    tokens = Tokens(values["ids"].long(), values["start"].long(), values["length"].long())
    prefill32 = load_file(extra)["prefill"] if extra.is_file() else None
    return Dump(tokens, values, prefill32, read_meta(path))


def read_meta(path: Path) -> dict[str, Any]:
    """The JSON metadata of a captured file."""
    with safe_open(path, "pt") as file:
        loaded: dict[str, Any] = json.loads(file.metadata()["quads"])
    return loaded


def _save(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    save_file({k: v.contiguous() for k, v in tensors.items()}, part, metadata={"quads": json.dumps(meta)})
    os.replace(part, path)


def _is_done(path: Path, identity: Mapping[str, Any]) -> bool:
    return path.is_file() and read_meta(path).get("identity") == identity


def draw(prompts: int, settings: Diagnostics) -> list[tuple[int, int, int]]:
    """(seed, prompt, sample) of every sequence; seeds get disjoint prompts while there are enough of them."""
    count = settings.prompts
    if count > prompts:
        raise ConfigError(f"diagnostics.prompts={count} but there are {prompts} prompts; lower it or give more")
    drawn = []
    order = np.random.default_rng(0).permutation(prompts)
    for place, seed in enumerate(settings.seeds):
        chosen = order[place * count : (place + 1) * count]
        if len(settings.seeds) * count > prompts:
            chosen = np.random.default_rng(seed).permutation(prompts)[:count]
        drawn += [(seed, int(p), s) for p in chosen for s in range(settings.samples_per_prompt)]
    return drawn


def _request_seed(*key: int) -> int:
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:4], "big") & 0x7FFFFFFF


def capture_mode(
    engine: CaptureEngine,
    prompts: Sequence[Prompt],
    settings: Diagnostics,
    grade: Callable[[Prompt, list[int], bool], float],
) -> dict[str, Tensor]:
    """Sample, then score the same tokens three more ways; tensors of the module docstring."""
    keys = draw(len(prompts), settings)
    asked = [prompts[p].token_ids for _, p, _ in keys]
    samples = engine.generate(asked, [_request_seed(*key) for key in keys])
    sequences = [[*ids, *sample.token_ids] for ids, sample in zip(asked, samples, strict=True)]
    starts = [len(ids) for ids in asked]
    response = max(len(s.token_ids) for s in samples)
    scored = {"logp": [s.logprobs for s in samples]}
    scored |= {name: engine.score(sequences, starts) for name in ("prefill", "repeat")}
    tensors = {name: _padded(rows, response, math.nan, torch.float32) for name, rows in scored.items()}
    tensors |= {"ids": _padded(sequences, max(map(len, sequences)), 0, torch.int32)}
    single = torch.full_like(tensors["logp"], math.nan)
    routed: Tensor | None = None
    for b in _first_of_each_seed(keys, settings.single_sequences):
        row, experts = engine.routing(sequences[b], starts[b])
        single[b, : len(row)] = torch.tensor(row)
        if experts is not None:
            if routed is None:
                routed = torch.full((*tensors["ids"].shape, *experts.shape[1:]), -1, dtype=torch.int16)
            routed[b, : len(experts)] = experts
    finished = [s.finish_reason == "stop" for s in samples]
    reward = [grade(prompts[p], s.token_ids, f) for (_, p, _), s, f in zip(keys, samples, finished, strict=True)]
    tensors |= {
        "start": torch.tensor(starts, dtype=torch.int32),
        "length": torch.tensor([len(s) for s in sequences], dtype=torch.int32),
        "prompt": torch.tensor([p for _, p, _ in keys], dtype=torch.int32),
        "seed": torch.tensor([seed for seed, _, _ in keys], dtype=torch.int32),
        "finished": torch.tensor(finished, dtype=torch.uint8),
        "reward": torch.tensor(reward, dtype=torch.float32),
        "single": single,
    }
    return tensors | ({} if routed is None else {"routed": routed})


def _first_of_each_seed(keys: Sequence[tuple[int, int, int]], count: int) -> list[int]:
    """Every prompt's first sample before any prompt's second one, `count` per seed."""
    chosen: list[int] = []
    for seed in dict.fromkeys(key[0] for key in keys):
        own = sorted((i for i, key in enumerate(keys) if key[0] == seed), key=lambda i: (keys[i][2], i))
        chosen += own[:count]
    return chosen


def _padded(rows: Sequence[Sequence[float]], width: int, fill: float, dtype: torch.dtype) -> Tensor:
    padded = torch.full((len(rows), width), fill, dtype=dtype)
    for b, row in enumerate(rows):
        padded[b, : len(row)] = torch.tensor(row, dtype=dtype)
    return padded


# (mode, engine dtype, file of static masks, checkpoint) -> an engine that is started on entering it
StartEngine = Callable[[EngineMode, str, Path | None, Path], CaptureEngine]


def capture_all(
    modes: Mapping[str, EngineMode],
    prompts: Sequence[Prompt],
    calibration_ids: Tensor,
    checkpoint: Path,
    experiment: Experiment,
    out: Path,
    *,
    start: StartEngine,
    versions: Mapping[str, Any],
    own_masks: Mapping[str, Path] | None = None,
    origin: Mapping[str, Any] | None = None,
) -> None:
    """Capture every mode that is not captured yet, one engine at a time; then the manifest.

    own_masks: static masks by mode id that are not to be calibrated (those of a training run); origin: where the
    checkpoint comes from (run id, step), for the manifest's weight_version.
    """
    out.mkdir(parents=True, exist_ok=True)
    settings = experiment.diagnostics
    sized = ("prompts", "samples_per_prompt", "seeds", "single_sequences", "layer_tokens")
    given = own_masks or {}
    common = {
        "checkpoint_sha256": checkpoint_sha256(checkpoint),
        "prompts_sha256": hashlib.sha256(repr([p.token_ids for p in prompts]).encode()).hexdigest(),
        "calibration_sha256": hashlib.sha256(repr(calibration_ids.tolist()).encode()).hexdigest(),
        "settings": settings.model_dump(mode="json", include=set(sized)),
        "versions": dict(versions),
    }
    grade = make_grade(checkpoint)
    begun = time.monotonic()
    for number, (name, mode) in enumerate(modes.items(), 1):
        masks = _masks_file(mode, calibration_ids, checkpoint, experiment.runtime.device, out, given.get(name))
        identity = {**common, "mode": mode.mode.to_quantization_config("file" if masks else None, mode.skip)}
        identity |= {"own_masks_sha256": file_sha256(given[name])} if name in given else {}
        path = out / f"{name}.safetensors"
        if not _is_done(path, identity):
            with start(mode, experiment.runtime.engine_dtype, masks, checkpoint) as engine:
                trainer = load_model(checkpoint, mode.trainer_weights, device="cpu")
                weights = engine.compare(quantized_weights(trainer))
                tensors = capture_mode(engine, prompts, settings, grade)
                if mode.arm_mode and settings.layer_tokens:
                    _save(hidden_path(out, name), _hidden(engine, tensors, settings), {"identity": identity})
                meta: dict[str, Any] = {"identity": identity, "id": name, "weights": weights}
                meta |= {"dtype": experiment.runtime.engine_dtype}
                meta |= {"backend": engine.receipt.get("backend"), "counts": engine.receipt.get("counts")}
            _save(path, tensors, meta)
        if mode.arm_mode and settings.float32_engine:
            _capture_float32(out, name, identity, start, mode, masks, checkpoint)
        spent = time.monotonic() - begun
        log.info("captured %d/%d %s, %.0f s, about %.0f s left", number, len(modes), name, spent,
                 spent / number * (len(modes) - number))  # fmt: skip
    shutil.rmtree(out / "stored-bf16", ignore_errors=True)
    ending = {
        "weight_version": {"checkpoint_sha256": common["checkpoint_sha256"], **(origin or {"step": 0})},
        "routed_experts": {name: _routing_known(out, name) for name in modes},
        "modes": list(modes),
        "seconds": time.monotonic() - begun,
    }
    write_json_atomic(out / "manifest.json", {**common, **ending})


def _hidden(engine: CaptureEngine, tensors: Mapping[str, Tensor], settings: Diagnostics) -> dict[str, Tensor]:
    from quads.diagnostics.layerwise import capture_hidden

    lengths, seeds = tensors["length"].tolist(), tensors["seed"].tolist()
    sequences = [row[:n].tolist() for row, n in zip(tensors["ids"], lengths, strict=True)]
    order = range(len(sequences))
    return capture_hidden(engine, sequences, tensors["start"].tolist(), order, seeds, settings.layer_tokens)


def hidden_path(out: Path, mode_id: str) -> Path:
    """Where the block inputs and outputs of a mode lie."""
    return out / f"{mode_id}.hidden.safetensors"


def _routing_known(out: Path, mode_id: str) -> dict[str, int]:
    """Sequences with their experts, and all sequences; 0 when the engine gave none."""
    dump = load_dump(out, mode_id)
    known = 0 if dump.routed is None else int((dump.routed >= 0).all(-1).all(-1).any(1).sum())
    return {"sequences": len(dump.tokens.length), "with_routing": known}


def _capture_float32(
    out: Path,
    name: str,
    identity: Mapping[str, Any],
    start: StartEngine,
    mode: EngineMode,
    masks: Path | None,
    checkpoint: Path,
) -> None:
    """Score a captured mode's tokens in a float32 engine that holds what the bf16 engine stores."""
    path = out / f"{name}.float32.safetensors"
    if _is_done(path, identity):
        return
    dump = load_dump(out, name)
    sequences = [row[:n].tolist() for row, n in zip(dump.tokens.ids, dump.tokens.length.tolist(), strict=True)]
    with start(mode, "float32", masks, bf16_copy(checkpoint, out / "stored-bf16")) as engine:
        rows = engine.score(sequences, dump.tokens.start.tolist())
    prefill = _padded(rows, dump.tokens.mask.shape[1], math.nan, torch.float32)
    _save(path, {"prefill": prefill}, {"identity": identity, "dtype": "float32"})


def masks_path(out: Path, mode: EngineMode) -> Path:
    """Where the static masks of a mode lie."""
    return out / f"masks-{mode.id}.safetensors"


def _masks_file(
    mode: EngineMode, ids: Tensor, checkpoint: Path, device: str, out: Path, given: Path | None
) -> Path | None:
    """The given masks, or calibrated as in training (on a model with this mode's weights); None without static ones."""
    rac = mode.mode.rac
    if rac is None or not mode.mode.needs_masks:
        return None
    path = masks_path(out, mode)
    if given is not None:
        _save(path, {key: mask.bool() for key, mask in load_file(given).items()}, {"id": mode.id, "given": True})
        return path
    masks = static_masks(checkpoint, rac, ids, precision=mode.trainer_weights, device=device)
    _save(path, masks, {"id": mode.id})
    return path


def load_manifest(folder: Path) -> dict[str, Any]:
    """DIR/manifest.json of a capture. Raises ResultFileError."""
    return read_result(folder / "manifest.json", "capture manifest", ("modes", "checkpoint_sha256", "settings"))
