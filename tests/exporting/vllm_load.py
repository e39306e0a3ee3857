"""Child process of test_vllm_contract.py: vLLM's own classes read an export, as far as a CPU lets them.

    python vllm_load.py JOB.json        job: {"exports": {name: folder}, "out": FILE.json}

Real: parsing of quantization_config, choice of the quantization method per module, create_weights, the model's weight
loader, and for linear layers process_weights_after_loading with vLLM's emulated kernel and its forward.
Replaced: the choice of a kernel, because vLLM has none for NVFP4 on CPU (its platform list has no entry, and its MoE
emulation is a Triton kernel). For every export: parameters that the loader did not fill, elements of the loaded
weights that differ from the verifier's dequantized ones, and the relative error of a forward of one linear layer.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    VLLM_PLUGINS="",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    TORCHDYNAMO_DISABLE="1",
)

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels.linear.nvfp4 import NvFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as ct_moe,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_nvfp4 as ct_linear,
)
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from quads.exporting.verify import Export
from quads.numerics.formats import decode_e2m1, decode_e4m3
from quads.numerics.nvfp4 import unpack

PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}


def replace_kernels() -> None:
    """vLLM's emulated linear kernel everywhere, and a name in place of the MoE kernel, which is never built."""
    for module in (ct_linear, modelopt):
        module.init_nvfp4_linear_kernel = lambda use_a16=False: EmulationNvFp4LinearKernel(NvFp4LinearLayerConfig())
    for module in (ct_moe, modelopt):
        module.select_nvfp4_moe_backend = lambda **_: (NvFp4MoeBackend.EMULATION, None)


def raw(parameter: torch.Tensor) -> torch.Tensor:
    """The bytes of a parameter, uint8 [bytes], sharing its memory (some are scalars, which have no view of bytes)."""
    return parameter.data.view(-1).view(torch.uint8)


def decoded(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 q * s of packed codes [..., N, K/2] and E4M3 scales [..., N, K/16]."""
    q = decode_e2m1(unpack(codes)).unflatten(-1, (-1, 16))
    return (q * decode_e4m3(scales.view(torch.uint8)).unsqueeze(-1)).flatten(-2)


def multipliers(layer: torch.nn.Module, prefix: str, export: Export) -> torch.Tensor:
    """What vLLM turns the loaded global scales into: 1/gs from a divisor, the value itself from a multiplier."""
    stored = getattr(layer, prefix + export.form.weight_global).data.float()
    return 1.0 / stored if export.form.divisor else stored


def expected(export: Export, name: str) -> torch.Tensor:
    head, _, last = name.rpartition(".")
    return torch.cat([export.dequantized(f"{head}.{part}") for part in PARTS.get(last, (last,))])


def check_linear(layer: Any, name: str, export: Export) -> int:
    """Elements that differ; the largest of the equal shards' scales is what vLLM keeps."""
    w = decoded(getattr(layer, export.form.codes).data, layer.weight_scale.data)
    return int((w * multipliers(layer, "", export).max() != expected(export, name)).sum())


def check_experts(layer: Any, name: str, export: Export) -> int:
    base = name.removesuffix(".routed_experts")
    w13 = decoded(getattr(layer, f"w13_{export.form.codes}").data, layer.w13_weight_scale.data)
    w2 = decoded(getattr(layer, f"w2_{export.form.codes}").data, layer.w2_weight_scale.data)
    m13, m2 = multipliers(layer, "w13_", export), multipliers(layer, "w2_", export)
    wrong = 0
    for e in range(len(w13)):
        ours = torch.cat([export.dequantized(f"{base}.{e}.{p}_proj") for p in ("gate", "up")])
        wrong += int((w13[e] * m13[e, 0] != ours).sum())
        wrong += int((w2[e] * m2[e] != export.dequantized(f"{base}.{e}.down_proj")).sum())
        wrong += int(m13[e, 0] != m13[e, 1])
    return wrong


def forward_error(layer: Any, name: str, export: Export) -> float:
    """|y - y_ref| / |y_ref| of vLLM's layer with its emulated W4A4 kernel; y_ref has unquantized activations."""
    torch.manual_seed(0)
    w_NK = expected(export, name)
    x_TK = torch.randn(8, w_NK.shape[1], dtype=torch.bfloat16)
    layer.quant_method.process_weights_after_loading(layer)
    y = layer.quant_method.apply(layer, x_TK).float()
    reference = x_TK.float() @ w_NK.T
    return float((y - reference).norm() / reference.norm())


def read(folder: Path) -> dict[str, Any]:
    config = EngineArgs(
        model=str(folder), dtype="bfloat16", max_model_len=32, enforce_eager=True, skip_tokenizer_init=True
    ).create_engine_config()
    export = Export(folder)
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            address = f"file://{folder.parent}/rendezvous"
            init_distributed_environment(1, 0, address, 0, "gloo")
            initialize_model_parallel(1, 1)
        with set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(config)
        names = dict(model.named_parameters())
        for parameter in names.values():
            # what the loader does not overwrite stays 0xFF: NaN in every float format, no packed weight of a test
            raw(parameter).fill_(0xFF)
        model.load_weights(export.files.items())
        said = {
            "method": config.quant_config.get_name(),
            "class": type(config.quant_config).__name__,
            "not_loaded": sorted(n for n, p in names.items() if bool((raw(p) == 0xFF).all())),
            "quantized": {},
            "unquantized": [],
            "uint8": sum(p.dtype == torch.uint8 for p in names.values()),
        }
        for name, layer in model.named_modules():
            if isinstance(layer, RoutedExperts) and any(export.form.codes in n for n in dict(layer.named_parameters())):
                said["quantized"][name] = check_experts(layer, name, export)
            elif isinstance(layer, LinearBase):
                if isinstance(layer.quant_method, UnquantizedLinearMethod) or layer.quant_method is None:
                    said["unquantized"].append(name)
                else:
                    said["quantized"][name] = check_linear(layer, name, export)
        if export.mode == "w4a4":
            name = "model.layers.0.self_attn.o_proj"
            said["forward_error"] = forward_error(model.get_submodule(name), name, export)
    return said


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    replace_kernels()
    out = {name: read(Path(folder)) for name, folder in job["exports"].items()}
    Path(job["out"]).write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
