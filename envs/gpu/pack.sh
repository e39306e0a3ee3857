#!/usr/bin/env bash
# Packs envs/gpu/stack.txt for a GPU machine that reaches no package index (unpacked by workflow/scripts/gpu_offline.sh).
#
#   envs/gpu/pack.sh OUT                  -> OUT/s0 ... OUT/s3, each below 58 MB, so that each can travel alone
#   PYTHON=/path/python3.12 envs/gpu/pack.sh OUT
#
# That machine has Python 3.12, torch 2.11.0 (CUDA 13), triton 3.6.0 and the usual scientific packages; the list holds
# everything else that verl 0.9.1 and vllm 0.26.0 import in a run on one GPU. Left out: the Rust front end, the
# FlashAttention 2 binary, extensions for other Python versions, C++ headers, Java and web parts of Ray. Symbols are
# stripped. Parts are archives of their own, so that one unpacks while the next travels. 8 minutes on 2 cores.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:?a folder for the parts}
python=${PYTHON:-python3.12}
[ "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = "3.12" ] || {
    echo "pack.sh: PYTHON=$python is no Python 3.12, which the GPU machine runs" >&2
    exit 1
}
mkdir -p "$out"/s0 "$out"/s1 "$out"/s2 "$out"/s3
out=$(cd "$out" && pwd)
site=$out/site
rm -rf "$site"
"$python" -m pip install --quiet --no-deps --no-compile --target "$site" --requirement "$here/stack.txt"
"$python" -m pip download --quiet --no-deps --dest "$out/s0" zstandard==0.25.0
cd "$site"
rm -rf vllm/vllm-rs vllm/_rust_tool_parser* vllm/vllm_flash_attn/_vllm_fa2_C* vllm/third_party/fmha_sm100/cutlass \
    vllm/third_party/deep_gemm/include vllm/third_party/deep_gemm/_C.cpython-31[0134]* pycountry/locales \
    flashinfer/data/cutlass ray/dashboard/client ray/rllib ray/jars ray/cpp
find . -name '*.so*' -size +1M -exec strip --strip-unneeded {} + 2>/dev/null || true

pack() { # NAME FOLDER, names on stdin
    tar -cf - --exclude-from="$out/packed" --files-from=- | zstd -T0 -15 --long=27 -q -f -o "$out/$2/stack-$1.tar.zst"
    ls -l "$out/$2/stack-$1.tar.zst"
}
moved="transformers flashinfer tokenizers datasets cryptography hf_xet fastsafetensors"
: >"$out/packed"
printf '%s\n' vllm/_C_stable_libtorch.abi3.so | pack core s1
printf '%s\n' vllm/_moe_C_stable_libtorch.abi3.so vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so | pack moe s2
printf '%s\n' ray $moved | pack models s0
printf '%s\n' vllm/_C_stable_libtorch.abi3.so vllm/_moe_C_stable_libtorch.abi3.so \
    vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so >"$out/packed"
ls -d -- * | grep -vxF "$(printf '%s\n' ray $moved)" | pack rest s3
rm -rf "$site" "$out/packed"
du -sh "$out"/s?
