"""The export: a checkpoint in bf16 or fp32 becomes an NVFP4 checkpoint in one of two formats.

    per group (q/k/v, gate/up of an expert, or one matrix)     amax over its matrices -> gs, shared
    per matrix [N, K]     codes uint8 [N, K/2], block scales E4M3 [N, K/16] linear, gs in the format's form
    everything else       bf16, the dtype in which the engine stores it

Quantization is quads.numerics.packed.pack_weight: the engine's own codes, so the export's dequantized weight equals
the one that the rollouts used bit for bit (verify.py checks it). Order: shards, index, manifest, config.json last.
Refused: scale_group "shard". vLLM keeps one of the shards' global scales for the fused matrix and does not quantize
again, so an export of separate scales would be served with wrong weights.
What neither format can carry: RAC. Its masks and settings travel in quads_manifest.json and rac_masks.safetensors,
which stock engines ignore.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quads.exporting.checkpoint import SHARD_BYTES, Checkpoint, ShardWriter
from quads.exporting.folders import require_new
from quads.exporting.formats import ExportFormat, find_format
from quads.exporting.manifest import Manifest
from quads.exporting.plan import Group, Plan, make_plan
from quads.layers.weights import group_amax
from quads.numerics.nvfp4 import global_scale
from quads.numerics.packed import pack_weight

log = logging.getLogger(__name__)

MANIFEST = "quads_manifest.json"
MASKS = "rac_masks.safetensors"
# What an engine needs beside weights and config.json.
_COPIED = ("generation_config.json", "chat_template.jinja", "*token*.json", "vocab.*", "merges.txt", "*.model")


@dataclass(frozen=True)
class Request:
    """What to export. mode: w4a16 or w4a4; amax: fp32 [] by input name, required by w4a4 and ignored by w4a16.

    rac: whether the arm's rollouts have RAC, which the checkpoint then lacks.
    """

    checkpoint: Path
    format: str
    mode: str
    skip: tuple[str, ...]
    scale_group: str = "fused"
    amax: dict[str, Tensor] | None = None
    manifest: Manifest | None = None
    masks: Path | None = None
    calibration: str | None = None
    rac: bool = False


def export(request: Request, out: Path, shard_bytes: int = SHARD_BYTES) -> dict[str, Any]:
    """Write the checkpoint into the empty folder `out`; returns what quads_manifest.json holds under "export".

    Raises ValueError (CheckpointError included) before anything is written when the request cannot be met.
    """
    form = find_format(request.format)
    checkpoint = Checkpoint(request.checkpoint)
    plan = make_plan(checkpoint, request.skip)
    _check(request, plan, out)
    out.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(out, shard_bytes)
    for group in plan.groups:
        _write_group(writer, checkpoint, form, group, request)
    quantized = {f"{name}.weight" for name in plan.modules}
    for name, value in checkpoint.items():
        if name not in quantized:
            writer.add(name, value.to(torch.bfloat16) if value.is_floating_point() else value)
    size = writer.close()
    _copy_side_files(request, out)
    said = _said(request, plan, size)
    manifest = {"export": said, "run": request.manifest.to_dict() if request.manifest else None}
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    for name, content in form.extra_files(plan, request.mode).items():
        (out / name).write_text(json.dumps(content, indent=1) + "\n")
    config = checkpoint.config | {
        "dtype": "bfloat16",
        "quantization_config": form.quantization_config(plan, request.mode),
    }
    config.pop("torch_dtype", None)
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    log.info("%s: %d matrices in %d groups, %d bytes", out, len(plan.modules), len(plan.groups), size)
    return said


def _check(request: Request, plan: Plan, out: Path) -> None:
    if request.mode not in ("w4a16", "w4a4"):
        raise ValueError(f"export mode {request.mode!r}; known: w4a16, w4a4")
    if request.scale_group != "fused":
        raise ValueError(
            "the arm has weight_scale_group 'shard': one global scale each for q, k, v. vLLM fuses these matrices, "
            "keeps one of the scales and serves wrong weights. Export an arm with weight_scale_group 'fused'"
        )
    require_new(out)
    if request.mode == "w4a4":
        absent = [name for name in plan.inputs if name not in (request.amax or {})]
        if absent:
            raise ValueError(
                f"w4a4 needs a static input scale for {', '.join(absent[:3])} ({len(absent)} of {len(plan.inputs)} "
                "inputs); give --calibration FILE.parquet, or export --mode w4a16"
            )


def _write_group(
    writer: ShardWriter, checkpoint: Checkpoint, form: ExportFormat, group: Group, request: Request
) -> None:
    weights = {name: checkpoint.get(f"{name}.weight") for name in group.modules}
    amax = group_amax(list(weights.values()))
    for name, w_NK in weights.items():
        try:
            packed = pack_weight(w_NK, amax)
        except ValueError as error:
            raise ValueError(f"{name}.weight: {error}") from error
        writer.add(f"{name}.{form.codes}", packed.codes)
        writer.add(f"{name}.{form.block_scale}", packed.scales.view(torch.float8_e4m3fn))
        writer.add(f"{name}.{form.weight_global}", form.global_scale(packed.gs))
        if request.mode == "w4a4" and request.amax is not None:
            writer.add(f"{name}.{form.input_global}", form.global_scale(global_scale(request.amax[group.input])))


def _copy_side_files(request: Request, out: Path) -> None:
    for pattern in _COPIED:
        for path in sorted(request.checkpoint.glob(pattern)):
            shutil.copyfile(path, out / path.name)
    if request.masks is not None:
        shutil.copyfile(request.masks, out / MASKS)


def _said(request: Request, plan: Plan, size: int) -> dict[str, Any]:
    """The export's own part of the manifest."""
    static = None
    if request.mode == "w4a4":
        static = {
            "from": request.calibration,
            "rule": "gs = 2688 / largest |x|, no headroom: larger values saturate",
            "amax": {name: float(request.amax[name]) for name in plan.inputs} if request.amax else {},
        }
    served = "activations without RAC and with static global scales" if request.mode == "w4a4" else "bf16 activations"
    return {
        "format": request.format,
        "mode": request.mode,
        "source": str(request.checkpoint),
        "scale_group": request.scale_group,
        "skip": list(request.skip),
        "matrices": len(plan.modules),
        "ignored": list(plan.skipped),
        "bytes": size,
        "static_input_scales": static,
        "a_stock_engine_serves": f"NVFP4 weights, {served}",
        "rac_left_out": request.rac,
    }
