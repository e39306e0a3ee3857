"""FSDP engine with the QAT surgery, and RAC masks in its weight stream (verl loads this module as `external_lib`).

Contract: the surgery happens on the plain Hugging Face module, before FSDP wraps it, and only swaps classes, so that
sharding, checkpoints, `unfuse_moe_params` and the optimizer see the stock model. `get_per_tensor_param` yields verl's
BF16-able tensors and then, for static RAC, one bool mask [K] per quantized input as `quads.rac_mask.<engine module>`:
the masks are a pure function of the current weights and the calibration tokens, so any engine can reproduce them.

Differs from verl's own QAT (`fsdp_config.qat`), which leaves transformers' fused 3-D experts in BF16.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from quads.layers.surgery import Precision, apply_surgery
from quads.numerics.rac import RacSpec
from quads.trainer.calibration import RAC_MASK_PREFIX, calibrate

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuadsOptions:
    """`actor_rollout_ref.quads` of the config, as written by overrides.py."""

    precision: Precision
    rac: RacSpec | None
    calibration: str | None
    masks: str | None
    surgery_report: str
    engine_weights: str
    delta_weight_report: str

    @classmethod
    def from_config(cls, config: Any) -> QuadsOptions:
        """From the Hydra node; missing keys raise."""
        return cls(
            precision=Precision(
                weight=config.weight,
                activation=config.activation,
                scale_group=config.scale_group,
                skip=tuple(config.skip),
            ),
            rac=None if config.rac is None else RacSpec(**config.rac),
            calibration=config.calibration,
            masks=config.masks,
            surgery_report=config.surgery_report,
            engine_weights=config.engine_weights,
            delta_weight_report=config.delta_weight_report,
        )


# verl builds engines through a registry whose constructor signature has no room for options; the worker of the same
# process sets them before it asks for an engine.
_options: QuadsOptions | None = None


def set_options(options: QuadsOptions) -> None:
    """Options for every engine that this process builds from now on."""
    global _options
    _options = options


def _load_calibration(path: str) -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask [B, T] (int64, right-padded with 0) from a calibration parquet."""
    import pyarrow.parquet as pq

    rows = [torch.tensor(r) for r in pq.read_table(path, columns=["input_ids"])["input_ids"].to_pylist()]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in rows], batch_first=True)
    return ids, mask


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "cpu"], vendor=["quads", "generic"]
)
class QuadsFSDPEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine plus the surgery; see the module docstring."""

    def _build_module(self) -> torch.nn.Module:
        if _options is None:
            raise RuntimeError("QuadsFSDPEngine built without options: use the trainer mode quads_sync")
        module = super()._build_module()
        report = apply_surgery(module, _options.precision)
        if int(os.environ.get("RANK", "0")) == 0:
            Path(_options.surgery_report).write_text(json.dumps(report.to_json(), indent=1))
        log.info("surgery: %s", report)
        return module

    def rac_masks(self) -> dict[str, Tensor]:
        """Static RAC masks of the current weights, by engine module name; empty where the arm has none."""
        if _options is None or _options.rac is None or _options.calibration is None:
            return {}
        if not hasattr(self, "_calibration"):
            self._calibration = _load_calibration(_options.calibration)
        device = next(self.module.parameters()).device
        ids, attention = (t.to(device) for t in self._calibration)
        return calibrate(self.module, ids, attention, _options.rac)

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor]], Any]:
        weights, peft = super().get_per_tensor_param(**kwargs)
        masks = self.rac_masks()
        if masks and _options is not None and _options.masks and int(os.environ.get("RANK", "0")) == 0:
            # What the engine is about to use, kept beside the checkpoints so that an evaluation engine uses the same.
            Path(_options.masks).parent.mkdir(parents=True, exist_ok=True)
            partial = f"{_options.masks}.partial"
            save_file({name: mask.cpu() for name, mask in masks.items()}, partial)
            os.replace(partial, _options.masks)
        extra = ((f"{RAC_MASK_PREFIX}{name}", mask.to(torch.uint8)) for name, mask in masks.items())
        return itertools.chain(weights, extra), peft
