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

from quads.integrations.verl.compat import use_chunked_head, use_stored_dtype
from quads.layers.execution import Execution
from quads.layers.names import DEFAULT_SKIP
from quads.layers.surgery import Precision, apply_surgery, invalidate_weight_cache
from quads.numerics.rac import RacSpec
from quads.trainer import head
from quads.trainer.calibration import RAC_MASK_PREFIX, calibrate

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class QuadsOptions:
    """`actor_rollout_ref.quads` of the config, as written by overrides.py."""

    precision: Precision
    execution: Execution
    rac: RacSpec | None
    calibration: str | None
    masks: str | None
    surgery_report: str | None
    engine_weights: str | None
    delta_weight_report: str | None
    chunked_head: bool = False

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
            execution=Execution(backend=config.backend, experts=config.experts, cache=config.cache),
            rac=None if config.rac is None else RacSpec(**config.rac),
            calibration=config.calibration,
            masks=config.masks,
            surgery_report=config.surgery_report,
            engine_weights=config.engine_weights,
            delta_weight_report=config.delta_weight_report,
            chunked_head=config.chunked_head,
        )

    @classmethod
    def from_model_config(cls, override_config: Any) -> QuadsOptions:
        """From the JSON file named by `actor_rollout_ref.model.override_config.quads`: a run without our workers.

        Keys of STOCK, all but `weight` optional. Raises ValueError naming the known keys. A file and not the values,
        because verl copies override_config into the model's configuration, which has no place for a mapping.
        """
        path = override_config.get("quads")
        given = json.loads(Path(path).read_text()) if path else {}
        if unknown := sorted(set(given) - set(STOCK)):
            raise ValueError(f"{path}: unknown key(s) {', '.join(unknown)}; known: {', '.join(STOCK)}")
        if "weight" not in given:
            raise ValueError(
                "the QUADS engine has no options: pass +actor_rollout_ref.model.override_config.quads=FILE.json with "
                f"`weight` and others of {', '.join(STOCK)}, or train through `python -m quads.train`"
            )
        values = {**STOCK, **given}
        if (values["rac"] is None) != (values["calibration"] is None):
            raise ValueError(f"{path}: rac and calibration (a parquet of token ids) belong together")
        return cls(
            precision=Precision(
                values["weight"], values["activation"], values["scale_group"], skip=tuple(values["skip"])
            ),
            execution=Execution(backend=values["backend"], experts=values["experts"], cache=values["cache"]),
            rac=None if values["rac"] is None else RacSpec(**values["rac"]),
            calibration=values["calibration"],
            masks=values["masks"],
            surgery_report=values["surgery_report"],
            engine_weights=None,
            delta_weight_report=None,
            chunked_head=values["chunked_head"],
        )


# Options of a stock verl run and their defaults.
STOCK: dict[str, Any] = {
    "weight": None,
    "activation": "bf16",
    "scale_group": "fused",
    "skip": DEFAULT_SKIP,
    "backend": "reference",
    "experts": "loop",
    "cache": "off",
    "rac": None,
    "calibration": None,
    "masks": None,
    "surgery_report": None,
    "chunked_head": False,
}

# verl builds engines through a registry whose constructor signature has no room for options; the worker of the same
# process sets them before it asks for an engine.
_options: QuadsOptions | None = None


def set_options(options: QuadsOptions) -> None:
    """Options for every engine that this process builds from now on."""
    global _options
    _options = options


def _calibration_ids(path: str, model: str) -> list[list[int]]:
    """Token ids of a calibration parquet: its own, or of its prompts in words, through the model's chat template."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    if "input_ids" in table.column_names:
        return table["input_ids"].to_pylist()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    prompts = table["prompt"].to_pylist()
    return [
        list(tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"])
        for p in prompts
    ]


def _load_calibration(path: str, model: str) -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask [B, T] (int64, right-padded with 0) from a calibration parquet."""
    rows = [torch.tensor(ids) for ids in _calibration_ids(path, model)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in rows], batch_first=True)
    return ids, mask


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "cpu"], vendor=["quads", "generic"]
)
class QuadsFSDPEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine plus the surgery; see the module docstring."""

    def _build_module(self) -> torch.nn.Module:
        self.quads = _options or QuadsOptions.from_model_config(self.model_config.override_config)
        if self.quads.chunked_head:
            use_chunked_head()
            self.compute_entropy_from_logits = head.entropy  # verl has taken its own when this engine was made
        use_stored_dtype()
        module = super()._build_module()
        report = apply_surgery(module, self.quads.precision, self.quads.execution)
        if self.quads.surgery_report and int(os.environ.get("RANK", "0")) == 0:
            Path(self.quads.surgery_report).write_text(report.to_json())
        log.info("surgery: %s", report)
        return module

    def prepare_model_inputs(self, micro_batch: Any) -> Any:
        self.lengths_B = micro_batch["input_ids"].offsets().diff()  # tokens per sequence of the forward that follows
        return super().prepare_model_inputs(micro_batch)

    def rac_masks(self) -> dict[str, Tensor]:
        """Static RAC masks of the current weights, by engine module name; empty where the arm has none."""
        if self.quads.rac is None or self.quads.calibration is None:
            return {}
        if not hasattr(self, "_calibration"):
            self._calibration = _load_calibration(self.quads.calibration, self.model_config.local_path)
        device = next(self.module.parameters()).device
        ids, attention = (t.to(device) for t in self._calibration)
        return calibrate(self.module, ids, attention, self.quads.rac)

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor]], Any]:
        weights, peft = super().get_per_tensor_param(**kwargs)
        masks = self.rac_masks()
        invalidate_weight_cache(self.module)  # the rollout is next: its engine may need the memory
        self.sent_masks = masks  # what the rollout uses until the next sync
        if masks and self.quads.masks and int(os.environ.get("RANK", "0")) == 0:
            # What the engine is about to use, kept beside the checkpoints so that an evaluation engine uses the same.
            Path(self.quads.masks).parent.mkdir(parents=True, exist_ok=True)
            partial = f"{self.quads.masks}.partial"
            save_file({name: mask.cpu() for name, mask in masks.items()}, partial)
            os.replace(partial, self.quads.masks)
        extra = ((f"{RAC_MASK_PREFIX}{name}", mask.to(torch.uint8)) for name, mask in masks.items())
        return itertools.chain(weights, extra), peft
