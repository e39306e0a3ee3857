#!/usr/bin/env bash
# The real stack on a GPU machine that reaches no package index: install it from carried parts, then run jobs on it.
#
#   gpu_offline.sh part ROOT FOLDER     unpack FOLDER/stack-*.tar.zst into ROOT/site (FOLDER of the first call also holds
#                                       zstandard's wheel); its byte code is compiled in the background
#   gpu_offline.sh install ROOT [TAR]   copy this checkout (or the code in TAR) to ROOT/code, register the plugin, say what
#                                       is there; data and start checkpoints in FOLDER/shared of a part are kept too
#   gpu_offline.sh run ROOT WORDS...    workflow/scripts/gpu_jobs.py ROOT WORDS... with that stack (see there)
#   gpu_offline.sh python ROOT WORDS... the machine's python with that stack
#
# The machine brings Python 3.12, torch 2.11 (CUDA 13), triton and the usual scientific packages; the parts are made by
# envs/gpu/pack.sh. Jobs run from ROOT/code and not from the checkout: an update of the checkout must not reach them.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
step=${1:?part, install, run or python} root=${2:?a folder outside the checkout}
shift 2
say() { echo "[gpu $(date +%H:%M:%S)] $*"; }

with_stack() {
    export PYTHONPATH=$root/code:$root/own:$root/site HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
    # One core per process, or the imports of a dozen runs fight for them; Ray's memory monitor sees the whole machine.
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} RAY_memory_monitor_refresh_ms=0
    export VLLM_CACHE_ROOT=$root/cache/vllm TRITON_CACHE_DIR=$root/cache/triton
    cd "$root/code"
}

unpack_parts() {
    local start=$SECONDS archive
    mkdir -p "$root/tool" "$root/site" "$root/log"
    if compgen -G "$1/zstandard-*.whl" >/dev/null; then
        python3 -m pip install -q --no-index --no-deps --no-compile --target "$root/tool" "$1"/zstandard-*.whl
    fi
    for archive in "$1"/stack-*.tar.zst; do
        PYTHONPATH=$root/tool python3 - "$archive" "$root/site" <<'PYTHON'
import sys, tarfile, zstandard
archive, site = sys.argv[1:]
# The packer's long window (2^27) is above what a reader accepts by default.
with open(archive, "rb") as file:
    reader = zstandard.ZstdDecompressor(max_window_size=2**27).stream_reader(file)
    with tarfile.open(fileobj=reader, mode="r|") as tar:
        tar.extractall(site, filter="fully_trusted")
PYTHON
    done
    if [ -d "$1/shared" ]; then mkdir -p "$root/results" && cp -r "$1/shared" "$root/results/"; fi
    # Imports are most of a run's start. A session of its own goes on while the next part travels.
    setsid nohup python3 -m compileall -q -j 0 "$root/site" >"$root/log/compile.log" 2>&1 </dev/null &
    say "$(ls "$1" | tr '\n' ' '): unpacked in $((SECONDS - start)) s, site $(du -sh "$root/site" | cut -f1)"
}

install_code() {
    local start=$SECONDS
    mkdir -p "$root/own" "$root/cache" "$root/log"
    rm -rf "$root/code" && mkdir -p "$root/code"
    if [ -n "${1:-}" ]; then
        tar -C "$root/code" -xf "$1"
    else
        tar -C "$here" --exclude=./.venv --exclude=./.git --exclude=./.carry --exclude=./results --exclude='./.*_cache' \
            -cf - . | tar -C "$root/code" -xf -
    fi
    # The plugin's entry point without pip: vLLM finds a *.dist-info folder on the path in every process.
    python3 - "$root" <<'PYTHON'
import pathlib, sys, tomllib
root = pathlib.Path(sys.argv[1])
project = tomllib.loads((root / "code/pyproject.toml").read_text())["project"]
info = root / "own" / f"{project['name']}-{project['version']}.dist-info"
info.mkdir(parents=True, exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
groups = [f"[{g}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for g, names in project["entry-points"].items()]
(info / "entry_points.txt").write_text("\n".join(groups))
PYTHON
    with_stack
    python3 - <<'PYTHON'
import importlib.metadata as metadata
import torch
assert torch.cuda.is_available(), "torch sees no GPU"
plugins = {p.name for p in metadata.entry_points(group="vllm.general_plugins")}
assert "quads" in plugins, f"vLLM would not find the plugin; it finds {sorted(plugins)}"
names = ("torch", "triton", "vllm", "verl", "transformers", "ray", "numpy", "pyarrow", "pandas", "tokenizers")
print(torch.cuda.get_device_name(), *(f"{n} {metadata.version(n)}" for n in names), sep=", ")
PYTHON
    say "code installed in $((SECONDS - start)) s"
}

case $step in
part) unpack_parts "$1" ;;
install) install_code "$@" ;;
run)
    with_stack
    exec python3 workflow/scripts/gpu_jobs.py "$root" "$@"
    ;;
python)
    with_stack
    exec python3 "$@"
    ;;
*) echo "gpu_offline.sh: unknown step $step; known: part install run python" >&2; exit 2 ;;
esac
