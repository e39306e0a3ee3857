# SPDX-License-Identifier: Apache-2.0
"""Benchmark of all kernels: `python -m quads.bench.kernels --out FILE`, under six minutes on one GPU.

Prints the bars and the table "achieved / ceiling" and writes FILE (JSON: rows, bars, hardware, versions, commit). The
protocol is that of `quads.bench.protocol`; exit status 1 when a kernel failed its exactness check or a required bar is
missed, 2 without a GPU. verl's weight kernel is compared when verl is installed or its file is named.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

import torch

from quads.bench import block, gemm, quantizers
from quads.bench.protocol import Measured, bar_table, copy_case, gemm_case, measure, report, table, warm_up
from quads.files import ResultFileError, require_writable, write_json_atomic


def ceilings() -> list[Measured]:
    """Copy of 1 GiB and two bf16 products: what this card does today, for comparison between runs."""
    warm_up()
    source, target = ([torch.randn(2**28, device="cuda") for _ in range(2)] for _ in range(2))
    rows = measure("ceilings: memory", [copy_case("copy 1 GiB", source, target)], 2, 9)
    del source, target
    torch.cuda.empty_cache()
    for m, n, k, sets in ((8192, 8192, 8192, 1), (4096, 6144, 2048, 4)):
        rows += measure("ceilings: bf16 product", [gemm_case(f"{m}x{k}x{n}", m, n, k, sets)], sets, 9)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m quads.bench.kernels", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file to write")
    parser.add_argument("--only", choices=("quantizers", "gemm", "block"), help="one part of the benchmark")
    parser.add_argument("--verl-qat", type=Path, metavar="FILE", help="verl's utils/qat/linear.py, if not installed")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    if arguments.verl_qat and not (arguments.verl_qat.is_file() and arguments.verl_qat.suffix == ".py"):
        parser.error(f"--verl-qat {arguments.verl_qat}: no such Python file; give verl's utils/qat/linear.py")
    try:
        require_writable(arguments.out)
    except ResultFileError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        sys.stderr.write("error: the benchmark needs a CUDA GPU; kernels are checked without one by tests/kernels\n")
        return 2
    start = time.monotonic()
    rows, bars = ceilings(), []
    if arguments.only in (None, "quantizers"):
        found = quantizers.rows(quantizers.verl_kernel(arguments.verl_qat))
        rows, bars = rows + found, bars + quantizers.bars(found)
    if arguments.only in (None, "gemm"):
        found = gemm.rows()
        rows, bars = rows + found, bars + gemm.bars(found)
    if arguments.only in (None, "block"):
        found = block.rows()
        rows, bars = rows + found, bars + block.bars(found)
    result = report(rows, bars) | {"seconds": round(time.monotonic() - start, 1)}
    write_json_atomic(arguments.out, result)
    print(bar_table(bars), table(rows, quantizers.CEILINGS | gemm.CEILINGS | block.CEILINGS), sep="\n\n")
    print(f"\n{result['seconds']} s")
    failed = [r.name for r in rows if r.us is None] + [b.what for b in bars if b.verdict == "missed"]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
