"""The verifier: is a folder a sound NVFP4 checkpoint, and is it the one that a given checkpoint should give?

From the folder alone (the plan follows from its config.json and the skipped names of its manifest)
    layout      exactly the tensors of the plan: every quantized module with all of the format's tensors, every other
                tensor of the model, nothing else; dtypes and shapes
    config      quantization_config, and hf_quant_config.json where the format has one, are what it writes for the plan
    scales      block scales finite and > 0, global scales finite and > 0
    groups      q/k/v, and gate/up of an expert, store one global scale (an engine that fuses them keeps only one)
    skip list   the ignored modules of config.json are exactly the modules with a matrix in high precision
    inputs      the static input scale of each module is the manifest's for its own input (not to be recomputed without
                the calibration tokens)
    bits        bits per quantized parameter, from the bytes on disk: 4 + 8/16 + 32 per global scale, nothing else
Against the checkpoint that it was made from
    weights     dequantized values equal quads.numerics' quantized weights, bit for bit, group by group
    rest        every other tensor equals the checkpoint's rounded to bf16; none is missing, none is new
    model       every other key of config.json equals the checkpoint's

Contract: reads the files only. The manifest is a claim (skipped names, input scales) that the tensors must meet.
Every finding is a row {check, ok, found}; `ok` of the report is the conjunction. Raises CheckpointError only when the
folder cannot be read at all.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quads.exporting.checkpoint import Checkpoint, CheckpointError, read_json
from quads.exporting.formats import ExportFormat, format_of
from quads.exporting.plan import Blueprint, Plan, make_blueprint
from quads.exporting.write import MANIFEST
from quads.layers.weights import group_amax
from quads.numerics.formats import BLOCK, decode_e2m1, decode_e4m3
from quads.numerics.nvfp4 import global_scale, unpack
from quads.numerics.qdq import quantize_weight

_SHOWN = 3
# buffers that older checkpoints store and no model reads
_COMPUTED = "rotary_emb.inv_freq"


@dataclass(frozen=True)
class Finding:
    """One check and what it found."""

    check: str
    ok: bool
    found: str


@dataclass
class Report:
    """All findings; `numbers` holds what was measured."""

    folder: str
    format: str
    mode: str
    findings: list[Finding] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return all(f.ok for f in self.findings)

    def note(self, check: str, bad: list[str], good: str) -> None:
        """A finding: ok unless `bad` names something."""
        shown = "; ".join(bad[:_SHOWN]) + (f"; and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else "")
        self.findings.append(Finding(check, not bad, shown or good))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"ok": self.ok}


class Export:
    """An exported checkpoint, opened."""

    def __init__(self, folder: Path) -> None:
        self.files = Checkpoint(folder)
        declared = self.files.config.get("quantization_config")
        if not isinstance(declared, dict):
            raise CheckpointError(f"{folder}/config.json has no quantization_config: this is no quantized checkpoint")
        self.declared = declared
        try:
            self.form, self.mode = format_of(declared)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder}/config.json: quantization_config is unusable ({error!r})") from None

    @property
    def modules(self) -> list[str]:
        """Modules with packed codes, by the presence of a block scale."""
        suffix = f".{self.form.block_scale}"
        return [n.removesuffix(suffix) for n in self.files.names() if n.endswith(suffix)]

    def dequantized(self, module: str) -> Tensor:
        """fp32 [N, K]: q * s * multiplier, as the engine multiplies."""
        return self.stored(module) * self.form.multiplier(self.files.get(f"{module}.{self.form.weight_global}"))

    def stored(self, module: str) -> Tensor:
        """fp32 [N, K]: q * s."""
        q = decode_e2m1(unpack(self.files.get(f"{module}.{self.form.codes}")))
        s = decode_e4m3(self.files.get(f"{module}.{self.form.block_scale}").view(torch.uint8))
        return (q.unflatten(-1, (-1, BLOCK)) * s.unsqueeze(-1)).flatten(-2)


def verify(folder: Path, against: Path | None = None, skip: tuple[str, ...] | None = None) -> Report:
    """All checks that need no model. skip: names left in high precision (default: those of the manifest)."""
    export = Export(folder)
    said = _said(folder)
    report = Report(str(folder), export.form.name, export.mode)
    blueprint = make_blueprint(export.files, tuple(said["skip"]) if skip is None else skip)
    plan = blueprint.plan
    _check_layout(export, blueprint, report)
    _check_config(export, plan, report)
    _check_skip_list(export, plan, report)
    if not report.findings[0].ok:
        return report
    _check_bits(export, report)
    _check_scales(export, report)
    _check_groups(export, plan, report)
    _check_inputs(export, plan, said, report)
    if against is not None:
        source = Checkpoint(against)
        _check_weights(export, source, plan, report)
        _check_rest(export, source, plan, report)
        _check_model(export, source, report)
    return report


def _said(folder: Path) -> dict[str, Any]:
    """The export's own part of the manifest. Raises CheckpointError."""
    said = read_json(folder / MANIFEST).get("export")
    if not isinstance(said, dict) or not isinstance(said.get("skip"), list):
        raise CheckpointError(f"{folder / MANIFEST}: no export.skip, so the plan is unknown; export again")
    return said


def _check_layout(export: Export, blueprint: Blueprint, report: Report) -> None:
    form, files, mode = export.form, export.files, export.mode
    expected = {f"{m}.{s}" for m in blueprint.matrices for s in form.suffixes(mode)} | set(blueprint.rest)
    held = set(files.names())
    bad = [f"{n} is missing" for n in sorted(expected - held - blueprint.tied)]
    bad += [f"{n} is not of the plan" for n in sorted(held - expected) if not n.endswith(_COMPUTED)]
    for module, (n, k) in blueprint.matrices.items():
        tensors = {s: files.get(f"{module}.{s}") for s in form.suffixes(mode) if f"{module}.{s}" in files}
        bad += [f"{module}.{p}" for p in _wrong_tensors(form, tensors, n, k, mode)]
    for name, shape in blueprint.rest.items():
        if name in files and files.shape(name) != shape:
            bad.append(f"{name} has shape {files.shape(name)}, expected {shape}")
    if not blueprint.matrices:
        bad.append("no quantized module in the plan")
    tensors = ", ".join(form.suffixes(mode))
    report.note("layout", bad, f"{len(blueprint.matrices)} modules with {tensors}; {len(blueprint.rest)} other tensors")


def _check_config(export: Export, plan: Plan, report: Report) -> None:
    """Everything but the ignored modules, which are a check of their own."""
    bad = _differences(export.declared, export.form.quantization_config(plan, export.mode), {"ignore"})
    for name, content in export.form.extra_files(plan, export.mode).items():
        path = export.files.folder / name
        found = _differences(read_json(path), content, set()) if path.is_file() else ["missing"]
        bad += [f"{name}: {said}" for said in found]
    report.note("config", bad, f"quantization_config is what {export.form.name} writes for {export.mode}")


def _differences(ours: dict[str, Any], expected: dict[str, Any], but: set[str]) -> list[str]:
    keys = [k for k in dict.fromkeys([*expected, *ours]) if k not in but]
    absent = object()
    return [
        f"{k} is {ours.get(k, 'absent')!r}, expected {expected.get(k, 'absent')!r}"
        for k in keys
        if ours.get(k, absent) != expected.get(k, absent)
    ]


def _check_bits(export: Export, report: Report) -> None:
    """From the bytes of the files, not from the tensors' shapes: whatever else a shard holds shows here."""
    files, tensors = export.files, export.form.suffixes(export.mode)
    elements = sum(2 * files.get(f"{m}.{export.form.codes}").numel() for m in export.modules)
    quantized = {f"{m}.{s}" for m in export.modules for s in tensors}
    rest = [files.get(n) for n in files.names() if n not in quantized]
    others = sum(t.numel() for t in rest)
    bits = 8 * (files.data_bytes() - sum(t.numel() * t.element_size() for t in rest))
    scalars = 32 * (len(tensors) - 2) * len(export.modules)
    expected = 4 * elements + 8 * elements // BLOCK + scalars
    report.numbers |= {
        "bits_per_quantized_parameter": bits / elements,
        "bits_per_parameter": 8 * files.data_bytes() / (elements + others),
        "quantized_share_of_parameters": elements / (elements + others),
    }
    said = f"{bits / elements:.4f} bits per quantized parameter"
    report.note(
        "bits",
        [f"{said}, {bits - expected} bits more than codes, block scales and global scales"] if bits != expected else [],
        f"{said}: 4 + 8/{BLOCK} + global scales; {report.numbers['bits_per_parameter']:.2f} over all parameters",
    )


def _wrong_tensors(form: ExportFormat, tensors: dict[str, Tensor], n: int, k: int, mode: str) -> list[str]:
    one = (1,) if form.divisor else ()
    want = {
        form.codes: (torch.uint8, (n, k // 2)),
        form.block_scale: (torch.float8_e4m3fn, (n, k // BLOCK)),
        form.weight_global: (torch.float32, one),
    }
    if mode == "w4a4":
        want[form.input_global] = (torch.float32, one)
    return [
        f"{name} is {tensors[name].dtype} {tuple(tensors[name].shape)}, expected {dtype} {shape}"
        for name, (dtype, shape) in want.items()
        if name in tensors and (tensors[name].dtype != dtype or tuple(tensors[name].shape) != shape)
    ]


def _check_scales(export: Export, report: Report) -> None:
    bad = []
    for module in export.modules:
        for suffix in export.form.suffixes(export.mode)[1:]:
            value = export.files.get(f"{module}.{suffix}").float()
            wrong = int((~((value > 0) & torch.isfinite(value))).sum())
            if wrong:
                bad.append(f"{module}.{suffix}: {wrong} of {value.numel()} not finite and > 0")
    report.note("scales", bad, "all finite and > 0")


def _check_skip_list(export: Export, plan: Plan, report: Report) -> None:
    plain, listed = set(plan.skipped), list(export.declared.get("ignore") or [])
    ignored = set(listed)
    bad = [f"{n} is in high precision and not ignored" for n in sorted(plain - ignored)]
    bad += [f"{n} is ignored but quantized or absent" for n in sorted(ignored - plain)]
    bad += [f"{n} is listed twice" for n in sorted(ignored) if listed.count(n) > 1]
    report.note("skip list", bad, f"{len(plain)} modules in high precision, all of them and only they are ignored")


def _check_groups(export: Export, plan: Plan, report: Report) -> None:
    bad = []
    for group in plan.groups:
        names = [f"{m}.{export.form.weight_global}" for m in group.modules]
        values = {float(export.files.get(n)) for n in names if n in export.files}
        if len(values) > 1:
            bad.append(f"{', '.join(group.modules)} store global scales {sorted(values)}, an engine keeps one")
    report.note("groups", bad, f"one global scale in each of {len(plan.groups)} groups")


def _check_weights(export: Export, source: Checkpoint, plan: Plan, report: Report) -> None:
    bad = [f"{m} should be quantized" for m in plan.modules if m not in set(export.modules)]
    bad += [f"{m} should not be quantized" for m in export.modules if m not in set(plan.modules)]
    if bad:
        report.note("weights", bad, "")
        return
    different = elements = 0
    for group in plan.groups:
        weights = [source.get(f"{m}.weight") for m in group.modules]
        amax = group_amax(weights)
        gs = global_scale(amax).reshape(())
        for module, w_NK in zip(group.modules, weights, strict=True):
            ours = quantize_weight(w_NK, "nvfp4", amax).dequantize()
            theirs = export.dequantized(module)
            wrong = int((ours != theirs).sum()) if ours.shape == theirs.shape else ours.numel()
            if wrong:
                bad.append(f"{module}: {wrong} of {ours.numel()} values differ")
            stored = export.files.get(f"{module}.{export.form.weight_global}")
            if not torch.equal(stored, export.form.global_scale(gs)):
                bad.append(f"{module}.{export.form.weight_global} is {float(stored)!r}, expected from gs {float(gs)!r}")
            different, elements = different + wrong, elements + ours.numel()
    report.numbers |= {"weights_elements": elements, "weights_different": different}
    report.note("weights", bad, f"{elements} dequantized values equal quads.numerics, bit for bit")


def _check_rest(export: Export, source: Checkpoint, plan: Plan, report: Report) -> None:
    quantized = set(plan.modules)
    rest = [n for n in source.names() if n.removesuffix(".weight") not in quantized]
    tensors = {f"{m}.{s}" for m in quantized for s in export.form.suffixes(export.mode)}
    bad = [f"{n} is missing" for n in rest if n not in export.files]
    bad += [f"{n} is new" for n in export.files.names() if n not in tensors and n not in source]
    for name in rest:
        if name in export.files:
            ours, theirs = source.get(name), export.files.get(name)
            stored = ours.to(torch.bfloat16) if ours.is_floating_point() else ours
            if theirs.dtype != stored.dtype or not torch.equal(stored, theirs):
                bad.append(f"{name} is not the checkpoint's value in {stored.dtype}")
    report.note("rest", bad, f"{len(rest)} other tensors equal the checkpoint's in bf16")


def _check_model(export: Export, source: Checkpoint, report: Report) -> None:
    ours = {k: v for k, v in export.files.config.items() if k != "quantization_config"}
    expected = {k: v for k, v in source.config.items() if k != "torch_dtype"} | {"dtype": "bfloat16"}
    report.note("model", _differences(ours, expected, set()), f"{len(expected)} keys of config.json as in the source")


def _check_inputs(export: Export, plan: Plan, said: dict[str, Any], report: Report) -> None:
    """The stored input scales are the manifest's for the input of each module, in the form of this format."""
    if export.mode != "w4a4":
        return
    static = (said.get("static_input_scales") or {}).get("amax") or {}
    bad = [f"the manifest has no scale of input {name}" for name in plan.inputs if name not in static]
    bad += [f"the manifest has a scale of {name}, which is no input" for name in static if name not in plan.inputs]
    for group in (g for g in plan.groups if g.input in static):
        expected = export.form.global_scale(global_scale(torch.tensor(static[group.input])))
        for name in (f"{m}.{export.form.input_global}" for m in group.modules):
            stored = export.files.get(name)
            if not torch.equal(stored, expected):
                bad.append(f"{name} is {float(stored)!r}, the manifest's for {group.input} is {float(expected)!r}")
    report.note("inputs", bad, f"static input scales of {len(static)} inputs, as in the manifest")
