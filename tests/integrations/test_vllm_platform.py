"""The plugin on a GPU never imports vLLM's CPU worker, whose import replaces CUDA's events and copies by stand-ins."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.stack

SCRIPT = """
import sys
from vllm.platforms import current_platform

cpu = sys.argv[1] == "cpu"
type(current_platform).is_cpu = lambda self: cpu
import torch

before = torch.cuda.Event
from quads.integrations.vllm.compat import mark_warm_up
from quads.integrations.vllm.preflight import check_cuda

mark_warm_up()
assert ("vllm.v1.worker.cpu_worker" in sys.modules) == cpu
assert (torch.cuda.Event is before) == (not cpu)
check_cuda("cpu")
if cpu:
    try:
        check_cuda("cuda")
    except RuntimeError as error:
        assert "nothing would wait for the GPU" in str(error), error
    else:
        raise SystemExit("check_cuda saw nothing")
else:
    check_cuda("cuda")
"""


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_cpu_worker_is_imported_on_the_cpu_platform_only(platform):
    child = subprocess.run([sys.executable, "-c", SCRIPT, platform], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-3000:]
