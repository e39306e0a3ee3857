"""Import contracts at run time: what `lint-imports` reads in the source is also true when Python imports.

Each subprocess imports one package and looks at sys.modules, which also sees imports by strings and by third parties.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENGINES = {"verl", "vllm", "mlflow", "ray"}
TORCH_FREE = (
    "quads.config",
    "quads.rewards",
    "quads.paper",
    "quads.provenance",
    "quads.files",
    "quads.lifeline",
    "quads.paths",
    "quads.schema",
    "quads.compare",
    "quads.comparison.page",
    "quads.exporting.folders",
    "quads.exporting.manifest",
    "quads.markers",
)


def loaded_by(module: str, names: set[str]) -> set[str]:
    """Which top-level packages of `names` are loaded after `import module` in a fresh interpreter."""
    code = f"import sys, {module}; print(*sorted({names!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def imported_packages(source: str) -> set[str]:
    """Top-level names of all import statements, wherever they stand."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_loaded_by_sees_an_import() -> None:
    assert loaded_by("json", {"json", "torch"}) == {"json"}


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_free(module: str) -> None:
    assert loaded_by(module, {"torch", "transformers", *ENGINES}) == set()


@pytest.mark.parametrize("module", ["quads.numerics", "quads.rollout"])
def test_numerics_needs_no_engine(module: str) -> None:
    assert loaded_by(module, ENGINES) == set()


def test_imported_packages_sees_nested_imports() -> None:
    source = "def f():\n    from vllm.config import x\nif True:\n    import ray.util as u\nfrom . import verl"
    assert imported_packages(source) == {"vllm", "ray"}


def test_only_integrations_import_engines() -> None:
    offenders = {
        str(path.relative_to(ROOT)): found
        for path in sorted((ROOT / "quads").rglob("*.py"))
        if "integrations" not in path.parts and (found := imported_packages(path.read_text()) & ENGINES)
    }
    assert not offenders, f"move the import to quads/integrations: {offenders}"
