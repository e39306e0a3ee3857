# SPDX-License-Identifier: Apache-2.0
"""Roofline model of NVFP4 W4A4 and RAC GEMMs: what they should cost, from stated rates and counted bytes. A MODEL.

    time = max(flops / (matrix rate * matrix share), bytes / (bandwidth * memory share)) + launches * launch time

    flops   2 M N K (1 + k)          k: share of K that RAC compensates; every form pays it in the matrix units
    bytes   activations, weights of the experts that are touched, output; each once
            RAC adds k of the activation bytes in every form, and of the weight bytes in forms A and B (not in D);
            form B also writes and reads the fp32 partial result and launches twice

Shapes: M rows (tokens times choices), N outputs, K inputs, `experts` matrices of which `touched` have rows.
Rates are the vendor's dense datasheet figures; the shares of them that code reaches are measured on an H200 (copy
4.25 of 4.8 TB/s, bf16 product 0.78 of 0.99 PFLOP/s) and ASSUMED for the B200, on which nothing was run.
`compare` puts measured H200 rows beside the model with H200 rates: agreement there is all the evidence there is.
Differs from a simulator: no tile quantization, no wave tails, no overlap of kernels, no instruction issue limits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from quads.files import ResultFileError, read_result

Form = Literal["A", "B", "D"]
FORMS: tuple[Form, ...] = ("A", "B", "D")
# Bytes an element: codes and scales of NVFP4, bf16 q*s of the emulation, fp8, bf16.
WIDTH = {"nvfp4": 9 / 16, "bf16": 2.0, "fp8": 1.0}


@dataclass(frozen=True)
class Chip:
    """Dense matrix rates in FLOP/s by operand format, bandwidth in B/s, the shares that code reaches, launch in s."""

    name: str
    matrix: dict[str, float]
    bandwidth: float
    matrix_share: float = 0.79
    memory_share: float = 0.885
    launch: float = 1e-6


H200 = Chip("H200", {"bf16": 0.99e15, "fp8": 1.98e15}, 4.8e12)
B200 = Chip("B200", {"bf16": 2.25e15, "fp8": 4.5e15, "nvfp4": 9e15}, 8.0e12)
CHIPS = {"H200": H200, "B200": B200}


@dataclass(frozen=True)
class Gemm:
    """rows M in all, N, K; experts touched (1 for a linear); operand formats in memory; `unit`: format multiplied."""

    rows: int
    n: int
    k: int
    touched: float = 1.0
    weight: str = "nvfp4"
    activation: str = "nvfp4"
    unit: str = "nvfp4"


@dataclass(frozen=True)
class Estimate:
    """Seconds by cause; `bound` names the larger of the two."""

    matrix: float
    memory: float
    launch: float

    @property
    def seconds(self) -> float:
        """max(matrix, memory) + launch."""
        return max(self.matrix, self.memory) + self.launch

    @property
    def bound(self) -> str:
        """compute or memory."""
        return "compute" if self.matrix >= self.memory else "memory"


def estimate(chip: Chip, g: Gemm, rac: float = 0.0, form: Form = "D") -> Estimate:
    """Cost of one (grouped) GEMM. ValueError for k outside 0..1, an unknown form, or a format without matrix units."""
    if not 0.0 <= rac <= 1.0 or form not in FORMS:
        raise ValueError(f"need 0 <= rac <= 1 and a form of {', '.join(FORMS)}, got {rac} and {form!r}")
    if g.unit not in chip.matrix:
        raise ValueError(f"{chip.name} has no {g.unit} matrix units; known: {', '.join(chip.matrix)}")
    weights = g.touched * g.n * g.k * WIDTH[g.weight] * (1 + (rac if form != "D" else 0.0))
    activations = g.rows * g.k * WIDTH[g.activation] * (1 + rac)
    output = 2.0 * g.rows * g.n
    launches = 1
    if form == "B" and rac:
        output += 2 * 4.0 * g.rows * g.n
        launches = 2
    flops = 2.0 * g.rows * g.n * g.k * (1 + rac)
    return Estimate(
        flops / (chip.matrix[g.unit] * chip.matrix_share),
        (weights + activations + output) / (chip.bandwidth * chip.memory_share),
        launches * chip.launch,
    )


def quantizer_seconds(chip: Chip, rows: int, k: int, fmt: str = "nvfp4", rac: float = 0.0) -> float:
    """Activation quantization: bf16 read once, (1 + rac) of codes and scales written."""
    size = rows * k * (2.0 + (1 + rac) * WIDTH[fmt])
    return size / (chip.bandwidth * chip.memory_share) + chip.launch


def touched_experts(tokens: int, experts: int = 128, choices: int = 8) -> float:
    """Expected number of experts with any row when tokens choose uniformly."""
    return experts * (1 - (1 - choices / experts) ** tokens)


def layer_gemms(tokens: int) -> dict[str, Gemm]:
    """The GEMMs of one decoder layer of a 30B-A3B MoE (width 2048, 128 experts of 768, 8 choices) at `tokens`."""
    touched = touched_experts(tokens)
    return {
        "qkv": Gemm(tokens, 5120, 2048),
        "o": Gemm(tokens, 2048, 4096),
        "w13": Gemm(8 * tokens, 1536, 2048, touched),
        "w2": Gemm(8 * tokens, 2048, 768, touched),
    }


def layer_seconds(chip: Chip, tokens: int, fmt: str, rac: float = 0.0, form: Form = "D") -> float:
    """GEMMs of one layer in format `fmt` on both sides, with the activation quantizer (fp8 and nvfp4)."""
    total = 0.0
    for g in layer_gemms(tokens).values():
        total += estimate(chip, replace(g, weight=fmt, activation=fmt, unit=fmt), rac, form).seconds
        if fmt != "bf16":
            total += quantizer_seconds(chip, g.rows, g.k, fmt, rac)
    return total


def expectations(chip: Chip, tokens: Sequence[int], ks: Sequence[float]) -> str:
    """Markdown: per token count, layer GEMM time of bf16, fp8, W4A4, and RAC over W4A4 by form and k."""
    columns = [f"{form} k={k:g}" for form in FORMS for k in ks]
    lines = [
        f"Model, {chip.name}, GEMMs and activation quantizers of one layer; nothing in this table was measured.",
        "",
        "| tokens | bf16 us | fp8 us | W4A4 us | fp8 / W4A4 | " + " | ".join(f"RAC {c}" for c in columns) + " |",
        "|---" * (5 + len(columns)) + "|",
    ]
    for t in tokens:
        bf16, fp8, w4a4 = (layer_seconds(chip, t, fmt) * 1e6 for fmt in ("bf16", "fp8", "nvfp4"))
        ratios = [layer_seconds(chip, t, "nvfp4", k, form) * 1e6 / w4a4 for form in FORMS for k in ks]
        cells = [f"{bf16:.1f}", f"{fp8:.1f}", f"{w4a4:.1f}", f"{fp8 / w4a4:.2f}", *(f"{r:.3f}" for r in ratios)]
        lines.append(f"| {t} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# Rows of quads.bench.gemm (group, name prefix) -> the model's shape, k and form; the emulation multiplies bf16.
_DENSE = Gemm(4096, 6144, 2048, 1, "bf16", "bf16", "bf16")
_DECODE = Gemm(2048, 1536, 2048, 128, "bf16", "bf16", "bf16")
_EXPERTS = Gemm(32768, 1536, 2048, 128, "bf16", "bf16", "bf16")
MEASURABLE: dict[tuple[str, str], tuple[Gemm, float, Form]] = {
    ("dense", "bf16 cuBLAS"): (_DENSE, 0.0, "D"),
    ("dense", "emulated, one scale"): (_DENSE, 0.0, "D"),
    ("dense", "emulated, per token, Triton"): (_DENSE, 0.0, "D"),
    ("dense", "RAC 50 % form A, one scale"): (_DENSE, 0.5, "A"),
    ("dense", "RAC 50 % form D"): (_DENSE, 0.5, "D"),
    ("decode", "bmm"): (_DECODE, 0.0, "D"),
    ("decode", "packed"): (replace(_DECODE, weight="nvfp4"), 0.0, "D"),
    ("decode", "RAC 50 % form A"): (_DECODE, 0.5, "A"),
    ("decode", "RAC 50 % form D"): (replace(_DECODE, weight="nvfp4"), 0.5, "D"),
    ("experts even", "bmm"): (_EXPERTS, 0.0, "D"),
    ("experts even", "emulated grouped"): (_EXPERTS, 0.0, "D"),
    ("experts even", "RAC 50 % form D"): (_EXPERTS, 0.5, "D"),
    ("thin", "bf16 cuBLAS"): (Gemm(16, 6144, 2048, 1, "bf16", "bf16", "bf16"), 0.0, "D"),
    ("thin", "packed"): (Gemm(16, 6144, 2048, 1, "nvfp4", "bf16", "bf16"), 0.0, "D"),
}


def measured_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a kernel benchmark. Raises ResultFileError for any other file."""
    advice = "Give the FILE that python -m quads.bench.kernels wrote"
    rows = read_result(path, "kernel benchmark", ("rows",), advice=advice)["rows"]
    if not isinstance(rows, list) or not all(isinstance(r, dict) and {"group", "name", "us"} <= r.keys() for r in rows):
        raise ResultFileError(f"kernel benchmark {path}: rows are no list of objects with group, name and us. {advice}")
    return rows


def compare(rows: Sequence[dict[str, Any]], chip: Chip = H200) -> list[dict[str, Any]]:
    """{"group", "name", "us", "model_us", "ratio", "bound"} of the fastest row of each measurable prefix."""
    found = []
    for (group, prefix), (g, rac, form) in MEASURABLE.items():
        times = [r for r in rows if r["group"] == group and r["name"].startswith(prefix) and r["us"] is not None]
        if times:
            row = min(times, key=lambda r: r["us"])
            model = estimate(chip, g, rac, form)
            us = model.seconds * 1e6
            found.append({"group": group, "name": row["name"], "us": row["us"], "model_us": us,
                          "ratio": row["us"] / us, "bound": model.bound})  # fmt: skip
    return found


def comparison_table(found: Sequence[dict[str, Any]]) -> str:
    """Markdown of `compare`."""
    lines = ["| group | kernel | measured us | model us | measured / model | bound |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {f['group']} | {f['name']} | {f['us']:.1f} | {f['model_us']:.1f} | {f['ratio']:.2f} | {f['bound']} |"
        for f in found
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Command line: the B200 tables, and with --measured the comparison on the H200."""
    parser = argparse.ArgumentParser(prog="python -m quads.bench.roofline", description=__doc__.split("\n\n")[0])
    parser.add_argument("--chip", choices=tuple(CHIPS), default="B200")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="JSON of quads.bench.kernels from an H200")
    arguments = parser.parse_args(argv)
    chip = CHIPS[arguments.chip]
    table = ""
    if arguments.measured:
        try:
            table = comparison_table(compare(measured_rows(arguments.measured)))
        except ResultFileError as error:
            sys.stderr.write(f"error: {error}\n")
            return 1
    if "nvfp4" in chip.matrix:
        print(expectations(chip, (16, 128, 1024, 4096, 16384), (0.125, 0.25, 0.5)))
    if table:
        print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
