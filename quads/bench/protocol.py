# SPDX-License-Identifier: Apache-2.0
"""How a kernel is timed: exactness first, ratios within one run, interleaved, medians, buffers beyond L2.

    Case      one kernel on rotating buffer sets, its algorithmic bytes and flops, and the check that gates its speed
    measure   checks, captures and times a group of cases; returns one Measured per case
    Bar       a ratio of two measured times with what is required and what is aimed at
    report    the JSON object (rows, bars, hardware, versions, commit) and `table` its text

Protocol. A case's check runs first, in the same process and on the same buffers' kind; a case that fails it gets no
time at all (`us` is None), so a wrong kernel cannot show a speed. Each case is then captured in one CUDA graph that
walks its buffer sets (their total exceeds four times L2, so every launch reads from memory); a sample is one replay
divided by the number of launches. Samples of all cases of a group are interleaved in rounds of
random order, so clock drift and what the case before left behind (heat, a power limit) hit all alike; the median counts
and `spread` is the interquartile range over it. Bytes are algorithmic: each input once, each output once; GB/s = 1e9
bytes per second.

Differs from `do_bench`: no L2 flush between launches (rotation does it), no host launch time (the graph does it), and
no absolute claims: what is compared is a ratio to a ceiling measured in the same group.
"""

from __future__ import annotations

import logging
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from quads import provenance

log = logging.getLogger(__name__)
L2_MULTIPLE = 4
WARMUP = 3
PACKAGES = ("torch", "triton", "numpy", "vllm", "verl")


class InexactError(Exception):
    """A kernel's output differs from its definition; the message says where."""


@dataclass(frozen=True)
class Case:
    """One thing to time. `run(i)` works on buffer set i, allocates nothing it keeps and never waits for the GPU.

    check: returns a short account of what was compared, raises InexactError otherwise; None only for ceilings, that is
    for library code that defines a limit.
    """

    name: str
    run: Callable[[int], object]
    bytes: int = 0
    flops: int = 0
    check: Callable[[], str] | None = None
    config: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """us: median microseconds per launch, None when the check failed; spread: interquartile range / median."""

    group: str
    name: str
    us: float | None
    spread: float | None
    gbps: float | None
    tflops: float | None
    exact: str
    samples: int
    config: dict[str, Any]


@dataclass(frozen=True)
class Bar:
    """A ratio that must be reached. value None: not measured, or a kernel in it failed its check."""

    number: str
    what: str
    value: float | None
    required: float
    aim: float
    better: Literal["higher", "lower"]

    @property
    def verdict(self) -> str:
        """ "aim", "met", "missed" or "not measured"."""
        if self.value is None:
            return "not measured"
        reached = (
            (lambda limit: self.value >= limit) if self.better == "higher" else (lambda limit: self.value <= limit)
        )
        return "aim" if reached(self.aim) else "met" if reached(self.required) else "missed"


def sets_beyond_l2(bytes_per_set: int, at_least: int = 2) -> int:
    """How many buffer sets make one walk over them exceed the GPU's L2 cache by L2_MULTIPLE."""
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(at_least, -(-L2_MULTIPLE * l2 // bytes_per_set))


def require_equal(what: str, got: torch.Tensor, expected: torch.Tensor) -> str:
    """Byte equality of two tensors (sign of zero, NaN patterns included); an account of it, or InexactError."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise InexactError(
            f"{what}: got {got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
        )
    fresh = torch.contiguous_format
    a, b = (t.clone(memory_format=fresh).view(-1).view(torch.uint8) for t in (got, expected.to(got.device)))
    different = int((a != b).sum())
    if different:
        first = int((a != b).nonzero()[0])
        raise InexactError(
            f"{what}: {different} of {a.numel()} bytes differ, first at {first}: {int(a[first])}, "
            f"expected {int(b[first])}"
        )
    return f"{what} {got.numel()} equal"


def warm_up(seconds: float = 1.0) -> None:
    """Bring an idle GPU's clocks up with products; the first second after idling runs at a fraction of them."""
    a = torch.randn(8192, 8192, device="cuda").to(torch.bfloat16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        a @ a
        torch.cuda.synchronize()


def capture(run: Callable[[int], object], sets: int) -> torch.cuda.CUDAGraph:
    """CUDA graph of run(0) ... run(sets - 1), warmed up on a side stream first."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(sets):
            run(i)
    return graph


def _samples(graphs: dict[str, torch.cuda.CUDAGraph], launches: int, repeats: int) -> dict[str, list[float]]:
    for graph in graphs.values():
        for _ in range(WARMUP):
            graph.replay()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    order = list(graphs.items())
    for _ in range(repeats):
        random.shuffle(order)
        for name, graph in order:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [1e3 * s.elapsed_time(e) / launches for s, e in pairs] for name, pairs in events.items()}


def _exactness(case: Case) -> tuple[bool, str]:
    if case.check is None:
        return True, "ceiling"
    try:
        return True, case.check()
    except InexactError as error:
        log.error("%s is not exact: %s; its speed is not measured", case.name, error)
        return False, f"INEXACT: {error}"
    except Exception as error:  # a kernel that does not compile or launch is a row of the table, not the end of it
        log.exception("%s failed", case.name)
        return False, f"FAILED: {type(error).__name__}: {str(error)[:300]}"


def measure(group: str, cases: Sequence[Case], sets: int, repeats: int = 15) -> list[Measured]:
    """Check, then time the cases interleaved; order of the result is that of `cases`. Names must be distinct."""
    names = [case.name for case in cases]
    if len(set(names)) != len(names):
        raise ValueError(f"group {group!r}: case names must be distinct, got {names}")
    verdicts = {case.name: _exactness(case) for case in cases}
    graphs = {case.name: capture(case.run, sets) for case in cases if verdicts[case.name][0]}
    times = _samples(graphs, sets, repeats)
    measured = []
    for case in cases:
        us = spread = None
        if case.name in times:
            us = statistics.median(times[case.name])
            low, _, high = statistics.quantiles(times[case.name], n=4)
            spread = (high - low) / us
        measured.append(
            Measured(
                group,
                case.name,
                us,
                spread,
                case.bytes / us / 1e3 if us and case.bytes else None,
                case.flops / us / 1e6 if us and case.flops else None,
                verdicts[case.name][1],
                len(times.get(case.name, ())),
                case.config,
            )
        )
        log.info("%s | %s: %s", group, case.name, f"{us:.2f} us" if us else verdicts[case.name][1])
    return measured


def ratio(a: float | None, b: float | None) -> float | None:
    """a / b, None when either was not measured."""
    return a / b if a and b else None


def best(rows: Sequence[Measured], prefix: str) -> Measured | None:
    """Fastest exact row whose name starts with prefix; None when there is none."""
    timed = [row for row in rows if row.name.startswith(prefix) and row.us is not None]
    return min(timed, key=lambda row: row.us or 0.0, default=None)


def copy_case(name: str, source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> Case:
    """Ceiling: device-to-device `copy_` of one tensor per buffer set, read and written bytes counted."""
    size = 2 * source[0].numel() * source[0].element_size()
    return Case(name, lambda i: target[i].copy_(source[i]), bytes=size)


def gemm_case(name: str, m: int, n: int, k: int, sets: int) -> Case:
    """Ceiling: bf16 cuBLAS product [m, k] x [n, k]^T on random data."""
    a, b = (torch.randn(sets, rows, k, device="cuda").to(torch.bfloat16) for rows in (m, n))
    y = torch.empty(sets, m, n, device="cuda", dtype=torch.bfloat16)
    size = 2 * (m * k + n * k + m * n)
    return Case(name, lambda i: torch.matmul(a[i], b[i].mT, out=y[i]), bytes=size, flops=2 * m * n * k)


def report(rows: Sequence[Measured], bars: Sequence[Bar]) -> dict[str, Any]:
    """JSON object: rows, bars with verdicts, and where they come from."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "bars": [asdict(bar) | {"verdict": bar.verdict} for bar in bars],
        "rows": [asdict(row) for row in rows],
        "hardware": provenance.hardware()
        | {"device": properties.name, "sms": properties.multi_processor_count, "l2_bytes": properties.L2_cache_size},
        "versions": provenance.versions(*PACKAGES) | {"cuda": torch.version.cuda},
        "commit": provenance.commit(),
        "code_hash": provenance.code_hash("quads.bench", "quads.kernels", "quads.layers"),
    }


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(rows: Sequence[Measured], ceilings: dict[str, str]) -> str:
    """Markdown: time, rate and achieved / ceiling per row; `ceilings` maps a group to the name of its ceiling row.

    The ratio compares rates: GB/s where the ceiling is a copy, TF/s where it is a product.
    """
    lines = [
        "| group | kernel | us | spread | GB/s | TF/s | of ceiling | exactness |",
        "|---|---|---|---|---|---|---|---|",
    ]
    by_name = {(row.group, row.name): row for row in rows}
    for row in rows:
        top = by_name.get((row.group, ceilings.get(row.group, "")))
        share = None
        if top is not None:
            share = ratio(row.tflops, top.tflops) if top.tflops else ratio(row.gbps, top.gbps)
        cells = (
            _cell(row.us, ".2f"),
            _cell(row.spread, ".1%"),
            _cell(row.gbps, ".0f"),
            _cell(row.tflops, ".1f"),
            _cell(share, ".3f"),
            row.exact,
        )
        lines.append(f"| {row.group} | {row.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def bar_table(bars: Sequence[Bar]) -> str:
    """Markdown: every bar with its measured ratio, requirement, aim and verdict."""
    lines = ["| # | ratio | measured | required | aim | verdict |", "|---|---|---|---|---|---|"]
    sign = {"higher": ">=", "lower": "<="}
    for bar in bars:
        lines.append(
            f"| {bar.number} | {bar.what} | {_cell(bar.value, '.3f')} | {sign[bar.better]} {bar.required} | "
            f"{bar.aim} | {bar.verdict} |"
        )
    return "\n".join(lines)
