"""Which level of isolation this machine really gives: measured by a program that tries to get out.

    open_sandbox()              the strongest level, bwrap, or SandboxUnavailableError saying what to install
    open_sandbox("namespaces")  accepts that level or a stronger one; "rlimits" accepts anything that limits resources

A level is accepted only if the attempts that it promises to stop did fail: reading a file of this machine, writing
beside it, connecting to a listener of this process, seeing its environment or processes, more processes or memory than
allowed, a new user namespace, and being root. Differs from looking for a binary on PATH: bubblewrap may be installed
where the kernel forbids user namespaces. The report is kept in `Sandbox.report`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quads.rewards.code import clock, launch
from quads.rewards.code.limits import Limits
from quads.rewards.code.sandbox import Job, Outcome, Sandbox

log = logging.getLogger(__name__)
LIMITS = Limits(seconds=10, memory_mb=512, processes=24)
PACKAGES = ("numpy",)
INSTALL = (
    "install bubblewrap (Debian, Ubuntu: apt-get install -y bubblewrap; Fedora, RHEL: dnf install bubblewrap; "
    "conda: conda install -c conda-forge bubblewrap) and check that the kernel allows user namespaces "
    "(sysctl user.max_user_namespaces kernel.unprivileged_userns_clone kernel.apparmor_restrict_unprivileged_userns). "
    "On a machine that cannot have it, accept a weaker level by name: open_sandbox('namespaces') or "
    "QUADS_WEAK_SANDBOX=namespaces (or rlimits); its name is then part of every result."
)

ATTEMPTS = """
import ctypes, glob, json, os, socket, sys
def tried(action):
    try:
        return action()
    except (OSError, MemoryError):
        return False
def connect():
    socket.create_connection(("127.0.0.1", {port}), 2).close()
    return True
def fork():
    children = 0
    try:
        for _ in range({forks}):
            child = os.fork()
            if child == 0:
                os.read(hold, 1)
                os._exit(0)
            children += 1
    except OSError:
        pass
    return children
hold, release = os.pipe()
def status(name):
    return next((line.split()[1] for line in open("/proc/self/status") if line.startswith(name + ":")), "")
names = set(os.environ)
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        names |= {{v.split("=")[0] for v in open(path, errors="replace").read().split("\\0") if v}}
    except OSError:
        pass
report = {{
    "read": tried(lambda: open({canary!r}).read() == {secret!r}),
    "wrote": tried(lambda: open({canary!r} + ".written", "w").write("x") > 0),
    "network": tried(connect),
    "environment": sorted(names),
    "processes_seen": len(glob.glob("/proc/[0-9]*")),
    "real_root": os.getuid() == 0 and {root},
    "capabilities": status("CapEff"),
    "no_new_privileges": status("NoNewPrivs"),
    "seccomp": status("Seccomp"),
    "memory": tried(lambda: len(bytearray({memory})) > 0),
    "new_user_namespace": ctypes.CDLL(None).unshare(0x10000000) == 0,
    "forks": fork(),
    "python": sys.version,
}}
# Ends the children, which hold the read end of this pipe.
os.write(release, b"x" * report["forks"])
print(json.dumps(report))
"""


class SandboxUnavailableError(RuntimeError):
    """No level that was asked for works here; the message lists what was tried and what to install."""


def open_sandbox(
    weakest: launch.Level = "bwrap", packages: Sequence[str] = PACKAGES, python: launch.Python | None = None
) -> Sandbox:
    """The strongest working level not weaker than `weakest`. Raises SandboxUnavailableError, ValueError.

    `packages` of this environment are importable inside, where installed; `python` replaces the base interpreter of
    this process (then `packages` is not looked at).
    """
    if weakest not in launch.LEVELS:
        raise ValueError(f"level {weakest!r}: expected one of {', '.join(launch.LEVELS)}")
    python = python or launch.Python.of_this_process(packages)
    failures: list[str] = []
    for level in launch.LEVELS[: launch.LEVELS.index(weakest) + 1]:
        box = Sandbox(level, python)
        problems = check(box)
        if not problems:
            if level != "bwrap":
                log.warning("programs run at the weak level %r (%s)", level, "; ".join(failures))
            return box
        failures.append(f"{level}: {'; '.join(problems)}")
    raise SandboxUnavailableError(f"no sandbox to run programs in. Tried {' | '.join(failures)}. What to do: {INSTALL}")


def check(box: Sandbox) -> list[str]:
    """Run the attempts in `box` and list the promises of its level that do not hold (and keep the report)."""
    if box.level != "bwrap" and os.geteuid() == 0 and not launch.reachable_by_others(box.python.executable):
        return [f"as root, programs run as another user here, who cannot reach {box.python.executable}"]
    with tempfile.TemporaryDirectory(prefix="quads-canary-") as name, socket.socket() as listener:
        os.chmod(name, 0o777)
        canary, secret = Path(name) / "canary", secrets.token_hex(16)
        canary.write_text(secret)
        canary.chmod(0o644)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        program = ATTEMPTS.format(
            port=listener.getsockname()[1],
            forks=LIMITS.processes + 16,
            canary=str(canary),
            secret=secret,
            root=os.geteuid() == 0,
            memory=LIMITS.memory_mb << 20,
        )
        outcome = box.run(Job("stdin", program, ("",)), LIMITS)
        written = canary.with_name("canary.written").exists()
    report = _report(outcome)
    if report is None:
        return [f"the probe did not run: {outcome.kind} {outcome.detail} {outcome.stderr[-300:]}".strip()]
    box.report = {**report, "level": box.level, "written_outside": written}
    return _broken_promises(box)


def _report(outcome: Outcome) -> dict[str, Any] | None:
    with contextlib.suppress(ValueError):
        if outcome.kind == "ok":
            found = json.loads(outcome.output)
            return found if isinstance(found, dict) else None
    return None


def _broken_promises(box: Sandbox) -> list[str]:
    report = box.report
    foreign = set(report["environment"]) - {*launch.ENVIRONMENT, "HOME", "TMPDIR", "PWD", "LC_CTYPE", clock.MARK}
    promises = {
        "rlimits": {
            "limits memory": not report["memory"],
            "limits processes": 0 < report["forks"] <= LIMITS.processes,
            "does not run as root": not report["real_root"] or box.level == "namespaces",
        },
        "namespaces": {
            "has no network": not report["network"],
            "hides other processes": report["processes_seen"] <= 4,
            "hides the environment": not foreign,
            "has no capabilities": int(report["capabilities"], 16) == 0,
        },
        "bwrap": {
            "hides files": not report["read"],
            "cannot write outside": not report["wrote"] and not report["written_outside"],
            "refuses new user namespaces": not report["new_user_namespace"],
        },
    }
    levels = launch.LEVELS[launch.LEVELS.index(box.level) :]
    return [f"promise broken: {text}" for level in levels for text, kept in promises[level].items() if not kept]
