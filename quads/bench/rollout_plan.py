# SPDX-License-Identifier: Apache-2.0
"""What the rollout benchmark times: the rollout modes of an experiment's arms, and shapes.

    mode          formats, RAC, scale groups and skip list of the first arm that rolls out in it
    Shape         batch requests at once, prompt tokens and response tokens each
    descriptions  one engine per mode as plain values, what quads.integrations.vllm.bench reads

Contract: a mode runs on what serves it in a training of the experiment (backend by `serving_backend`, graphs), or is
left out with the reason for which training refuses it; never on anything else. Else all engines of one run are equal:
same checkpoint, limits, cache and device. A mode that no arm has takes the formats of its name, the default RAC and
the first arm's skip list.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from quads.config import Arm, ConfigError, Experiment, Rac, RolloutPrecision, Runtime
from quads.config.run import not_capturable
from quads.files import read_checkpoint_config
from quads.integrations.vllm.execution import serving_backend
from quads.numerics.rac import RacSpec
from quads.rollout.mode import MODES, RolloutMode

KNOWN = (*MODES.values(), "w4a4+rac")
STOCK = ("bf16", "fp8")
SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")  # what is read of a config.json
_CACHE_BLOCK = 128  # the largest block of vLLM's caches: a sequence takes whole blocks
_SPARE = 1.25
# ASCII digits only (isdigit takes a superscript 2, int does not), and not more than a number of tokens can have.
_SHAPE = re.compile(r"([0-9]{1,9})x([0-9]{1,9})x([0-9]{1,9})")


@dataclass(frozen=True, order=True)
class Shape:
    """Requests at once, and tokens of each."""

    batch: int
    prompt: int
    response: int

    def __post_init__(self) -> None:
        if self.batch < 1 or self.prompt < 1 or self.response < 2:
            raise ConfigError(
                f"shape {self.batch} x ({self.prompt} + {self.response}): need batch >= 1, prompt >= 1 and response >= "
                "2 (decoding is what the tokens after the first take)"
            )


@dataclass(frozen=True)
class Engine:
    """Description of one engine; `name` is unique within a run."""

    name: str
    mode: str
    stock: bool
    model: str
    quantization: dict[str, Any]
    runtime: dict[str, Any]
    receipt: str
    masks: str | None
    max_tokens: int
    max_model_len: int
    vocabulary: int
    batches: tuple[int, ...]
    overrides: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


def shapes(batches: Sequence[int], prompts: Sequence[int], responses: Sequence[int]) -> list[Shape]:
    """Every combination, in order. Raises ConfigError."""
    return [Shape(*one) for one in product(batches, prompts, responses)]


def shape(word: str) -> Shape:
    """BATCHxPROMPTxRESPONSE, e.g. 64x512x128. Raises ConfigError."""
    found = _SHAPE.fullmatch(word)
    if found is None:
        raise ConfigError(f"shape {word!r}: give BATCHxPROMPTxRESPONSE, three whole numbers, e.g. 64x512x128")
    return Shape(*map(int, found.groups()))


def chosen_runtime(experiment: Experiment, backend: str | None, graphs: bool | None, *, plugin: bool = True) -> Runtime:
    """The runtime that training uses, with --backend and --graphs over it. Raises ConfigError where training would.

    plugin: False where vLLM's own engines run alone, which no backend serves and graphs always suit.
    """
    given = {k: v for k, v in (("rollout_backend", backend), ("rollout_graphs", graphs)) if v is not None}
    if not plugin:
        return experiment.runtime.model_copy(update=given)
    runtime = {**experiment.runtime.model_dump(), **given}
    try:
        return Runtime.model_validate(runtime)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"experiment {experiment.name} with rollout_backend={runtime['rollout_backend']}, "
            f"rollout_graphs={runtime['rollout_graphs']}: {reason}; choose with --backend and --graphs or --no-graphs"
        ) from None


def refused(modes: Sequence[str], arms: Sequence[Arm], runtime: Runtime) -> dict[str, str]:
    """The modes that a training with this runtime refuses, each with the reason. Raises ConfigError."""
    found = {}
    for name in modes if runtime.rollout_graphs else ():
        mode, _ = mode_of(name, arms)
        rollout = {key: value for key, value in asdict(mode).items() if key != "scale_group"}
        if reason := not_capturable(RolloutPrecision.model_validate(rollout)):
            found[name] = f"cannot be captured in CUDA graphs: {reason}; measure it with --no-graphs"
    return found


def mode_of(name: str, arms: Sequence[Arm]) -> tuple[RolloutMode, tuple[str, ...]]:
    """The mode and the skip list; w4a4+rac:25 compensates 25 % of the channels. Raises ConfigError for another name."""
    if name.startswith("w4a4+rac:"):
        mode, skip = mode_of("w4a4+rac", arms)
        try:
            share = Rac(k=float(name.partition(":")[2]) / 100).k
        except ValueError as error:
            raise ConfigError(f"mode {name!r}: after the colon stands a percentage above 0, up to 100") from error
        assert mode.rac is not None
        return replace(mode, rac=replace(mode.rac, k=share)), skip
    if name not in KNOWN:
        raise ConfigError(f"mode {name!r} is unknown; known: {', '.join(KNOWN)}, w4a4+rac:PERCENT")
    for arm in arms:
        if arm.rollout.mode == name:
            return RolloutMode.from_arm(arm.model_dump(mode="json")), arm.keep_high_precision
    weight, activation = next(pair for pair, known in MODES.items() if known == name.removesuffix("+rac"))
    rac = RacSpec(**Rac().model_dump()) if name.endswith("+rac") else None
    return RolloutMode(weight, activation, rac), arms[0].keep_high_precision


def cache_mib(config: dict[str, Any], wanted: Sequence[Shape], width: int) -> int:
    """KV cache in MiB that holds the largest shape with room to spare; width: bytes of a value."""
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    token: int = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * head * width
    slots = max(s.batch * math.ceil((s.prompt + s.response + 1) / _CACHE_BLOCK) * _CACHE_BLOCK for s in wanted)
    return math.ceil(_SPARE * token * slots / 2**20)


def engines(
    runtime: Runtime,
    arms: Sequence[Arm],
    modes: Sequence[str],
    wanted: Sequence[Shape],
    *,
    model: Path,
    masks: Path | None,
    stock: Sequence[str],
    receipts: Path,
) -> list[Engine]:
    """One description per mode, then the stock engines. Raises ConfigError, ResultFileError."""
    config = read_checkpoint_config(model, SIZES)
    if unknown := [name for name in stock if name not in STOCK]:
        raise ConfigError(f"vLLM has no stock {unknown[0]!r} of this benchmark; known: {', '.join(STOCK)}")
    if masks is not None and not masks.is_file():
        raise ConfigError(f"{masks}: no such file of masks; leave --masks away for random ones")
    length = max(s.prompt + s.response for s in wanted)
    need = cache_mib(config, wanted, 4 if runtime.engine_dtype == "float32" else 2)
    changed = {
        "max_sequences": max(s.batch for s in wanted),
        "kv_cache_mib": max(runtime.kv_cache_mib, need),
    }
    short = (config.get("max_position_embeddings") or length) < length
    common: dict[str, Any] = {
        "model": str(model),
        "runtime": runtime.model_copy(update=changed).model_dump(mode="json"),
        "masks": str(masks.resolve()) if masks else None,
        "max_tokens": max(s.response for s in wanted),
        "max_model_len": length,
        "vocabulary": config["vocab_size"],
        "batches": tuple(sorted({s.batch for s in wanted})),
        "overrides": {"max_position_embeddings": length} if short else {},
    }
    found = []
    for name in dict.fromkeys(modes):
        mode, skip = mode_of(name, arms)
        backend = serving_backend(mode.name, runtime.rollout_backend)
        said = mode.to_quantization_config("sync" if mode.needs_masks else None, tuple(skip), backend=backend)
        # through JSON, so that what is kept is what the engine's process reads
        said = json.loads(json.dumps(said))
        found.append(
            Engine(name, mode.name, False, quantization=said, receipt=str(receipts / f"{name}.json"), **common)
        )
    for name in dict.fromkeys(stock):
        label = f"stock {name}"
        found.append(Engine(label, name, True, quantization={}, receipt=str(receipts / f"{label}.json"), **common))
    return found
