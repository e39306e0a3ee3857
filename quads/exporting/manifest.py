"""Quantization manifest: which number format every module of a run is multiplied in, on both sides. No torch.

    module (engine name) -> trainer and rollout formats of weights and activations, KV format, kernel, conventions

Built from what trainer and engine wrote about themselves (surgery.json, receipt.json), never from the configuration:
a module that the engine did not quantize says so here. One `Manifest` is shared by MLflow and by exports.

Contract: rows cover every module of the receipt; surgery rows without a counterpart in the engine, and the other way
round, are an error. `digest` does not depend on the machine, the process or the number of reloads.
Differs from a `quantization_config` in that it also names kernel, rounding profile and scale conventions, and the
trainer's side, which decides whether the two policies are equal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quads.files import ResultFileError, read_result, rebuild_command

# What the numerics define, in words; keys are "<role> <format>". quads.numerics holds the code.
CONVENTIONS: dict[str, dict[str, str]] = {
    "weight nvfp4": {
        "element": "E2M1, two codes a byte, low nibble first",
        "block_scale": "E4M3, one per 16 elements along K, linear layout [N, K/16], never zero",
        "global_scale": "fp32 divisor form gs = 2688 / amax; value = q * s * RN(1 / gs)",
        "profile": "verl_export",
    },
    "activation nvfp4": {
        "element": "E2M1",
        "block_scale": "E4M3, one per 16 elements along K",
        "global_scale": "fp32 divisor form gs = 2688 / amax, dynamic, one per token, shared by the RAC pass",
        "profile": "vllm_cuda",
    },
    "weight fp8": {"element": "E4M3", "scale": "fp32 multiplier form, one per output row"},
    "activation fp8": {"element": "E4M3", "scale": "fp32 multiplier form, dynamic, one per token"},
    "weight bf16": {"element": "bfloat16, rounded to nearest even"},
    "activation bf16": {"element": "bfloat16"},
}
GROUPS = {
    "fused": "one global scale over q, k, v; one over gate and up of each expert",
    "shard": "one global scale per matrix; one per expert",
}
UNCHANGED = "unchanged"
ATTENTION = "self_attn"


@dataclass(frozen=True)
class ModuleFormat:
    """One engine module; `parts` are the trainer's modules in it. Formats: bf16, fp8, nvfp4 or unchanged."""

    module: str
    parts: tuple[str, ...]
    status: str
    reason: str
    rollout_weight: str
    rollout_activation: str
    trainer_weight: str
    trainer_activation: str
    kernel: str
    kv_cache: str | None = None


@dataclass(frozen=True)
class Manifest:
    """See the module docstring. `rac`: null or {k, granularity, mask, score, masks: {input: {selected, sha256}}}."""

    source: dict[str, str]
    model: str
    mode: str
    scale_group: str
    kv_cache: str
    modules: tuple[ModuleFormat, ...]
    rac: dict[str, Any] | None
    delta_weight: dict[str, Any] | None
    versions: dict[str, str | None] = field(default_factory=dict)

    @property
    def conventions(self) -> dict[str, dict[str, str]]:
        """Entries of CONVENTIONS for the formats that occur in the engine, and the grouping of global scales."""
        pairs = {("weight", m.rollout_weight) for m in self.modules}
        pairs |= {("activation", m.rollout_activation) for m in self.modules}
        out = {f"{role} {fmt}": CONVENTIONS[f"{role} {fmt}"] for role, fmt in sorted(pairs) if fmt != UNCHANGED}
        return out | {"scale group": {self.scale_group: GROUPS[self.scale_group]}}

    @property
    def counts(self) -> dict[str, int]:
        """Engine modules by status."""
        out: dict[str, int] = {}
        for module in self.modules:
            out[module.status] = out.get(module.status, 0) + 1
        return out

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, conventions and digest included."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain | {"conventions": self.conventions, "counts": self.counts, "digest": self.digest}

    def to_json(self) -> str:
        """Indented JSON text."""
        return json.dumps(self.to_dict(), indent=1, sort_keys=True) + "\n"

    @property
    def digest(self) -> str:
        """Ten hex digits over formats, kernel, conventions and masks; not over source, versions and delta_weight."""
        kept = {k: v for k, v in asdict(self).items() if k not in ("source", "versions", "delta_weight")}
        text = json.dumps(kept | {"conventions": self.conventions}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    def tags(self) -> dict[str, str]:
        """The manifest in a few words, for a tracking store."""
        engine = sorted({m.kernel for m in self.modules if m.status == "quantized"})
        rac = "none"
        if self.rac:
            rac = f"k={self.rac['k']} {self.rac['granularity']} {self.rac['mask']} {self.rac['score']}"
        return {
            "quads.manifest": self.digest,
            "quads.mode": self.mode,
            "quads.weight": _common(self.modules, "rollout_weight"),
            "quads.activation": _common(self.modules, "rollout_activation"),
            "quads.trainer_weight": _common(self.modules, "trainer_weight"),
            "quads.kv_cache": self.kv_cache,
            "quads.kernel": ", ".join(engine) or "none",
            "quads.scale_group": self.scale_group,
            "quads.rac": rac,
            "quads.rac_masks": masks_hash(self.rac) or "none",
        }


def _common(modules: Sequence[ModuleFormat], name: str) -> str:
    return ", ".join(sorted({getattr(m, name) for m in modules if m.status == "quantized"})) or UNCHANGED


def masks_hash(rac: Mapping[str, Any] | None) -> str | None:
    """Ten hex digits over the hashes of all static masks; None without any."""
    if not rac or not rac.get("masks"):
        return None
    return hashlib.sha256(json.dumps(rac["masks"], sort_keys=True).encode()).hexdigest()[:10]


def from_run(train: Path) -> Manifest:
    """The manifest of a finished training run. Raises ResultFileError for files that are missing or disagree."""
    try:
        return _from_run(train)
    except (KeyError, TypeError) as error:
        raise ResultFileError(
            f"{train}: result.json, receipt.json or surgery.json lacks what a manifest needs ({error!r}). "
            f"Rebuild with: {rebuild_command(train / 'result.json')}"
        ) from error


def _from_run(train: Path) -> Manifest:
    result = read_result(train / "result.json", "training result", ("run", "run_id", "checkpoint", "delta_weight"))
    target = train / "result.json"
    receipt = read_result(
        train / "receipt.json",
        "engine receipt",
        ("model", "mode", "backend", "config", "modules", "versions"),
        target=target,
    )
    surgery = read_surgery(train / "surgery.json", target)
    config = receipt["config"]
    kv_cache = f"{result['run']['runtime']['engine_dtype']} (not quantized)"
    return Manifest(
        source={
            "run_id": str(result["run_id"]),
            "arm": str(result["run"]["arm"]["name"]),
            "checkpoint": str(result["checkpoint"]),
        },
        model=str(receipt["model"]),
        mode=str(receipt["mode"]),
        scale_group=str(config["scale_group"]),
        kv_cache=kv_cache,
        modules=tuple(_modules(receipt, surgery, kv_cache, train)),
        rac=_rac(config.get("rac"), receipt.get("masks") or {}),
        delta_weight=result["delta_weight"],
        versions=dict(receipt["versions"]),
    )


def read_surgery(path: Path, target: Path | None = None) -> dict[str, Any]:
    """The surgery report; also where the file holds the report's JSON as one string."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
        report = json.loads(loaded) if isinstance(loaded, str) else loaded
        if not isinstance(report["rows"], list):
            raise TypeError("rows")
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = rebuild_command(target or path)
        raise ResultFileError(f"surgery report {path}: unusable ({error!r}). Rebuild it with: {remedy}") from None
    out: dict[str, Any] = report
    return out


def _modules(receipt: Mapping[str, Any], surgery: Mapping[str, Any], kv_cache: str, train: Path) -> list[ModuleFormat]:
    """One row per engine module, and one per attention layer for its KV cache."""
    trainer: dict[str, list[dict[str, Any]]] = {}
    for row in surgery["rows"]:
        # the experts' two inputs are `<module>.w13` and `<module>.w2`; the engine has one module for both
        key = row["module"] if len(row["keys"]) > 1 else (row["keys"] or [row["module"]])[0]
        trainer.setdefault(key, []).append(row)
    out = []
    for row in receipt["modules"]:
        quantized = row["status"] == "quantized"
        ours = trainer.pop(row["module"], [])
        if quantized and not ours:
            raise ResultFileError(
                f"{train}: the engine quantized {row['module']}, which surgery.json does not name; the two files are "
                f"of different runs. Rebuild with: {rebuild_command(train / 'result.json')}"
            )
        out.append(
            ModuleFormat(
                module=row["module"],
                parts=tuple(r["module"] for r in ours) or (row["module"],),
                status=row["status"],
                reason=row["reason"],
                rollout_weight=row["weight"],
                rollout_activation=row["activation"],
                trainer_weight=_one(ours, "weight"),
                trainer_activation=_one(ours, "activation"),
                kernel=receipt["backend"] if quantized else "vLLM, unquantized",
            )
        )
        head, _, last = row["module"].rpartition(".")
        if last == "qkv_proj":
            out.append(_attention(f"{head}.attn", kv_cache))
    left = [key for key, rows in trainer.items() if any(r["status"] == "quantized" for r in rows)]
    if left:
        raise ResultFileError(
            f"{train}: the trainer quantized {', '.join(left)}, which the engine's receipt does not name; the two "
            f"files are of different runs. Rebuild with: {rebuild_command(train / 'result.json')}"
        )
    return out


def _attention(name: str, kv_cache: str) -> ModuleFormat:
    unchanged = (UNCHANGED,) * 4
    return ModuleFormat(name, (name,), "kv cache", "no plugin for it", *unchanged, "vLLM attention", kv_cache)


def _one(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    return ", ".join(sorted({str(row[name]) for row in rows})) or UNCHANGED


def _rac(spec: Mapping[str, Any] | None, masks: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    if spec is None:
        return None
    kept = {key: {k: m[k] for k in ("selected", "channels", "sha256")} for key, m in sorted(masks.items())}
    return dict(spec) | {"masks": kept}
