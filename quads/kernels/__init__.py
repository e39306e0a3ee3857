# SPDX-License-Identifier: Apache-2.0
"""Triton kernels: the fast twins of `quads.numerics`, same names, same parameters, same bits.

    encode       device functions shared by all kernels
    weight       weight_amax, quantize_weight, fake_quantize_weight, pack_weight
    activation   quantize_activation, fake_quantize_activation, pack_activation
    rac_quantize pack_rac: both passes of residual compensation from one read of x
    terms        both passes as GEMM operands; the mask is read in place (what the engine runs)

`tests/kernels` checks that each public function has a definition of the same name and parameters in `quads.numerics`.
Importing a submodule needs Triton; importing this package does not. Nothing falls back silently: a kernel called with
a CPU tensor outside Triton's interpreter raises.
"""
