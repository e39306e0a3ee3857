# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin: quantization method "quads" for linears and routed experts, refreshed in place at every weight update.

    register.py       entry point of group vllm.general_plugins, called in every vLLM process
    compat.py         everything that depends on vLLM's version, and every patch
    quantization.py   the config object and the linear method
    moe.py            the routed-experts method
    state.py          per-layer state: names, masks, counters
    receipt.py        what was quantized, written as JSON and checked for completeness
    reload.py         weight updates and weight dumps

Backend, by config key `backend` and in the receipt: reference = "emulated (torch)", triton = "emulated (triton)",
native = an error until FP4 hardware ran it. Values are those of an NVFP4 GEMM, time is not: no FP4 kernel runs. Eager
mode only with every backend, since the experts' row counts are read on the host (that excludes vLLM's compile and CUDA
graphs; the kernels themselves hold no host value).
"""
