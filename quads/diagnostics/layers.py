"""Per quantized input of the model: how badly NVFP4 treats it and what RAC recovers.

    r = x - Q(x)     energy of a mask m = sum (m r)^2 / sum r^2     QSNR = 10 log10(sum x^2 / sum (x - A(x))^2)  (dB)

    activation_qsnr_db_{fp8,nvfp4,nvfp4_rac}     A = FP8 per token, NVFP4, NVFP4 with the static mask
    dead_zone_share_of_nonzero                   share of x != 0 that NVFP4 turns into 0
    crest_factor_max_over_rms                    max |x| / rms x
    rac_energy_share_{static,oracle,uniform}     static: calibrated mask; oracle: best mask for these very tokens;
                                                 uniform: share of channels, what a random mask captures on average
    mask_overlap_share                           |static and oracle| / |oracle|
    rac_error2_ratio_{measured,predicted}        remaining squared error over that without RAC; predicted
                                                 1 - e + e 0.095^2, e = energy of the static mask
    weight_qsnr_db_nvfp4                         of the matrix that multiplies it (all experts together)

x: what the trainer's T1 model (NVFP4 weights, BF16 activations) feeds the layer on sampled tokens. Rows are summed in
float64. Differs from activation statistics of a whole layer output: these are the tensors that the engine quantizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quads.layers.surgery import QuadsLinear, observing, quads_layers
from quads.numerics.qdq import activation_residual, quantize_activation, quantize_weight
from quads.numerics.rac import RacSpec, channel_scores, select

RESIDUAL_OF_RESIDUAL = 0.095  # relative NVFP4 error on Gaussian data: the paper's prediction of RAC's remainder


@contextmanager
def observed(model: torch.nn.Module, observer: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call observer(engine key, x [rows, K]) for every quantized input while the block runs; q, k, v count once."""

    def call(key: str, x: Tensor, token: Tensor | None) -> None:
        observer(key, x)

    with observing((module for _, module in quads_layers(model)), call):
        yield


@dataclass
class Sums:
    """Sums over the rows of one quantized input, from which `layer_row` makes the columns of the module docstring."""

    x2: float = 0.0
    count: int = 0
    peak: float = 0.0
    nonzero: int = 0
    dead: int = 0
    error2: dict[str, float] = field(default_factory=dict)
    scores: Tensor | None = None  # float64 [K], sum of squared residuals per channel


@torch.no_grad()
def layer_table(
    model: torch.nn.Module, ids_BT: Tensor, spec: RacSpec, masks: dict[str, Tensor]
) -> list[dict[str, Any]]:
    """One row per quantized input, in model order. model: T1 after surgery; masks: static, bool [K] by engine key."""
    sums: dict[str, Sums] = {}
    device = next(model.parameters()).device

    def observe(key: str, x: Tensor) -> None:
        accumulate(sums.setdefault(key, Sums()), x, spec, masks[key].to(x.device))

    with observed(model, observe):
        model(input_ids=ids_BT.to(device), use_cache=False)
    weights = weight_qsnr(model)
    return [layer_row(key, s, spec, masks[key]) | {"weight_qsnr_db_nvfp4": weights[key]} for key, s in sums.items()]


def accumulate(s: Sums, x: Tensor, spec: RacSpec, mask: Tensor) -> None:
    """Add the rows of x [rows, K]; mask: static, bool [K] on x's device."""
    wide = x.double()
    residual = activation_residual(x)
    s.x2 += wide.square().sum().item()
    s.count += x.numel()
    s.peak = max(s.peak, wide.abs().max().item())
    s.nonzero += int((x != 0).sum())
    s.dead += int(((x != 0) & (quantize_activation(x, "nvfp4").qs == 0)).sum())
    scores = channel_scores(residual, "sumsq")
    s.scores = scores if s.scores is None else s.scores + scores
    static = RacSpec(spec.k, spec.granularity, "static", spec.score)
    for name, quantized in (
        ("fp8", quantize_activation(x, "fp8")),
        ("nvfp4", quantize_activation(x, "nvfp4")),
        ("nvfp4_rac", quantize_activation(x, "nvfp4", static, mask)),
    ):
        error = (wide - quantized.dequantize().double()).square().sum().item()
        s.error2[name] = s.error2.get(name, 0.0) + error


def layer_row(key: str, s: Sums, spec: RacSpec, mask: Tensor) -> dict[str, Any]:
    """The activation columns of the module docstring for one input."""
    assert s.scores is not None
    scores = s.scores.cpu()
    oracle = select(scores, spec)
    total = float(scores.sum())
    energy = float(scores[mask].sum()) / total
    return {
        "layer": key,
        "channels": len(scores),
        "crest_factor_max_over_rms": s.peak / math.sqrt(s.x2 / s.count),
        **{f"activation_qsnr_db_{name}": qsnr(s.x2, error) for name, error in s.error2.items()},
        "dead_zone_share_of_nonzero": s.dead / s.nonzero,
        "rac_energy_share_static": energy,
        "rac_energy_share_oracle": float(scores[oracle].sum()) / total,
        "rac_energy_share_uniform": float(mask.double().mean()),
        "mask_overlap_share": float((mask & oracle).sum() / oracle.sum()),
        "rac_error2_ratio_measured": s.error2["nvfp4_rac"] / s.error2["nvfp4"],
        "rac_error2_ratio_predicted": 1 - energy + energy * RESIDUAL_OF_RESIDUAL**2,
    }


def qsnr(signal2: float, error2: float) -> float:
    """dB; infinite without error."""
    return 10 * math.log10(signal2 / error2) if error2 > 0 else math.inf


@torch.no_grad()
def weight_qsnr(model: torch.nn.Module) -> dict[str, float]:
    """QSNR (dB) of NVFP4 weights by engine key of the input they multiply; fused members add up."""
    signal: dict[str, float] = {}
    error: dict[str, float] = {}

    def add(key: str, w: Tensor, amax: Tensor | None) -> None:
        wide = w.detach().to(torch.bfloat16).double()
        difference = wide - quantize_weight(w.detach(), "nvfp4", amax).dequantize().double()
        signal[key] = signal.get(key, 0.0) + wide.square().sum().item()
        error[key] = error.get(key, 0.0) + difference.square().sum().item()

    for name, module in quads_layers(model):
        if isinstance(module, QuadsLinear):
            add(module.quads.key(), module.weight, module.quads.shared_amax())
        else:
            add(f"{name}.w13", module.gate_up_proj, None)
            add(f"{name}.w2", module.down_proj, None)
    return {key: qsnr(signal[key], error[key]) for key in signal}
