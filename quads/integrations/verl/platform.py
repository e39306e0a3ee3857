"""verl platform "cpu": lets the trainer run without an accelerator.

verl ships nvidia, npu and rocm and falls back to nvidia. This registers one more through verl's own registry; it is
loaded in every process by VERL_USE_EXTERNAL_MODULES (an import error there stops the process) and selected by
VERL_PLATFORM=cpu. Differs from verl's entry-point group `verl.plugins`, which hides import errors at DEBUG level.

Two traps: current_device() must be the string "cpu", because verl calls tensor.to(get_device_id()) and an int would
mean an accelerator; and Ray resource "GPU" stays the unit of placement, so the launcher declares a logical one.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from quads.integrations.torch_gloo import accept_gloo_twice


class _CpuDevice(types.ModuleType):
    """torch.cpu, plus the names of torch.cuda that verl calls on any device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_device_name(self, *_: Any) -> str:
        return "CPU"

    def nothing(self, *_: Any, **__: Any) -> None:
        """Cache, stream and device calls have no meaning on a CPU."""

    empty_cache = ipc_collect = synchronize = set_device = reset_peak_memory_stats = nothing

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def memory_allocated(self, *_: Any) -> int:
        """Resident bytes of this process: the nearest thing to allocated device memory."""
        return psutil.Process().memory_info().rss

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total


_DEVICE = _CpuDevice("quads_cpu_device")
accept_gloo_twice()


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """See the module docstring; method meanings are those of verl's PlatformBase."""

    device_name = "cpu"
    vendor_name = "generic"
    device_module = _DEVICE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # never auto-detected: only VERL_PLATFORM=cpu selects it

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: Any) -> None:
        pass

    def synchronize(self, device_index: Any = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
