# SPDX-License-Identifier: Apache-2.0
"""RolloutMode: the number formats of a rollout engine, and the quantization config that carries them to it.

    mode        weight  activation  rac
    bf16        bf16    bf16        -
    fp8         fp8     fp8         -
    w4a16       nvfp4   bf16        -
    w4a4        nvfp4   nvfp4       -
    w4a4+rac    nvfp4   nvfp4       {k, granularity, mask, score}

    config = {"quant_method": "quads", "weight", "activation", "scale_group", "rac", "rac_masks", "skip", "receipt",
              "backend"}

rac_masks: null, "sync" (masks arrive with every weight update) or the path of a safetensors file with bool tensors by
engine key. skip: list of dotted name parts the engine leaves in high precision besides head, embedding, norms and
routers, which are never quantized; one that fits no module of the model stops the engine. receipt: path of the JSON
file in which the engine records what it quantized, or null. backend: what multiplies. "reference" (default): fp32
torch, the definition, on any device, eager only; "triton": exact emulation on BF16 units, needs a GPU; "native" and
"cutlass": FP4 units (compute capability 10) through Triton or vLLM's ops, for modes w4a4 and w4a4+rac; the second
rounds once more. One that cannot run is an error, never a fallback.
Contract: closed. An unknown key or value is a ValueError that names the known ones; from_ and to_ are inverse.
Differs from engine flags in that the whole description is one dict, checked in the launcher and again in the engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from quads.numerics.rac import RacSpec

QUANT_METHOD = "quads"
MODES: dict[tuple[str, str], str] = {
    ("bf16", "bf16"): "bf16",
    ("fp8", "fp8"): "fp8",
    ("nvfp4", "bf16"): "w4a16",
    ("nvfp4", "nvfp4"): "w4a4",
}
SCALE_GROUPS = ("fused", "shard")
BACKENDS = ("reference", "triton", "native", "cutlass")
_DOTTED = re.compile(r"\w+(\.\w+)*")


@dataclass(frozen=True)
class RolloutMode:
    """See the module docstring; raises ValueError for a combination that is no mode."""

    weight: str = "bf16"
    activation: str = "bf16"
    rac: RacSpec | None = None
    scale_group: str = "fused"

    def __post_init__(self) -> None:
        if (self.weight, self.activation) not in MODES:
            known = ", ".join(f"{w}/{a} ({name})" for (w, a), name in MODES.items())
            raise ValueError(f"weight/activation {self.weight}/{self.activation} is no rollout mode; known: {known}")
        if self.rac is not None and self.activation != "nvfp4":
            raise ValueError(
                f"rac compensates the NVFP4 activation error, got activation {self.activation!r}; drop rac"
            )
        if self.scale_group not in SCALE_GROUPS:
            raise ValueError(f"scale_group {self.scale_group!r} is unknown; known: {', '.join(SCALE_GROUPS)}")

    @property
    def name(self) -> str:
        """bf16, fp8, w4a16, w4a4 or w4a4+rac."""
        return MODES[self.weight, self.activation] + ("+rac" if self.rac else "")

    @property
    def needs_masks(self) -> bool:
        """Whether static RAC masks must be supplied."""
        return self.rac is not None and self.rac.mask == "static"

    @classmethod
    def from_arm(cls, arm: Mapping[str, Any]) -> RolloutMode:
        """From a resolved Arm as plain dict: its `rollout` section and `weight_scale_group`."""
        return cls.from_dict({**arm["rollout"], "scale_group": arm["weight_scale_group"]})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RolloutMode:
        """From {weight, activation, rac, scale_group} with plain values."""
        _closed("rollout mode", values, {f.name for f in fields(cls)})
        rac = values.get("rac")
        if rac is not None and not isinstance(rac, RacSpec):
            _closed("rac", rac, {f.name for f in fields(RacSpec)})
            rac = RacSpec(**rac)
        return cls(**{**values, "rac": rac})

    def to_quantization_config(
        self,
        rac_masks: str | None = None,
        skip: tuple[str, ...] = (),
        receipt: str | None = None,
        backend: str = "reference",
    ) -> dict[str, Any]:
        """Value of hf_overrides["quantization_config"]: plain JSON types only."""
        return EngineConfig(self, rac_masks, skip, receipt, backend).to_dict()

    @classmethod
    def from_quantization_config(cls, config: Mapping[str, Any]) -> RolloutMode:
        """The mode inside a quantization config; the rest of it is read by EngineConfig.from_dict."""
        return EngineConfig.from_dict(config).mode


@dataclass(frozen=True)
class EngineConfig:
    """The whole quantization config of an engine; raises ValueError when static masks have no source, or for a skip
    that is not a list or tuple of dotted names.
    """

    mode: RolloutMode = RolloutMode()
    rac_masks: str | None = None
    skip: tuple[str, ...] = ()
    receipt: str | None = None
    backend: str = "reference"

    def __post_init__(self) -> None:
        object.__setattr__(self, "skip", _names(self.skip))
        if self.backend not in BACKENDS:
            raise ValueError(f"backend {self.backend!r} is unknown; known: {', '.join(BACKENDS)}")
        if self.mode.needs_masks and not self.rac_masks:
            raise ValueError(
                "rac.mask is static but rac_masks is null; give 'sync' (masks arrive with every weight update) or the "
                "path of a safetensors file written by calibration, or choose rac.mask batch or token"
            )
        if self.rac_masks and not self.mode.needs_masks:
            raise ValueError(
                f"rac_masks={self.rac_masks!r} but mode {self.mode.name} uses no static mask; set it to null"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "quant_method": QUANT_METHOD,
            **asdict(self.mode),
            "rac_masks": self.rac_masks,
            "skip": list(self.skip),
            "receipt": self.receipt,
            "backend": self.backend,
        }

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> EngineConfig:
        """Inverse of to_dict; missing keys take the defaults of the dataclasses. Raises ValueError for unknown keys."""
        mode_keys = {f.name for f in fields(RolloutMode)}
        _closed("quantization_config", config, mode_keys | {"quant_method", "rac_masks", "skip", "receipt", "backend"})
        if config.get("quant_method", QUANT_METHOD) != QUANT_METHOD:
            raise ValueError(f"quant_method {config['quant_method']!r} is not {QUANT_METHOD!r}")
        mode = RolloutMode.from_dict({key: config[key] for key in mode_keys if key in config})
        rest = {key: config[key] for key in ("rac_masks", "skip", "receipt", "backend") if key in config}
        return cls(mode, **rest)


def _names(skip: Any) -> tuple[str, ...]:
    # A str is a sequence of one-letter names that match nothing: it would switch the list off without a word.
    if isinstance(skip, (str, bytes)) or not isinstance(skip, Sequence):
        raise ValueError(f"skip must be a list of dotted module names, got {skip!r}; write [{skip!r}] for one name")
    for entry in skip:
        if not isinstance(entry, str) or not _DOTTED.fullmatch(entry):
            raise ValueError(f"skip holds {entry!r}, which is no dotted module name such as 'mlp.gate' or 'layers.0'")
    return tuple(skip)


def _closed(what: str, given: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise ValueError(f"{what}: unknown key(s) {', '.join(unknown)}; known: {', '.join(sorted(known))}")
