# SPDX-License-Identifier: Apache-2.0
"""Host side of the kernels, and the contract of the package: a test and a definition for every kernel."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import DEVICE

import quads.kernels
from quads.kernels import host

FOLDER = Path(quads.kernels.__file__).parent
MODULES = sorted(p.stem for p in FOLDER.glob("*.py") if p.stem != "__init__")
# One op, one name: these modules hold the fast twins of functions defined in quads.numerics.
TWINS = {
    "weight": ("quads.numerics.qdq", "quads.numerics.packed"),
    "activation": ("quads.numerics.qdq", "quads.numerics.packed"),
    "rac_quantize": ("quads.numerics.packed",),
}
HELPERS = {"activation": {"given_scale", "quantize_rows_at"}}


@pytest.mark.parametrize("module", MODULES)
def test_every_kernel_module_has_a_test(module: str) -> None:
    assert (Path(__file__).parent / f"test_{module}.py").is_file()


def public_functions(module: str) -> list[str]:
    """Public plain functions (not device functions, which carry a decorator named jit) of a kernel module."""
    tree = ast.parse((FOLDER / f"{module}.py").read_text())
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
    return [f.name for f in functions if not any("jit" in ast.unparse(d) for d in f.decorator_list)]


@pytest.mark.parametrize("module", TWINS)
def test_same_name_and_parameters_as_the_definition(module: str) -> None:
    kernels = importlib.import_module(f"quads.kernels.{module}")
    homes = [importlib.import_module(name) for name in TWINS[module]]
    names = [n for n in public_functions(module) if n not in HELPERS.get(module, set())]
    assert names
    for name in names:
        definitions = [getattr(home, name) for home in homes if hasattr(home, name)]
        assert definitions, f"{module}.{name} has no definition in {TWINS[module]}"
        assert inspect.signature(getattr(kernels, name)) == inspect.signature(definitions[0]), f"{module}.{name}"


def test_package_imports_without_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import quads.kernels"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_kernels_import_no_engine() -> None:
    code = "import sys, quads.kernels.rac_quantize, quads.kernels.weight; print({'verl', 'vllm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_prepared_refuses() -> None:
    with pytest.raises(ValueError, match=r"dtype torch\.int32"):
        host.prepared(torch.zeros(2, 16, dtype=torch.int32, device=DEVICE), "here")
    with pytest.raises(ValueError, match="positive multiple of 16"):
        host.prepared(torch.zeros(2, 17, device=DEVICE), "here")
    with pytest.raises(ValueError, match="got format 'fp8'"):
        host.require_nvfp4("fp8", "here")


def test_a_cpu_tensor_is_refused_outside_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "INTERPRETED", False)
    with pytest.raises(ValueError, match="need a CUDA tensor"):
        host.prepared(torch.zeros(2, 16), "here")


def test_prepared_copies_only_what_it_must() -> None:
    x = torch.zeros(4, 33, dtype=torch.bfloat16, device=DEVICE)
    assert host.prepared(x[:, :32], "here").is_contiguous()
    odd = torch.zeros(65, dtype=torch.bfloat16, device=DEVICE)[1:].view(2, 32)
    assert odd.data_ptr() % 16 and host.prepared(odd, "here").data_ptr() % 16 == 0
    good = torch.zeros(2, 32, dtype=torch.bfloat16, device=DEVICE)
    assert host.prepared(good, "here").data_ptr() == good.data_ptr()


def test_matrices() -> None:
    assert host.matrices(torch.zeros(3, 2, 5, 32), "x") == (6, 5, 2)
    assert host.matrices(torch.zeros(32), "x") == (1, 1, 2)
    with pytest.raises(ValueError, match="split it"):
        host.matrices(torch.zeros(1, 1, 16).expand(70000, 1, 16), "x")


def test_power_of_two() -> None:
    assert [host.power_of_two(n) for n in (1, 2, 3, 4, 5, 127, 128, 129)] == [1, 2, 4, 4, 8, 128, 128, 256]
