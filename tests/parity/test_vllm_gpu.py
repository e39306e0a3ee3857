"""The whole of test_vllm.py on a CUDA GPU: `pytest -m gpu tests/parity`, with vLLM's GPU build.

The same tests under another mark: engines and trainer models then live on the GPU (parity_device.py). Differs from the
CPU run in the kernels only: Triton attention, cuBLAS products, the GPU sampler.
"""

import pytest
from test_vllm import *  # noqa: F403  collected here too, with this module's mark

pytestmark = pytest.mark.gpu
