# SPDX-License-Identifier: Apache-2.0
"""Quantizer rows of the benchmark: weights, activations, residual compensation; bars 1 to 5.

    weight       [128, 1536, 2048] bf16, a stack of experts: amax, quantize-dequantize, packing, verl's kernel
    activation   [T, 2048] bf16 for T = 4096 and 16384: packing with a given and a per-token scale, RAC at several k

Ceiling of every group is `copy_` of the group's own input, read and written. Every kernel's output is compared byte by
byte with `quads.numerics` computed on the same device, for the whole tensor, outputs poisoned; verl's kernel computes
something else (another order of operations, one scale for all experts) and is only timed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quads.bench.protocol import (
    Bar,
    Case,
    InexactError,
    Measured,
    copy_case,
    measure,
    ratio,
    require_equal,
    sets_beyond_l2,
)
from quads.kernels import activation, rac_quantize, weight
from quads.numerics import packed, qdq
from quads.numerics.packed import PackedRac
from quads.numerics.rac import RacSpec, select

WEIGHT = (128, 1536, 2048)
TOKENS, CHANNELS = (4096, 16384), 2048
SHARES = (0.125, 0.25, 0.5)
CEILINGS = {"weight 128x1536x2048": "copy"} | {f"activation {t}x{CHANNELS}": "copy" for t in TOKENS}
_WEIGHT_GROUP = next(iter(CEILINGS))


def verl_kernel(file: Path | None = None) -> ModuleType | None:
    """verl's QAT module, from `file` or from an installed verl; None without either.

    The file is loaded alone: importing the package verl would start Ray and vLLM.
    """
    if file is None:
        spec = importlib.util.find_spec("verl")
        roots = [] if spec is None else list(spec.submodule_search_locations or ())
        file = next((f for root in roots if (f := Path(root, "utils", "qat", "linear.py")).is_file()), None)
    if file is None:
        return None
    found = importlib.util.spec_from_file_location("verl_qat_linear", file)
    if found is None or found.loader is None:
        raise ValueError(f"{file} is not a Python module; give verl's utils/qat/linear.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def _equal(got: object, expected: object, what: str) -> str:
    """Byte equality of tensors or of (nested) named tuples of tensors."""
    if isinstance(got, Tensor) and isinstance(expected, Tensor):
        return require_equal(what, got, expected)
    if isinstance(got, tuple) and isinstance(expected, tuple):
        names = getattr(got, "_fields", range(len(got)))
        return ", ".join(_equal(g, e, f"{n}") for n, g, e in zip(names, got, expected, strict=True))
    raise InexactError(f"{what}: got {type(got).__name__}, expected {type(expected).__name__}")


def check(kernel: Callable[[], object], definition: Callable[[], object], what: str) -> Callable[[], str]:
    """Gate: kernel() equals definition() byte for byte, with memory of torch.empty filled with NaN before."""

    def run() -> str:
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty
        try:
            got = kernel()
        finally:
            torch.use_deterministic_algorithms(False)
        return _equal(got, definition(), what)

    return run


def _kept(run: Callable[[int], object], sets: int) -> Callable[[int], object]:
    """run(i) whose results stay alive per buffer set, so that outputs rotate beyond L2 as inputs do."""
    results: list[object] = [None] * sets

    def keep(i: int) -> object:
        results[i] = run(i)
        return results[i]

    return keep


def _weight_cases(w: list[Tensor], verl: ModuleType | None) -> Iterator[Case]:
    sets, n = len(w), w[0].numel()
    amax = [weight.weight_amax(x) for x in w]
    y = [torch.empty_like(x) for x in w]
    yield copy_case("copy", w, y)
    definition = check(lambda: weight.fake_quantize_weight(w[0], "nvfp4", amax[0]),
                       lambda: qdq.fake_quantize_weight(w[0], "nvfp4", amax[0]), "values")  # fmt: skip
    yield Case("QDQ, amax given", _kept(lambda i: weight.fake_quantize_weight(w[i], "nvfp4", amax[i]), sets),
               4 * n, check=definition)  # fmt: skip
    yield Case("amax", lambda i: weight.weight_amax(w[i]), 2 * n,
               check=check(lambda: weight.weight_amax(w[0]), lambda: qdq.weight_amax(w[0]), "amax"))  # fmt: skip
    expected: list[Tensor] = []

    def whole() -> Tensor:
        expected[:] = expected or [qdq.fake_quantize_weight(w[0], "nvfp4")]
        return expected[0]

    yield Case("amax + QDQ", _kept(lambda i: weight.fake_quantize_weight(w[i], "nvfp4"), sets), 4 * n,
               check=check(lambda: weight.fake_quantize_weight(w[0], "nvfp4"), whole, "values"))  # fmt: skip

    def two(i: int) -> Tensor:
        return weight.fake_quantize_weight(w[i], "nvfp4", weight.weight_amax(w[i]))

    yield Case("amax + QDQ, two launches", _kept(two, sets), 6 * n, check=check(lambda: two(0), whole, "values"))
    for layout in ("linear", "128x4"):
        yield Case(f"amax + pack, scales {layout}", _kept(lambda i, s=layout: weight.pack_weight(w[i], layout=s), sets),
                   2 * n + n // 2 + n // 16,
                   check=check(lambda s=layout: weight.pack_weight(w[0], layout=s),
                               lambda s=layout: packed.pack_weight(w[0], layout=s), "bytes"))  # fmt: skip
    if verl is not None:
        top = [x.abs().max().float() for x in w]
        peer = "peer, not compared: another order of operations, one scale"
        yield Case("verl QDQ, amax given", _kept(lambda i: verl.fp4_fake_quant_weight(w[i], top[i]), sets), 4 * n,
                   check=lambda: peer)  # fmt: skip

        def verl_two(i: int) -> Tensor:
            return verl.fp4_fake_quant_weight(w[i], w[i].abs().max().float())

        yield Case("verl QDQ + torch amax", _kept(verl_two, sets), 6 * n, check=lambda: peer)


def weights(verl: ModuleType | None, repeats: int = 11) -> list[Measured]:
    """Weight group."""
    w = [torch.randn(WEIGHT, device="cuda", dtype=torch.bfloat16).mul_(0.02) for _ in range(2)]
    return measure(_WEIGHT_GROUP, list(_weight_cases(w, verl)), len(w), repeats)


def _rac_bytes(n: int, share: float) -> int:
    return 2 * n + int((1 + share) * (n // 2 + n // 16))


def _activation_cases(x: list[Tensor], gs: Tensor) -> Iterator[Case]:
    sets, n = len(x), x[0].numel()
    yield copy_case("copy", x, [torch.empty_like(t) for t in x])

    def pack(name: str, **arguments: Any) -> Case:
        return Case(name, _kept(lambda i: activation.pack_activation(x[i], **arguments), sets), _rac_bytes(n, 0.0),
                    check=check(lambda: activation.pack_activation(x[0], **arguments),
                                lambda: packed.pack_activation(x[0], **arguments), "bytes"))  # fmt: skip

    yield pack("pack, gs given", gs=gs)
    yield pack("pack, gs per token")
    yield pack("pack, gs per token, 128x4", layout="128x4")

    def rac(name: str, spec: RacSpec, mask: Tensor | None, scale: Tensor | None, layout: Any = "compact") -> Case:
        share = spec.k if layout == "compact" else 1.0

        def run(i: int) -> PackedRac:
            return rac_quantize.pack_rac(x[i], spec, mask, scale, layout)

        gate = check(lambda: run(0), lambda: packed.pack_rac(x[0], spec, mask, scale, layout), "bytes")
        return Case(name, _kept(run, sets), _rac_bytes(n, share), check=gate)

    for k in SHARES:
        spec = RacSpec(k)
        mask = select(torch.rand(CHANNELS, dtype=torch.float64), spec).to("cuda")
        yield rac(f"RAC static k={k}, gs given", spec, mask, gs)
        yield rac(f"RAC static k={k}, gs per token", spec, mask, None)
        if k == 0.5:
            yield rac(f"RAC static k={k}, gs given, in place", spec, mask, gs, "in_place")
    yield rac("RAC token k=0.5, gs per token", RacSpec(0.5, mask="token"), None, None)
    gate = check(lambda: activation.fake_quantize_activation(x[0], "nvfp4"),
                 lambda: qdq.fake_quantize_activation(x[0], "nvfp4"), "values")  # fmt: skip
    fake = _kept(lambda i: activation.fake_quantize_activation(x[i], "nvfp4"), sets)
    yield Case("fake quantize, gs per token", fake, 4 * n, check=gate)


def activations(tokens: int, repeats: int = 15) -> list[Measured]:
    """Activation group of one size."""
    sets = sets_beyond_l2(2 * tokens * CHANNELS, at_least=8)
    x = [torch.randn(tokens, CHANNELS, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    gs = torch.full((1,), 2688.0, device="cuda") / max(float(t.abs().max()) for t in x)
    return measure(f"activation {tokens}x{CHANNELS}", list(_activation_cases(x, gs)), sets, repeats)


def rows(verl: ModuleType | None) -> list[Measured]:
    """All quantizer rows; memory of a group is given back before the next one."""
    found = []
    for group in (lambda: weights(verl), *(lambda t=t: activations(t) for t in TOKENS)):
        found += group()
        torch.cuda.empty_cache()
    return found


def bars(found: list[Measured]) -> list[Bar]:
    """Bars 1 to 5 of the quantizers; a row that was not timed leaves its bar unmeasured."""

    def row(group: str, name: str) -> Measured | None:
        return next((r for r in found if (r.group, r.name) == (group, name)), None)

    def us(name: str) -> float | None:
        hit = row(_WEIGHT_GROUP, name)
        return None if hit is None else hit.us

    def rate(name: str, tokens: int = 16384) -> float | None:
        group = f"activation {tokens}x{CHANNELS}"
        hit, copy = row(group, name), row(group, "copy")
        return None if hit is None or copy is None else ratio(hit.gbps, copy.gbps)

    ours = us("amax + QDQ")
    return [
        Bar("1", "weight QDQ bandwidth / copy", ratio(us("copy"), us("QDQ, amax given")), 0.90, 0.96, "higher"),
        Bar("2", "amax + QDQ time / copy time", ratio(ours, us("copy")), 1.60, 1.53, "lower"),
        Bar("3", "verl kernel + torch amax / ours", ratio(us("verl QDQ + torch amax"), ours), 2.0, 2.3, "higher"),
        Bar("4", "activation quantize / copy, 16384x2048", rate("pack, gs given"), 0.70, 0.85, "higher"),
        Bar("4t", "the same with a scale per token", rate("pack, gs per token"), 0.70, 0.85, "higher"),
        Bar("5", "fused RAC k=50 % / copy, 16384x2048", rate("RAC static k=0.5, gs given"), 0.50, 0.65, "higher"),
        Bar("5t", "the same with a scale per token", rate("RAC static k=0.5, gs per token"), 0.50, 0.65, "higher"),
    ]  # fmt: skip
