"""One gloo rank for the tests of FSDP2."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """A mesh of one rank. One group a file of tests: four descriptors of a destroyed one stay open as long as a sharded
    model or a cache of DTensor holds it.
    """
    store = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
    gc.collect()
