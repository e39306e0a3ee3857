# SPDX-License-Identifier: Apache-2.0
"""Ways to pay less for the quantization in bar 10, timed together: `python -m quads.bench.block_variants --out FILE`.

    kernel   shapes of the single launch for amax and quantize-dequantize (`weight.Fused`), on W13 and W2 of the block
    block    expert block forward + backward, one micro-batch: the tree's settings, the fastest exact kernel of the
             first part, W2 quantized beside the first product (`grouped.BESIDE`), and both

Same block, protocol and exactness check as `quads.bench.block`; samples of all rows of a part are interleaved. Prints
bar 10 of every variant and the table, writes FILE (JSON). Exit status 1 when a row is not exact, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quads.bench import block
from quads.bench.protocol import Bar, Case, Measured, bar_table, copy_case, measure, ratio, report, table, warm_up
from quads.bench.quantizers import check
from quads.files import write_json_atomic
from quads.kernels import weight
from quads.kernels.weight import Fused
from quads.layers import grouped
from quads.numerics import qdq

KERNELS = {
    "apart": Fused(),
    "apart, lag 2": Fused(lag=2),
    "paired": Fused(True),
    "paired, lag 2": Fused(True, lag=2),
    "paired, 8 x 4096": Fused(True, repeat=8),
    "paired, 2 x 4096": Fused(True, repeat=2),
    "paired, 2 x 4096, lag 2": Fused(True, repeat=2, lag=2),
    "paired, 1 x 4096": Fused(True, repeat=1),
    "paired, 1 x 4096, lag 2": Fused(True, repeat=1, lag=2),
    "paired, 64 registers": Fused(True, registers=64),
    "paired, 2 x 4096, 64 registers": Fused(True, repeat=2, registers=64),
    "paired, 8 warps, 2 x 8192": Fused(True, tile=8192, repeat=2, blocks=256, warps=8),
    "paired, 2 warps, 4 x 2048": Fused(True, tile=2048, repeat=4, blocks=64, warps=2),
}
IDLE_SMS = (0, 8, 16, 24)
IDLE_SMS_APART = (0, 16)
SHAPES = {
    "W13": (block.EXPERTS, 2 * block.F, block.D),
    "W2": (block.EXPERTS, block.D, block.F),
}


@contextmanager
def applied(fused: Fused, beside: int | None) -> Iterator[None]:
    """These settings in place of the tree's."""
    before = weight.FUSED, grouped.BESIDE
    weight.FUSED, grouped.BESIDE = fused, beside
    try:
        yield
    finally:
        weight.FUSED, grouped.BESIDE = before


def under(fused: Fused, beside: int | None, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` that runs (is checked, is captured) with these settings."""

    def run(*arguments: object) -> Any:
        with applied(fused, beside):
            return function(*arguments)

    return run


def kernel_rows(repeats: int) -> list[Measured]:
    """Every shape of the launch on both weights; "copy" is the ceiling of each."""
    found = []
    for name, shape in SHAPES.items():
        w = (0.02 * torch.randn(shape, device="cuda")).bfloat16()
        y, expected = torch.empty_like(w), qdq.fake_quantize_weight(w, "nvfp4")
        quantize = lambda _=0, w=w: weight.fake_quantize_weight(w, "nvfp4")  # noqa: E731
        cases = [copy_case("copy", [w], [y])]
        for kind, fused in KERNELS.items():
            gate = check(quantize, lambda expected=expected: expected, "values")
            run, gate = under(fused, None, quantize), under(fused, None, gate)
            cases.append(Case(kind, run, 4 * w.numel(), check=gate, config=fused._asdict()))
        found += measure(f"QDQ {name}", cases, 1, repeats)
        del w, y, expected, cases
        torch.cuda.empty_cache()
    return found


def fastest_kernel(rows: list[Measured]) -> str:
    """Name of the exact shape with the smallest sum over both weights."""
    times: dict[str, list[float]] = {}
    for row in rows:
        if row.name in KERNELS and row.us is not None:
            times.setdefault(row.name, []).append(row.us)
    return min((name for name, us in times.items() if len(us) == len(SHAPES)), key=lambda name: sum(times[name]))


def block_variants(kernel: str) -> dict[str, tuple[Fused, int | None]]:
    """Settings by row name; `kernel` is a name in KERNELS."""
    variants: dict[str, tuple[Fused, int | None]] = {"tree": (weight.FUSED, grouped.BESIDE)}
    for name in dict.fromkeys(("apart", kernel)):
        variants[name] = (KERNELS[name], None)
        choices = IDLE_SMS if name == kernel else IDLE_SMS_APART
        variants |= {f"{name} + W2 beside, {idle} SMs": (KERNELS[name], idle) for idle in choices}
    # The tree is one of them: time it once.
    tree = variants.pop("tree")
    return {f"{name} (tree)" if settings == tree else name: settings for name, settings in variants.items()}


def block_rows(kernel: str, repeats: int) -> list[Measured]:
    """The block without QAT and with every variant; needs about 80 GB."""
    operands = block.Block()
    holder = operands.swapped("off")

    def step(_: int = 0) -> list[Tensor]:
        return operands.step(holder["experts"](operands.x, operands.ids, operands.weights))

    def plain(_: int) -> list[Tensor]:
        return operands.step(operands.grouped(*operands.params))

    cases = [Case("without QAT, grouped", plain, flops=block.FLOPS)]
    for name, settings in block_variants(kernel).items():
        gate = under(*settings, lambda: block.check(operands, holder))
        config = settings[0]._asdict() | {"beside": settings[1]}
        cases.append(Case(f"with QAT: {name}", under(*settings, step), flops=block.FLOPS, check=gate, config=config))
    return measure(block.GROUP, cases, 1, repeats)


def bars(rows: list[Measured]) -> list[Bar]:
    """Bar 10 of every variant."""
    own = [row for row in rows if row.group == block.GROUP]
    return [Bar("10", row.name, ratio(row.us, own[0].us), 1.07, 1.05, "lower") for row in own[1:]]


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--repeats", type=int, default=101, help="rounds of the block; median counts")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    if not torch.cuda.is_available():
        sys.stderr.write("error: the benchmark needs a CUDA GPU; kernels are checked without one by tests/kernels\n")
        return 2
    start = time.monotonic()
    warm_up()
    rows = kernel_rows(41)
    kernel = fastest_kernel(rows)
    rows += block_rows(kernel, arguments.repeats)
    found = bars(rows)
    result = report(rows, found) | {"fastest_kernel": kernel, "seconds": round(time.monotonic() - start, 1)}
    write_json_atomic(arguments.out, result)
    print(bar_table(found), table(rows, block.CEILINGS | {f"QDQ {name}": "copy" for name in SHAPES}), sep="\n\n")
    print(f"\nfastest kernel: {kernel}; {result['seconds']} s")
    return 1 if any(row.us is None for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
