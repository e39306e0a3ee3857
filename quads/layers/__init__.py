# SPDX-License-Identifier: Apache-2.0
"""Trainer-side layers: class-swap surgery that multiplies with quantized weights and passes gradients straight through.

    names.py     which trainer modules share one engine module, and which modules are never quantized
    weights.py   quantization of the matrices of one fused group (shared with the rollout engine)
    routing.py   rows of a mixture-of-experts layer, gathered once and sorted by expert (shared with the rollout engine)
    execution.py which backend quantizes, how experts multiply, whether weights are kept
    cache.py     quantized weights kept from one optimizer step to the next
    setup.py     Precision, straight-through functions and the per-layer set-up
    linear.py, experts.py   the swapped classes; grouped.py: experts as two grouped products
    surgery.py   apply_surgery(model, precision) -> report

Differs from a wrapper-module or parametrization approach in that no parameter is added, renamed or re-registered:
optimizer, FSDP2, state dict and weight export see the stock model.
"""
