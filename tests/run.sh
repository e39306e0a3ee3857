#!/usr/bin/env bash
# Every test that needs no GPU, in two pytest processes side by side: the fast ones and Slurm's, and those that start verl or
# vLLM. One after the other they take longer than both together on two cores. Training over two nodes is in the second
# half, so that never two of them hold the memory of a training.
#
#   tests/run.sh [pytest arguments]       exit code 0 only if both passed; the first half's output comes last
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
here="not gpu and not blackwell and not long"
light="$here and ((slurm and not stack) or not (slow or stack or slurm))"
heavy="$here and (stack or (slow and not slurm))"
log=$(mktemp)
python -m pytest -q -m "$light" "$@" >"$log" 2>&1 &
first=$!
trap 'kill "$first" 2>/dev/null; rm -f "$log"' EXIT
python -m pytest -m "$heavy" --durations=25 "$@"
heavy_code=$?
wait "$first"
light_code=$?
cat "$log"
# 5 is pytest's "no tests": an argument such as -k may leave one of the two without any.
if [ "$heavy_code" = 5 ] && [ "$light_code" = 0 ]; then exit 0; fi
if [ "$light_code" = 5 ] && [ "$heavy_code" = 0 ]; then exit 0; fi
if [ "$heavy_code" != 0 ]; then echo "the tests that start verl or vLLM failed (exit $heavy_code), see above" >&2; fi
exit $((heavy_code > light_code ? heavy_code : light_code))
