# SPDX-License-Identifier: Apache-2.0
"""vLLM plugin: quantization method "quads" for linears and routed experts, refreshed in place at every weight update.

    register.py       entry point of group vllm.general_plugins, called in every vLLM process
    compat.py         everything that depends on vLLM's version, and every patch
    quantization.py   the config object and the linear method
    moe.py            the routed-experts method
    native.py         packed weights of both for the FP4 backends
    state.py          per-layer state: names, masks, counters
    shards.py         tensor parallelism: scales of whole layers and tokens, what is refused
    preflight.py      refusals before weights are loaded and before a step is run
    guard.py          a fresh engine's backend against the reference, one layer of each kind
    execution.py      eager or CUDA graphs, as engine arguments
    receipt.py        what was quantized, written as JSON and checked for completeness
    reload.py         weight updates and weight dumps
    update.py         a whole weight update made from a checkpoint folder
    generate.py       an engine as a context manager: evaluation; score.py, bench.py, parity.py build on it

Backend, by config key `backend` and in the receipt: reference = "emulated (torch)", triton = "emulated (triton)",
native and cutlass = "native (FP4, triton)" and "native (FP4, cutlass)", an error below compute capability 10 and not
yet run on it. Of an emulation the values are those of an NVFP4 GEMM, the time is not.
Reference is eager only (it reads row counts and finite checks on the host): enforce_eager=False is refused. Triton's
layers are custom ops without host values, for vLLM's compile and CUDA graphs too; batch masks and token masks by
channel are quantized by torch there, which is eager only again. The receipt's `execution` says which.
"""
