"""House style that a machine can check: docstrings, sizes, no print in the library, no path of one machine."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(p for folder in ("quads", "tests", "workflow") for p in (ROOT / folder).rglob("*.py"))
LIBRARY = [p for p in MODULES if p.is_relative_to(ROOT / "quads")]
MAX_FUNCTION = 60
MAX_FILE = 420
TEXT = {".py", ".smk", ".md", ".yaml", ".yml", ".toml", ".txt", ".sh", ".rst", ""}
# Joined here, so that this file does not hold what it looks for.
FOREIGN = re.compile("|".join(rf"(?<![\w.$}}])/{name}/" for name in ("work", "home", "root", "Users")))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def calls_print(tree: ast.AST) -> list[int]:
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return [n.lineno for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"]


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_module(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), f"{name(path)} opens without a docstring"
    assert len(text.splitlines()) <= MAX_FILE, f"{name(path)} is longer than {MAX_FILE} lines: split it"
    long = {f.name: length(f) for f in functions(tree) if length(f) > MAX_FUNCTION}
    assert not long, f"{name(path)}: functions longer than {MAX_FUNCTION} lines: {long}"


@pytest.mark.parametrize("path", LIBRARY, ids=name)
def test_library_does_not_print(path: Path) -> None:
    # A module with a main guard is a command: its output is its result.
    text = path.read_text()
    if 'if __name__ == "__main__":' not in text:
        assert not calls_print(ast.parse(text)), f"{name(path)}: use logging.getLogger(__name__)"


@pytest.mark.parametrize("path", [p for p in LIBRARY if p.name != "__init__.py"], ids=name)
def test_public_names_have_docstrings(path: Path) -> None:
    body = ast.parse(path.read_text()).body
    bare = [
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert not bare, f"{name(path)}: public names without a docstring: {bare}"


def tracked_text() -> list[Path]:
    skip = {".git", ".venv", ".snakemake", "results", "__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache"}
    found = []
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if skip & set(parts) or any(part.endswith(".egg-info") for part in parts) or not path.is_file():
            continue
        if path.suffix in TEXT and "vectors" not in parts and ".hypothesis" not in parts:
            found.append(path)
    return found


def test_no_path_of_one_machine() -> None:
    found = [
        f"{name(path)}:{number}: {line.strip()[:100]}"
        for path in tracked_text()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1)
        if FOREIGN.search(line)
    ]
    assert not found, "absolute paths of one machine:\n" + "\n".join(found)


def test_the_path_check_finds_one() -> None:
    assert FOREIGN.search("see " + "/" + "home" + "/me/x")
    assert not FOREIGN.search("https://example.org" + "/" + "work" + "/x")
