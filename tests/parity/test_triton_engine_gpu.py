"""The whole of test_triton_engine.py on a CUDA GPU: real Triton code, and CUDA graphs in place of torch.compile."""

import pytest
from test_triton_engine import *  # noqa: F403  collected here too, with this module's mark

pytestmark = pytest.mark.gpu
