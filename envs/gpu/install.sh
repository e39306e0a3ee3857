#!/usr/bin/env bash
# Makes the GPU environment: Python 3.12, torch 2.11 (CUDA 13), verl 0.9.1, vLLM 0.26, Snakemake and MLflow.
#
#   envs/gpu/install.sh                      into .venv-gpu in the repository root (make env GPU=1 does the same)
#   VENV=/somewhere PYTHON=/path/python3.12 envs/gpu/install.sh
#
# Needs Linux x86-64, an NVIDIA driver for CUDA 13 (580 or newer) where it runs, 12 GiB of disk. Installed with --no-deps from a
# complete list, because verl, vLLM and MLflow state ranges that exclude each other (envs/README.md). A second call does
# nothing when nothing changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv=${VENV:-.venv-gpu} python=${PYTHON:-python3.12}
key="$(sha256sum envs/gpu/requirements.txt envs/gpu/install.sh pyproject.toml | sha256sum | cut -c1-16) $PWD"
[ "$(cat "$venv/.quads" 2>/dev/null)" = "$key" ] && exit 0
[ "$("$python" -c 'import ensurepip, sys, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "3.12" ] || {
    echo "envs/gpu/install.sh: PYTHON=$python is no Python 3.12 with the modules venv and ensurepip; name one" >&2
    exit 1
}
echo "[install] GPU environment in $venv: 8 GB, 5 to 20 minutes"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install --quiet torch==2.11.0
pip install --quiet --no-deps --requirement envs/gpu/requirements.txt
pip install --quiet --no-deps --no-build-isolation --editable .
"$venv/bin/python" - <<'PYTHON'
import importlib.metadata as metadata
import quads, torch, transformers, verl, vllm
plugins = {p.name for p in metadata.entry_points(group="vllm.general_plugins")}
assert "quads" in plugins, f"vLLM would not find the plugin 'quads'; it finds {sorted(plugins)}"
print("[install]", *(f"{n} {metadata.version(n)}" for n in ("torch", "verl", "vllm", "transformers")))
print("[install] GPUs:", torch.cuda.device_count() or "none visible here")
PYTHON
echo "$key" >"$venv/.quads"
