"""Where a result came from: hash of the code that computed it, commit, hardware, versions. No torch.

    code_hash(roots) = sha256 over (module name, AST without docstrings and comments) of the transitive closure of
                       `quads.*` imports of the root modules, [:10]

Contract: comments, docstrings, formatting, and modules that the roots do not reach never change the hash; anything
else in a reached module does, wherever the import statement stands (module level, function, TYPE_CHECKING).
`NOT_IN_HASH` lists modules outside it: the configuration (its values are in the config hash) and helpers that write or
log but compute nothing. Differs from the commit (changes with every README edit) and from file times (change with
every checkout). Python 3.12 may unparse an expression otherwise than 3.11: hashes are compared within one environment.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PACKAGE = "quads"

NOT_IN_HASH = (
    "quads.config",
    "quads.files",
    "quads.integrations.mlflow",
    "quads.lifeline",
    "quads.paths",
    "quads.provenance",
    "quads.schema",
)

# What decides a training result. A package stands for all modules below it.
TRAINING = (
    "quads.train",
    "quads.integrations.verl",
    # The plugin and the weight updates, not the engine wrapper that evaluation uses.
    "quads.integrations.vllm.register",
    "quads.integrations.vllm.reload",
    "quads.layers",
    "quads.trainer",
    "quads.rollout",
    # The grader of the task that is trained on; those of other tasks join when an experiment trains on them.
    "quads.rewards.registry",
    "quads.rewards.chain",
)


def training_roots(sets: bool) -> tuple[str, ...]:
    """Roots of a training result's code hash; training on pinned `sets` is rewarded by the graders of words too."""
    return (*TRAINING, "quads.rewards.math", "quads.rewards.code") if sets else TRAINING


def _root(source: Path | None) -> Path:
    """The folder that holds the package `quads`."""
    return source if source is not None else Path(__file__).resolve().parent.parent


def _excluded(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in NOT_IN_HASH)


def module_file(module: str, source: Path) -> Path | None:
    """File of a module below `source`, or None when no file has that name (a function, say)."""
    path = source.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _expand(root: str, source: Path) -> list[str]:
    """A module, or a package with all modules below it. Raises ValueError when there is no such module."""
    folder = source.joinpath(*root.split("."))
    if module_file(root, source) is None and not folder.is_dir():
        raise ValueError(f"code_hash: there is no module {root!r} below {source}; give a dotted name like quads.train")
    below = [p.relative_to(source).with_suffix("").parts for p in sorted(folder.rglob("*.py"))]
    names = {".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in below}
    return sorted(names | ({root} if module_file(root, source) else set()))


def _imported(tree: ast.AST, module: str, is_package: bool) -> Iterable[str]:
    """Dotted names below the package that a module's import statements may load, parents included."""
    here = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(here[: len(here) - node.level + 1] + ([node.module] if node.module else []))
            # `from a import b`: b may be a module or a name inside a; the caller drops what is not a file.
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            if parts[0] == PACKAGE:
                # importing a.b.c runs a/__init__ and a.b/__init__ too
                yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


@functools.cache
def _imports_of(text: str, file: str, module: str, is_package: bool) -> tuple[str, ...]:
    """`_imported` of a source text. Kept by text: the rules ask for thirty hashes over mostly the same modules."""
    return tuple(dict.fromkeys(_imported(ast.parse(text, file), module, is_package)))


def closure(roots: Iterable[str], source: Path | None = None) -> dict[str, Path]:
    """Module name -> file of everything in the package that the roots reach, sorted.

    Modules of NOT_IN_HASH are left out unless they are roots themselves.
    """
    top = _root(source)
    named = {name for root in roots for name in _expand(root.removesuffix(".*"), top)}
    todo = sorted(named)
    found: dict[str, Path] = {}
    while todo:
        module = todo.pop()
        file = module_file(module, top)
        if module in found or file is None or (_excluded(module) and module not in named):
            continue
        found[module] = file
        todo.extend(_imports_of(file.read_text(), str(file), module, file.name == "__init__.py"))
    return dict(sorted(found.items()))


@functools.cache
def canonical_source(text: str) -> str:
    """The program without comments, docstrings and layout: equal text means equal program."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def code_hash(*roots: str, source: Path | None = None) -> str:
    """Ten hex digits over the code that `roots` (modules or packages, dotted) reach inside the package.

    `source` is the folder that holds `quads/` (default: the installed one). Raises ValueError for an unknown root.
    """
    digest = hashlib.sha256()
    for module, file in closure(roots, source).items():
        digest.update(f"{module}\0{canonical_source(file.read_text())}\0".encode())
    return digest.hexdigest()[:10]


ARCHIVED = "COMMIT"  # `git archive` writes the commit into this file (.gitattributes); in a checkout it holds a format


def _archived() -> str:
    try:
        said = (_root(None) / ARCHIVED).read_text().strip()
    except OSError:
        return "unknown"
    # Nothing here tells whether the files were edited since.
    return "unknown" if said.startswith("$") or not said else f"{said}-archive"


@functools.cache
def commit() -> str:
    """Git commit of the source, with `-dirty` when tracked files differ; of an archive, the commit that it was made of.

    "unknown" outside both.
    """

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(_root(None)), *words], check=True, capture_output=True, text=True
        ).stdout.strip()

    if shutil.which("git") is None:
        return _archived()
    try:
        if Path(git("rev-parse", "--show-toplevel")) != _root(None):
            return _archived()  # an archive unpacked inside somebody else's repository
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except subprocess.CalledProcessError:
        return _archived()


def _first(path: str, key: str) -> str | None:
    """Value of the first `key : value` line of a /proc file."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)


def _gpus() -> list[str]:
    """`name, memory, driver` of each visible GPU, by nvidia-smi; [] without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True)
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []


def hardware() -> dict[str, Any]:
    """Machine facts that go beside a number: CPU model, usable cores, memory in GiB, GPUs, system."""
    memory_kib = (_first("/proc/meminfo", "MemTotal") or "0 kB").split()[0]
    return {
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory_kib) / 2**20, 1),
        "gpus": _gpus(),
        "system": platform.platform(),
    }


def versions(*packages: str) -> dict[str, str | None]:
    """Installed version of Python and of each distribution named; None when it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found
