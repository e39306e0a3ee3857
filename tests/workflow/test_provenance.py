"""Code hash: moved by meaning, not by looks; covers what the roots reach, wherever the import stands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quads import provenance
from quads.provenance import TRAINING, canonical_source, closure, code_hash, commit, hardware, versions

PROGRAM = '''
"""Module."""
import quads.b
from quads import c as other

LIMIT = 3  # three


def double(x: int) -> int:
    """Twice x."""
    return 2 * x


class Thing:
    """A thing."""

    def name(self) -> str:
        return "a # b"
'''


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """quads/{a,b,c,apart}.py and quads/deep/{__init__,e}.py: a imports b and c; b imports deep.e in a function."""
    package = tmp_path / "quads"
    (package / "deep").mkdir(parents=True)
    (package / "config").mkdir()
    for name, text in {
        "__init__.py": '"""Q."""',
        "a.py": PROGRAM,
        "b.py": "def late():\n    from .deep import e\n    return e\n",
        "c.py": "from quads.config import x\nimport json\n",
        "apart.py": "X = 1\n",
        "deep/__init__.py": "",
        "deep/e.py": "from .. import c\nY = 1\n",
        "config/__init__.py": "x = 1\n",
    }.items():
        (package / name).write_text(text)
    return tmp_path


def test_closure(source: Path) -> None:
    assert list(closure(["quads.a"], source)) == [
        "quads",
        "quads.a",
        "quads.b",
        "quads.c",
        "quads.deep",
        "quads.deep.e",
    ]
    assert list(closure(["quads.deep"], source)) == ["quads", "quads.c", "quads.deep", "quads.deep.e"]
    assert list(closure(["quads.deep.*"], source)) == list(closure(["quads.deep"], source))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# three", "# 3, as the paper says"),
        ('"""Twice x."""', '"""x times two,\n\n    in other words."""'),
        ('    """Twice x."""\n', ""),
        ('"""Module."""\n', ""),
        ("2 * x", "(2*x)"),
        ("LIMIT = 3", "LIMIT   =   3\n\n"),
        ('"a # b"', "'a # b'"),
    ],
)
def test_cosmetic_edits_keep_the_hash(source: Path, old: str, new: str) -> None:
    before = code_hash("quads.a", source=source)
    path = source / "quads/a.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert code_hash("quads.a", source=source) == before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("a.py", "2 * x", "x * 2"),
        ("a.py", "LIMIT = 3", "LIMIT = 4"),
        ("a.py", '"a # b"', '"a # c"'),
        ("a.py", "-> int", "-> float"),
        ("c.py", "import json", "import jsonschema"),
        ("deep/e.py", "Y = 1", "Y = 2"),
        ("deep/__init__.py", "", "Z = 0"),
    ],
)
def test_edits_with_meaning_change_the_hash(source: Path, file: str, old: str, new: str) -> None:
    before = code_hash("quads.a", source=source)
    path = source / "quads" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    assert code_hash("quads.a", source=source) != before


@pytest.mark.parametrize("file", ["apart.py", "config/__init__.py"])
def test_unreached_and_excluded_modules_do_not_count(source: Path, file: str) -> None:
    before = code_hash("quads.a", source=source)
    (source / "quads" / file).write_text("x = 2\n")
    assert code_hash("quads.a", source=source) == before


def test_an_excluded_module_counts_as_a_root(source: Path) -> None:
    assert "quads.config" in closure(["quads.config"], source)


def test_a_renamed_module_changes_the_hash(source: Path) -> None:
    before = code_hash("quads.deep", source=source)
    (source / "quads/deep/e.py").rename(source / "quads/deep/f.py")
    assert code_hash("quads.deep", source=source) != before


def test_unknown_root(source: Path) -> None:
    with pytest.raises(ValueError, match=r"no module 'quads\.trian'"):
        code_hash("quads.trian", source=source)


def test_docstring_only_body_stays_valid() -> None:
    assert canonical_source('def f():\n    """Only words."""\n') == canonical_source("def f():\n    pass\n")


def test_a_string_that_is_no_docstring_counts() -> None:
    assert canonical_source('x = 1\n"""a"""\n') != canonical_source('x = 1\n"""b"""\n')


def test_training_reaches_numerics_and_not_the_paper() -> None:
    reached = set(closure(TRAINING))
    assert {"quads.train", "quads.numerics.qdq", "quads.layers.surgery", "quads.rewards"} <= reached
    assert not {m for m in reached if m.startswith(("quads.config", "quads.paper", "quads.evaluate"))}
    assert not set(provenance.NOT_IN_HASH) & reached


def test_a_new_study_does_not_move_training() -> None:
    """Of the diagnostics only what a training run calls is in its hash; the package's own file holds no code."""
    reached = {m: f for m, f in closure(TRAINING).items() if m.startswith("quads.diagnostics")}
    called = {"diagnostics", "collapse", "decompose", "during", "during_layers"}
    assert {m.rpartition(".")[2] for m in reached} == called
    assert canonical_source(reached["quads.diagnostics"].read_text()).strip() in ("", "pass")


def test_hash_is_the_same_in_another_process() -> None:
    code = "import sys; from quads.provenance import *; print(code_hash(*TRAINING)); assert 'torch' not in sys.modules"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == code_hash(*TRAINING)


def test_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = commit()
    assert found == "unknown" or len(found.removesuffix("-dirty")) == 40
    commit.cache_clear()
    monkeypatch.setattr(provenance, "_root", lambda source: tmp_path)
    assert commit() == "unknown"
    commit.cache_clear()


def test_versions_and_hardware() -> None:
    assert versions("pytest", "no-such-package") == {
        "python": ".".join(map(str, sys.version_info[:3])),
        "pytest": pytest.__version__,
        "no-such-package": None,
    }
    machine = hardware()
    assert machine["cores"] >= 1 and machine["memory_gib"] > 0.1 and isinstance(machine["gpus"], list)
