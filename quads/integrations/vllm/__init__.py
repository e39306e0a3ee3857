# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin: quantization method "quads" for linears and routed experts, refreshed in place at every weight update.

    register.py       entry point of group vllm.general_plugins, called in every vLLM process
    compat.py         everything that depends on vLLM's version, and every patch
    quantization.py   the config object and the linear method
    moe.py            the routed-experts method
    state.py          per-layer state: names, masks, counters
    receipt.py        what was quantized, written as JSON and checked for completeness
    reload.py         weight updates and weight dumps

Backend: "emulated (torch)". Values are those of an NVFP4 GEMM, time is not: no FP4 kernel runs. Eager mode only, since
the experts' row counts are read on the host.
"""
