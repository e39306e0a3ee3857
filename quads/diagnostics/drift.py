"""Does re-quantizing activations amplify small differences between two engines? A perturbation test per layer.

    amplification = |Q(x + eta) - Q(x)|_F / |eta|_F        eta ~ N(0, (noise * rms of the row)^2), per element

x: what the T1 model feeds each quantized input; Q: nothing, FP8, NVFP4, NVFP4 with static RAC. Without quantizer the
ratio is 1. A quantizer turns noise far below its step into rare full steps: the ratio then grows like
sqrt(step / noise), which is the mechanism by which a symmetric trainer sees engine drift enlarged. For noise well above
the step it tends to 1 again. Source: a perturbation test of this project; it isolates the mechanism from the model,
while `delta_num` of the decomposition shows what arrives in the log-probs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quads.diagnostics.layers import observed
from quads.numerics.qdq import quantize_activation
from quads.numerics.rac import RacSpec

QUANTIZERS = ("none", "fp8", "nvfp4", "nvfp4_rac")


def _quantized(x: Tensor, quantizer: str, spec: RacSpec, mask: Tensor) -> Tensor:
    if quantizer == "none":
        return x
    rac = spec if quantizer == "nvfp4_rac" else None
    fmt = "fp8" if quantizer == "fp8" else "nvfp4"
    return quantize_activation(x, fmt, rac, mask if rac is not None else None).dequantize()


@torch.no_grad()
def amplification_table(
    model: torch.nn.Module,
    ids_BT: Tensor,
    spec: RacSpec,
    masks: dict[str, Tensor],
    noise: tuple[float, ...],
    seeds: tuple[int, ...],
) -> list[dict[str, Any]]:
    """Rows: layer x quantizer x noise x seed of the noise. model: T1 after surgery; masks: static, by engine key."""
    inputs: dict[str, Tensor] = {}

    def observe(key: str, x: Tensor) -> None:
        inputs[key] = x.float().cpu()

    with observed(model, observe):
        model(input_ids=ids_BT.to(next(model.parameters()).device), use_cache=False)
    rows = []
    for key, x in inputs.items():
        clean = {q: _quantized(x, q, spec, masks[key]) for q in QUANTIZERS}
        rms = x.square().mean(-1, keepdim=True).sqrt()
        for size in noise:
            for seed in seeds:
                generator = torch.Generator().manual_seed(seed)
                eta = torch.randn(x.shape, generator=generator) * rms * size
                moved = (x + eta).double() - x.double()  # what float32 really added
                for q in QUANTIZERS:
                    change = _quantized(x + eta, q, spec, masks[key]).double() - clean[q].double()
                    rows.append(
                        {
                            "layer": key,
                            "quantizer": q,
                            "noise_over_rms": size,
                            "seed": seed,
                            "amplification_change_over_noise": (change.norm() / moved.norm()).item(),
                        }
                    )
    return rows
