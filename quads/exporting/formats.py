"""The two NVFP4 checkpoint formats that vLLM loads: tensor names, forms of the global scales, config.json.

                       compressed-tensors                      modelopt
    packed codes       weight_packed        uint8 [N, K/2]     weight           uint8 [N, K/2]
    block scales       weight_scale         E4M3 [N, K/16]     weight_scale     E4M3 [N, K/16]
    global, weight     weight_global_scale  fp32 [1]  gs       weight_scale_2   fp32 []  1/gs
    global, input      input_global_scale   fp32 [1]  gs       input_scale      fp32 []  1/gs      (w4a4 only)

gs = 2688 / amax is the divisor form, 1/gs (rounded once) the multiplier form. vLLM multiplies with 1/gs in both cases,
so q * s * RN(1/gs) is what an engine sees, bit for bit this project's dequantized weight. Nibbles: element 2i low.
Source: reading of vLLM's CompressedTensorsW4A4Fp4, ModelOptNvFp4Config and their MoE methods, and of
compressed-tensors. Differs from the obvious: 1/(1/gs) is not gs, so formats are written from gs, never from each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quads.exporting.plan import Plan

MODES = ("w4a16", "w4a4")


@dataclass(frozen=True)
class ExportFormat:
    """Tensor suffixes of one format, and whether its global scales are divisors."""

    name: str
    codes: str
    block_scale: str
    weight_global: str
    input_global: str
    divisor: bool

    def global_scale(self, gs: Tensor) -> Tensor:
        """The stored form of a divisor-form fp32 scale with one element."""
        value = gs.to(torch.float32).reshape(())
        return value.reshape(1).clone() if self.divisor else value.reciprocal()

    def multiplier(self, stored: Tensor) -> Tensor:
        """fp32 []: what an engine multiplies q * s with."""
        value = stored.to(torch.float32).reshape(())
        return value.reciprocal() if self.divisor else value

    def suffixes(self, mode: str) -> tuple[str, ...]:
        """Names of the tensors of one quantized module."""
        common = (self.codes, self.block_scale, self.weight_global)
        return (*common, self.input_global) if mode == "w4a4" else common

    def quantization_config(self, plan: Plan, mode: str) -> dict[str, Any]:
        """Value of `quantization_config` in config.json."""
        make = _compressed_tensors if self.name == "compressed-tensors" else _modelopt
        return make(list(plan.skipped), mode)

    def extra_files(self, plan: Plan, mode: str) -> dict[str, dict[str, Any]]:
        """Further JSON files by name: older ModelOpt readers look into hf_quant_config.json."""
        if self.name == "compressed-tensors":
            return {}
        old = {
            "producer": {"name": "quads"},
            "quantization": {
                "quant_algo": _ALGORITHM[mode],
                "kv_cache_quant_algo": None,
                "group_size": 16,
                "exclude_modules": list(plan.skipped),
            },
        }
        return {"hf_quant_config.json": old}


FORMATS = {
    f.name: f
    for f in (
        ExportFormat(
            "compressed-tensors",
            "weight_packed",
            "weight_scale",
            "weight_global_scale",
            "input_global_scale",
            divisor=True,
        ),
        ExportFormat("modelopt", "weight", "weight_scale", "weight_scale_2", "input_scale", divisor=False),
    )
}
_ALGORITHM = {"w4a4": "NVFP4", "w4a16": "W4A16_NVFP4"}


def find_format(name: str) -> ExportFormat:
    """Format by name. Raises ValueError naming the known ones."""
    if name not in FORMATS:
        raise ValueError(f"unknown export format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def format_of(config: dict[str, Any]) -> tuple[ExportFormat, str]:
    """(format, mode) that a `quantization_config` declares. Raises ValueError."""
    method = config.get("quant_method")
    if method not in FORMATS:
        raise ValueError(f"quantization_config.quant_method is {method!r}; known: {', '.join(FORMATS)}")
    if method == "modelopt":
        by_algorithm = {v: k for k, v in _ALGORITHM.items()}
        algorithm = config.get("quant_algo")
        if algorithm not in by_algorithm:
            raise ValueError(f"quantization_config.quant_algo is {algorithm!r}; known: {', '.join(by_algorithm)}")
        return FORMATS[method], by_algorithm[algorithm]
    (group,) = config["config_groups"].values()
    return FORMATS[method], "w4a16" if group.get("input_activations") is None else "w4a4"


def _tensor_group(dynamic: bool | str) -> dict[str, Any]:
    """compressed-tensors' words for NVFP4: a scale per 16 elements and one per tensor."""
    return {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "symmetric": True,
        "dynamic": dynamic,
    }


def _compressed_tensors(ignore: list[str], mode: str) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": _tensor_group(dynamic=False),
        # "local": block scales are computed at run time, the global scale is the stored one
        "input_activations": _tensor_group(dynamic="local") if mode == "w4a4" else None,
        "output_activations": None,
        "format": "nvfp4-pack-quantized",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }


def _modelopt(ignore: list[str], mode: str) -> dict[str, Any]:
    four_bits = {"num_bits": 4, "type": "float", "group_size": 16}
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": four_bits | {"dynamic": False},
        "input_activations": four_bits | {"dynamic": False} if mode == "w4a4" else None,
    }
    return {
        "quant_method": "modelopt",
        "quant_algo": _ALGORITHM[mode],
        "group_size": 16,
        "kv_cache_scheme": None,
        "ignore": ignore,
        "config_groups": {"group_0": group},
        "producer": {"name": "quads"},
    }
