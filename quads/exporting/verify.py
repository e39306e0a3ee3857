"""The verifier: is a folder a sound NVFP4 checkpoint, and is it the one that a given checkpoint should give?

From the folder alone
    layout      every quantized module has exactly the format's tensors, with dtypes and shapes that fit each other
    scales      block scales finite and > 0, global scales finite and > 0
    groups      q/k/v, and gate/up of an expert, store one global scale (an engine that fuses them keeps only one)
    skip list   the ignored modules of config.json are exactly the modules with a matrix in high precision
    bits        bits per quantized parameter, from the bytes on disk: 4 + 8/16 + 32 per global scale, nothing else
Against the checkpoint that it was made from
    weights     dequantized values equal quads.numerics' quantized weights, bit for bit, group by group
    rest        every other tensor equals the checkpoint's rounded to bf16; none is missing, none is new
    inputs      static input scales equal those of the manifest (they cannot be recomputed without its tokens)

Contract: reads the files only, and config.json to learn the format; nothing that the writer remembered is trusted.
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
from quads.exporting.plan import Plan, make_plan
from quads.exporting.write import MANIFEST
from quads.layers.weights import group_amax
from quads.numerics.formats import BLOCK, decode_e2m1, decode_e4m3
from quads.numerics.nvfp4 import global_scale, unpack
from quads.numerics.qdq import quantize_weight

_SHOWN = 3


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
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{folder}/config.json: {error}") from None

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
    report = Report(str(folder), export.form.name, export.mode)
    _check_layout(export, report)
    if not report.ok:
        return report
    _check_bits(export, report)
    _check_scales(export, report)
    _check_skip_list(export, report)
    if against is not None:
        source = Checkpoint(against)
        plan = make_plan(source, _skip(folder) if skip is None else skip)
        _check_groups(export, plan, report)
        _check_weights(export, source, plan, report)
        _check_rest(export, source, plan, report)
    _check_inputs(export, folder, report)
    return report


def _skip(folder: Path) -> tuple[str, ...]:
    return tuple(read_json(folder / MANIFEST)["export"]["skip"])


def _check_layout(export: Export, report: Report) -> None:
    bad, form, files = [], export.form, export.files
    expected = set(form.suffixes(export.mode))
    for module in export.modules:
        held = {n.rpartition(".")[2] for n in files.names() if n.rpartition(".")[0] == module} - {"bias"}
        if held != expected:
            bad.append(f"{module} holds {sorted(held)}, expected {sorted(expected)}")
            continue
        tensors = {suffix: files.get(f"{module}.{suffix}") for suffix in expected}
        rows, half = tensors[form.codes].shape
        bad += [f"{module}.{p}" for p in _wrong_tensors(form, tensors, rows, 2 * half, export.mode)]
    if not export.modules:
        bad.append("no quantized module found")
    report.note("layout", bad, f"{len(export.modules)} modules with {', '.join(sorted(expected))}")


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
        if tensors[name].dtype != dtype or tuple(tensors[name].shape) != shape
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


def _check_skip_list(export: Export, report: Report) -> None:
    quantized = set(export.modules)
    suffix = ".weight"
    matrices = {n.removesuffix(suffix) for n in export.files.names() if n.endswith(suffix)} - quantized
    plain = {n for n in matrices if len(export.files.shape(f"{n}.weight")) == 2}
    if export.files.config.get("tie_word_embeddings"):
        plain.add("lm_head")
    ignored = set(export.declared.get("ignore") or [])
    bad = [f"{n} is in high precision and not ignored" for n in sorted(plain - ignored)]
    bad += [f"{n} is ignored but quantized or absent" for n in sorted(ignored - plain)]
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


def _check_inputs(export: Export, folder: Path, report: Report) -> None:
    """The stored input scales are the manifest's, in the form of this format."""
    if export.mode != "w4a4":
        return
    static = read_json(folder / MANIFEST)["export"]["static_input_scales"]["amax"]
    expected = {key: export.form.global_scale(global_scale(torch.tensor(amax))) for key, amax in static.items()}
    stored = {m: export.files.get(f"{m}.{export.form.input_global}") for m in export.modules}
    bad = [
        f"{m}.{export.form.input_global} is {float(value)!r}, which is no input scale of the manifest"
        for m, value in stored.items()
        if not any(torch.equal(value, e) for e in expected.values())
    ]
    report.note("inputs", bad, f"static input scales of {len(expected)} inputs, as in the manifest")
