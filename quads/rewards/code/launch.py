"""The command line that starts the runner at each level of isolation, strongest first.

    bwrap        bubblewrap: own user/pid/network/ipc/uts/mount namespaces, a file system of only the interpreter and
                 system libraries (read-only), private /proc /dev /tmp, no capabilities, seccomp filter
    namespaces   `unshare` of util-linux: own network, pid, ipc and uts namespaces, but the machine's files are
                 readable, and writable where the user may write
    rlimits      resource limits and another working folder only: network, files and processes of the user are open

Every level starts with an empty environment: bwrap is process 1 inside, so what it inherits can be read there in
/proc/1/environ even with --clearenv. Its arguments come through a descriptor, or /proc/1/cmdline would list host paths.
Root is special. The kernel does not apply RLIMIT_NPROC to root, not even inside a user namespace, so as root bwrap
keeps CAP_SETUID and the runner becomes an unprivileged user (its own one for each parallel slot, because the limit
counts per user) before the program starts; the weaker levels start as that user.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from quads.rewards.code.limits import Limits

Level = Literal["bwrap", "namespaces", "rlimits"]
LEVELS: tuple[Level, ...] = ("bwrap", "namespaces", "rlimits")
PACKAGES_INSIDE = "/packages"
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LC_ALL": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONIOENCODING": "utf-8",
    "PYTHONINTMAXSTRDIGITS": "50000",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_SLOTS = itertools.count()
_SLOT_LOCK = threading.Lock()


@dataclass(frozen=True)
class Python:
    """The interpreter that runs programs, and the folders it needs: itself, nothing of this project's environment."""

    executable: Path
    prefix: Path
    packages: tuple[Path, ...]

    @classmethod
    def of_this_process(cls, packages: Sequence[str]) -> Python:
        """The base interpreter below a virtual environment, plus single packages of the environment, where present."""
        found: list[Path] = []
        for name in packages:
            spec = importlib.util.find_spec(name)
            for place in (spec.submodule_search_locations or []) if spec else []:
                path = Path(place).resolve()
                # Wheels keep their shared libraries in a sibling folder.
                found += [p for p in (path, path.with_name(f"{name}.libs")) if p.is_dir()]
        executable = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
        return cls(executable, Path(sys.base_prefix).resolve(), tuple(found))


def unprivileged_uid() -> int | None:
    """A user id for one slot if this process is root, None otherwise. Different for parallel slots and processes."""
    if os.geteuid() != 0:
        return None
    with _SLOT_LOCK:
        slot = next(_SLOTS) % 64
    number = (os.getpid() * 64 + slot) % 30_000
    # Above systemd's ranges where ids are not mapped (real root), within 16 bits in a container.
    return (0x7000_0000 if _mapped_ids() > 0x7FFF_FFFF else 30_000) + number


@cache
def _mapped_ids() -> int:
    try:
        return sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    except OSError:
        return 0


def bwrap() -> str:
    """Path of bubblewrap. Raises FileNotFoundError."""
    executable = shutil.which("bwrap")
    if executable is None:
        raise FileNotFoundError("bwrap is not on PATH")
    return executable


@cache
def bwrap_options(executable: str) -> frozenset[str]:
    """Optional flags that this bubblewrap knows (old ones lack some)."""
    text = subprocess.run([executable, "--help"], capture_output=True, text=True, timeout=60, check=False)
    return frozenset(word for word in (text.stdout + text.stderr).split() if word.startswith("--"))


def bwrap_arguments(python: Python, limits: Limits, uid: int | None, seccomp: int | None) -> list[str]:
    """Arguments of bwrap before the command. `uid` is set if root starts it. Raises FileNotFoundError without bwrap."""
    known = bwrap_options(bwrap())
    spaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if uid is None:
        spaces += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
        spaces += ["--disable-userns"] if "--disable-userns" in known else []
    arguments = [*spaces, "--hostname", "sandbox", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    if uid is not None:
        arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    arguments += _file_system(python)
    size = ["--size", str(limits.scratch_mb << 20)] if "--size" in known else []
    arguments += ["--proc", "/proc", "--dev", "/dev", *size, "--tmpfs", "/dev/shm", *size, "--tmpfs", "/tmp"]
    # The root and /dev are file systems in memory too, without a limit of their own.
    arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
    for name, value in {**ENVIRONMENT, "HOME": "/tmp", "TMPDIR": "/tmp"}.items():
        arguments += ["--setenv", name, value]
    if seccomp is not None:
        arguments += ["--seccomp", str(seccomp)]
    return arguments


def _file_system(python: Python) -> list[str]:
    """Read-only mounts of the interpreter, system libraries and single packages."""
    links: list[str] = []
    mounts = [(Path("/etc/ld.so.cache"), "/etc/ld.so.cache")]
    for name in ("lib", "lib32", "lib64", "libx32"):
        path, below_usr = Path("/") / name, Path("/usr") / name
        if path.is_symlink():
            links += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            mounts.append((path, str(path)))
        if below_usr.is_dir():
            mounts.append((below_usr, str(below_usr)))
    own = [python.executable, python.prefix]
    if str(python.prefix) in ("/usr", "/usr/local"):
        own = [python.executable, python.prefix / "lib", python.prefix / "lib64"]
    if python.executable.is_relative_to(python.prefix) and python.prefix in own:
        own.remove(python.executable)
    known = [Path(inside) for _, inside in mounts]
    mounts += [(p, str(p)) for p in own if p.exists() and not any(p.is_relative_to(k) for k in known)]
    mounts += [(p, f"{PACKAGES_INSIDE}/{p.name}") for p in python.packages]
    # Folders explicitly, because bwrap creates missing parents with mode 0700, which shuts an unprivileged user out.
    parents = {str(parent): None for _, inside in mounts for parent in reversed(Path(inside).parents[:-1])}
    arguments = [word for parent in parents for word in ("--dir", parent)]
    arguments += [word for source, inside in mounts for word in ("--ro-bind-try", str(source), inside)]
    return arguments + links


def weak_command(level: Level, python: Python) -> list[str]:
    """Command prefix of the two weaker levels. Raises FileNotFoundError naming the missing tool."""
    if level == "rlimits":
        return [str(python.executable)]
    tools = {name: shutil.which(name) for name in ("unshare", "setpriv")}
    missing = [name for name, path in tools.items() if path is None]
    if missing:
        raise FileNotFoundError(f"{' and '.join(missing)} (package util-linux) not on PATH")
    spaces = "--user --map-root-user --net --pid --ipc --uts --mount --fork --kill-child --mount-proc".split()
    no_rights = "--no-new-privs --bounding-set=-all --inh-caps=-all".split()
    return [str(tools["unshare"]), *spaces, "--", str(tools["setpriv"]), *no_rights, "--", str(python.executable)]


def reachable_by_others(path: Path) -> bool:
    """Whether an unprivileged user can execute `path` (weaker levels under root)."""
    return all(os.stat(p).st_mode & 0o001 for p in [path, *path.parents])
