"""Bytes and modelled time of the weights per rollout precision, from shapes alone. Times are a MODEL, never measured.

    native bytes     NVFP4 1/2 + 1/16 per element and 4 per matrix; FP8 1 per element and 4 per output row; BF16 2
    emulated bytes   2 per element (q*s in bf16) and 4 per output row, whatever the format: emulation saves nothing
    both             plus 2 per element of what stays in high precision

Time: quads.bench.roofline on the quantized GEMMs of all layers and their activation quantizers, uniform routing, RAC in
form D (no second copy of the weights). Attention, norms, routers, head, KV cache and sampling are left out, so that the
ratios are upper bounds of what a whole engine gains. W4A16: NVFP4 read from memory, BF16 matrix units.
Differs from roofline.layer_seconds in that the shapes are the checkpoint's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quads.bench.roofline import B200, Chip, Gemm, estimate, quantizer_seconds, touched_experts
from quads.layers.names import engine_name
from quads.layers.surgery import SurgeryRow

TOKENS = (64, 8192)  # rows of one forward: a decode step of a small batch, a prefill
# rollout -> formats of weight and activation in memory, and of the matrix unit
UNITS = {
    "bf16": ("bf16", "bf16", "bf16"),
    "fp8": ("fp8", "fp8", "fp8"),
    "w4a16": ("nvfp4", "bf16", "bf16"),
    "w4a4": ("nvfp4", "nvfp4", "nvfp4"),
}


@dataclass(frozen=True)
class Shape:
    """One engine GEMM: experts matrices [n, k]; matrices: how many have a scale of their own."""

    n: int
    k: int
    experts: int
    matrices: int


def gemm_shapes(rows: Sequence[SurgeryRow]) -> list[Shape]:
    """Quantized GEMMs as an engine fuses them (q/k/v, gate/up), in model order."""
    linears: dict[str, list[list[int]]] = defaultdict(list)
    shapes = []
    for row in (r for r in rows if r.status == "quantized"):
        if "gate_up_proj" in row.shapes:
            for experts, n, k in (row.shapes["gate_up_proj"], row.shapes["down_proj"]):
                shapes.append(Shape(n, k, experts, experts))
        else:
            linears[engine_name(row.module)].append(row.shapes["weight"])
    shapes += [Shape(sum(w[0] for w in group), group[0][1], 1, 1) for group in linears.values()]
    return shapes


def weight_bytes(shapes: Sequence[Shape], high_precision: int, fmt: str) -> dict[str, int]:
    """{"native", "emulated"}; high_precision: number of elements that stay in bf16."""
    elements = sum(s.experts * s.n * s.k for s in shapes)
    rows = sum(s.experts * s.n for s in shapes)
    native = {
        "bf16": 2 * elements,
        "fp8": elements + 4 * rows,
        "nvfp4": elements * 9 // 16 + 4 * sum(s.matrices for s in shapes),
    }[fmt]
    return {"native": native + 2 * high_precision, "emulated": 2 * elements + 4 * rows + 2 * high_precision}


def gemm_seconds(shapes: Sequence[Shape], rollout: str, k: float, tokens: int, choices: int, chip: Chip) -> float:
    """Modelled seconds of all quantized GEMMs of one forward of `tokens` rows; k: RAC share, 0 for none."""
    weight, activation, unit = UNITS[rollout]
    total = 0.0
    for s in shapes:
        routed = s.experts > 1
        rows = tokens * choices if routed else tokens
        touched = touched_experts(tokens, s.experts, choices) if routed else 1.0
        total += estimate(chip, Gemm(rows, s.n, s.k, touched, weight, activation, unit), k).seconds
        if activation != "bf16":
            total += quantizer_seconds(chip, rows, s.k, activation, k)
    return total


def cost_rows(
    report: Sequence[SurgeryRow],
    parameters: int,
    choices: int,
    rollouts: Sequence[tuple[str, str, float]],
    chip: Chip = B200,
) -> list[dict[str, Any]]:
    """One row per rollout (name, base mode, RAC share): bytes, and modelled time relative to BF16 on `chip` (None where
    it has no matrix units for the format).
    """
    shapes = gemm_shapes(report)
    high_precision = parameters - sum(s.experts * s.n * s.k for s in shapes)
    rows = []
    for name, base, k in rollouts:
        row: dict[str, Any] = {"rollout": name}
        row |= {f"{kind}_bytes": size for kind, size in weight_bytes(shapes, high_precision, UNITS[base][0]).items()}
        for tokens in TOKENS:
            bf16 = gemm_seconds(shapes, "bf16", 0.0, tokens, choices, chip)
            known = UNITS[base][2] in chip.matrix
            row[f"model_speedup_over_bf16_at_{tokens}_tokens"] = (
                bf16 / gemm_seconds(shapes, base, k, tokens, choices, chip) if known else None
            )
        rows.append(row)
    return rows
