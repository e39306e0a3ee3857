# SPDX-License-Identifier: Apache-2.0
"""Entry point of the vLLM plugin; runs in every vLLM process (front end, engine core, workers) and may run twice.

vLLM logs and continues when a plugin fails to load: the receipt (receipt.py) is the proof that this one did.
"""


def register() -> None:
    """Register quantization method "quads" and install the version-bound patches; idempotent."""
    from quads.integrations.vllm import compat, quantization

    quantization.register_method()
    compat.install()
