# SPDX-License-Identifier: Apache-2.0
"""What the rollout benchmark times: the rollout modes of an experiment's arms, and shapes.

    mode          formats, RAC, scale groups and skip list of the first arm that rolls out in it
    Shape         batch requests at once, prompt tokens and response tokens each
    descriptions  one engine per mode as plain values, what quads.integrations.vllm.bench reads

Contract: all engines of one run are equal but for the mode: same checkpoint, limits, cache and device. A mode that no
arm has takes the formats of its name, the default RAC and the first arm's skip list.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from quads.config import Arm, ConfigError, Experiment, Rac
from quads.files import read_result
from quads.numerics.rac import RacSpec
from quads.rollout.mode import MODES, RolloutMode

KNOWN = (*MODES.values(), "w4a4+rac")
STOCK = ("bf16", "fp8")
_CACHE_BLOCK = 128  # the largest block of vLLM's caches: a sequence takes whole blocks
_SPARE = 1.25


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
    graphs: bool
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
    numbers = word.split("x")
    if len(numbers) != 3 or not all(n.isdigit() for n in numbers):
        raise ConfigError(f"shape {word!r}: give BATCHxPROMPTxRESPONSE, e.g. 64x512x128")
    return Shape(*map(int, numbers))


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
    token: int = 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head * width
    slots = max(s.batch * math.ceil((s.prompt + s.response + 1) / _CACHE_BLOCK) * _CACHE_BLOCK for s in wanted)
    return math.ceil(_SPARE * token * slots / 2**20)


def engines(
    experiment: Experiment,
    arms: Sequence[Arm],
    modes: Sequence[str],
    wanted: Sequence[Shape],
    *,
    model: Path,
    masks: Path | None,
    backend: str,
    stock: Sequence[str],
    graphs: bool,
    receipts: Path,
) -> list[Engine]:
    """One description per mode, then the stock engines. Raises ConfigError, ResultFileError."""
    config = read_result(model / "config.json", "checkpoint configuration", ("num_hidden_layers", "vocab_size"))
    if unknown := [name for name in stock if name not in STOCK]:
        raise ConfigError(f"vLLM has no stock {unknown[0]!r} of this benchmark; known: {', '.join(STOCK)}")
    if masks is not None and not masks.is_file():
        raise ConfigError(f"{masks}: no such file of masks; leave --masks away for random ones")
    length = max(s.prompt + s.response for s in wanted)
    need = cache_mib(config, wanted, 4 if experiment.runtime.engine_dtype == "float32" else 2)
    changed = {
        "max_sequences": max(s.batch for s in wanted),
        "kv_cache_mib": max(experiment.runtime.kv_cache_mib, need),
    }
    short = config.get("max_position_embeddings", length) < length
    common: dict[str, Any] = {
        "model": str(model),
        "runtime": experiment.runtime.model_copy(update=changed).model_dump(mode="json"),
        "masks": str(masks.resolve()) if masks else None,
        "max_tokens": max(s.response for s in wanted),
        "max_model_len": length,
        "vocabulary": config["vocab_size"],
        "graphs": graphs,
        "batches": tuple(sorted({s.batch for s in wanted})),
        "overrides": {"max_position_embeddings": length} if short else {},
    }
    found = []
    for name in dict.fromkeys(modes):
        mode, skip = mode_of(name, arms)
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
