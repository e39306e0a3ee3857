"""Stage: what this machine offers to QUADS, line by line, and what is missing.

    python -m quads.doctor [--for laptop|gpu|cluster] [--json FILE]

    ok        there, and it works (tried where that is cheap: sandbox, tracking store, plugin)
    absent    not there, and not needed for what was asked
    MISSING   needed for what was asked; the line says what to do

Contract: exit code 1 exactly if a line is MISSING; every reason is the one that the stage itself would stop with. The
NVFP4 line says native, emulated or unsupported for the card that is there; emulation never yields a speed claim.
Differs from `pip list` in that versions are compared with the pins of the environment and parts are tried.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from quads.config import ConfigError, Tracking
from quads.config.site import SITE, load_site
from quads.files import write_json_atomic

Status = Literal["ok", "absent", "MISSING"]
PURPOSES = ("laptop", "gpu", "cluster")
MEMORY_GIB, DISK_GIB = 10, 2  # what `make toy` takes once the environment is there
MEMORY = Path("/proc/meminfo")
ENVS = Path(__file__).resolve().parent.parent / "envs"
PINS = {"laptop": ENVS / "cpu.txt", "gpu": ENVS / "gpu" / "requirements.txt"}
STACK = ("torch", "vllm", "verl", "transformers", "tensordict", "ray", "triton", "mlflow", "snakemake")


@dataclass(frozen=True)
class Line:
    """One finding. `detail` says what was found, or what to do."""

    what: str
    status: Status
    detail: str


def needed(what: str, reason: str | None, found: str, required: bool) -> Line:
    """`reason` None: there, described by `found`; otherwise why it is not."""
    if reason is None:
        return Line(what, "ok", found)
    return Line(what, "MISSING" if required else "absent", reason)


def pins(path: Path) -> dict[str, str]:
    """Package -> pinned version of a requirements file, local version parts dropped."""
    text = path.read_text() if path.is_file() else ""
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s+;]+)", text, flags=re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in found}


def packages(purpose: str) -> list[Line]:
    """Installed versions of the stack against the pins."""
    wanted, lines = pins(PINS["laptop" if purpose == "laptop" else "gpu"]), []
    for name in STACK:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            lines.append(Line(name, "MISSING", f"not installed in {sys.prefix}; `make env` installs the pinned list"))
            continue
        if purpose != "laptop" and version.endswith("+cpu"):
            lines.append(
                Line(name, "MISSING", f"{version} is a CPU build; make env GPU=1, then .venv-gpu/bin/activate")
            )
            continue
        pin = wanted.get(name)
        note = "" if pin is None or version.partition("+")[0] == pin else f" (pinned: {pin}; nobody ran this pair here)"
        lines.append(Line(name, "ok", version + note))
    return lines


def gpu(purpose: str) -> list[Line]:
    """The card and what NVFP4 means on it."""
    try:
        import torch
    except ImportError as error:
        return [Line("GPU", "MISSING", f"torch cannot be imported: {error}")]
    required = purpose != "laptop"
    if not torch.cuda.is_available():
        reason = "no CUDA device is visible (nvidia-smi, CUDA_VISIBLE_DEVICES)"
        return [
            needed("GPU", reason, "", required),
            Line("NVFP4", "ok", "emulated exactly in torch on the CPU; no speed claim"),
        ]
    from quads.kernels.backend import unavailable

    major, minor = torch.cuda.get_device_capability()
    name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
    triton, native, cutlass = (unavailable(name) for name in ("triton", "native", "cutlass"))
    lines = [Line("GPU", "ok", f"{count} x {name}, compute capability {major}.{minor}, CUDA {torch.version.cuda}")]
    lines.append(needed("backend triton", triton, "emulated exactly, Triton kernels", required=False))
    said = "FP4 tensor cores; nobody has run it yet (docs/kernels.md)"
    lines.append(needed("backend native", native, f"Triton's product, {said}", required=False))
    lines.append(needed("backend cutlass", cutlass, f"vLLM's ops, if its build has them; {said}", required=False))
    fp4 = native is None or cutlass is None
    kind = "native" if fp4 else "emulated (triton, reference)" if triton is None else "emulated (reference)"
    lines.append(Line("NVFP4", "ok", f"{kind}" + ("" if fp4 else "; no speed claim")))
    return lines


def plugin() -> Line:
    """The vLLM plugin, through the entry point that vLLM itself uses."""
    found = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "quads"]
    if not found:
        return Line(
            "vLLM plugin", "MISSING", "no entry point `quads`; install this project: pip install --no-deps -e ."
        )
    try:
        found[0].load()()
    except Exception as error:  # whatever it raises, vLLM would log it and go on without the plugin
        return Line("vLLM plugin", "MISSING", f"does not load: {type(error).__name__}: {error}")
    return Line("vLLM plugin", "ok", f"{found[0].value} loads")


def sandbox() -> Line:
    """The isolation that generated programs would be graded in, tried."""
    from quads.rewards.code import open_sandbox
    from quads.rewards.code.probe import SandboxUnavailableError

    try:
        return Line("code sandbox", "ok", open_sandbox().level)
    except SandboxUnavailableError as error:
        return Line("code sandbox", "MISSING", str(error))


def tracking() -> Line:
    """A tracking store of the default kind, in a temporary folder: nothing is left behind."""
    from quads.integrations import mlflow

    with tempfile.TemporaryDirectory() as folder:
        trial = Tracking(uri=f"sqlite:///{folder}/trial.db", artifacts=f"{folder}/artifacts")
        try:
            mlflow.initialise(trial)
        except mlflow.TrackingError as error:
            return Line("MLflow store", "MISSING", str(error))
    return Line("MLflow store", "ok", f"a new SQLite store works; experiments use {Tracking().uri}")


def slurm(purpose: str) -> list[Line]:
    """Slurm's clients, the profile's link and the site file."""
    required = purpose == "cluster"
    absent = [name for name in ("sbatch", "squeue", "scontrol", "srun") if shutil.which(name) is None]
    reason, found = (f"not on PATH: {', '.join(absent)}" if absent else None), ""
    if not absent:
        done = subprocess.run(["sinfo", "-h", "-o", "%P"], capture_output=True, text=True, timeout=30, check=False)
        if done.returncode:
            reason = f"no controller answers ({done.stderr.strip().partition(chr(10))[0] or done.returncode})"
        found = "partitions " + ", ".join(done.stdout.split())
    lines = [needed("Slurm", reason, found, required)]
    if required:
        link = Path("slurm/profile.yaml").is_file()
        lines.append(
            needed("--profile slurm", None if link else "no ./slurm: start in the repository", "./slurm", True)
        )
        try:
            site = load_site()
            named = ", ".join(f"{k} {v}" for k, v in site.model_dump().items() if v) or "cluster's defaults"
            lines.append(Line("site", "ok", f"{SITE}: {named}" if SITE.is_file() else f"no {SITE}: {named}"))
        except ConfigError as error:
            lines.append(Line("site", "MISSING", str(error)))
    return lines


def machine() -> Line:
    """Memory and disk, in GiB."""
    words = dict(re.findall(r"^(\w+):\s+(\d+) kB", MEMORY.read_text(), flags=re.MULTILINE))
    memory, disk = int(words["MemAvailable"]) / 2**20, shutil.disk_usage(".").free / 2**30
    detail = f"Python {platform.python_version()}, {memory:.0f} GiB of memory free, {disk:.0f} GiB of disk free"
    enough = memory >= MEMORY_GIB and disk >= DISK_GIB
    return needed("machine", None if enough else f"{detail}; {MEMORY_GIB} and {DISK_GIB} are needed", detail, True)


def examine(purpose: str) -> list[Line]:
    """Every line. A check that itself fails is a MISSING line, never a traceback."""
    checks: list[Callable[[], Line | list[Line]]] = [
        *(machine, lambda: packages(purpose), lambda: gpu(purpose), plugin, sandbox, tracking, lambda: slurm(purpose)),
    ]
    lines: list[Line] = []
    for name, check in zip(("machine", "packages", "GPU", "plugin", "sandbox", "MLflow", "Slurm"), checks, strict=True):
        try:
            found = check()
        except Exception as error:  # a doctor that dies tells nothing about the rest
            found = Line(name, "MISSING", f"the check failed: {type(error).__name__}: {error}")
        lines += found if isinstance(found, list) else [found]
    return lines


def main(argv: list[str] | None = None) -> int:
    """Print the lines; 1 if one is MISSING."""
    parser = argparse.ArgumentParser(prog="python -m quads.doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--for", dest="purpose", choices=PURPOSES, default="laptop", help="what is asked (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the lines here too")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR)
    lines = examine(args.purpose)
    for line in lines:
        sys.stdout.write(f"{line.status:8s}{line.what:16s}{line.detail}\n")
    if args.json is not None:
        write_json_atomic(args.json, {"for": args.purpose, "lines": [asdict(line) for line in lines]})
    missing = [line.what for line in lines if line.status == "MISSING"]
    sys.stdout.write(f"\n{'not ready' if missing else 'ready'} for {args.purpose}")
    sys.stdout.write(f": {', '.join(missing)}\n" if missing else "\n")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
