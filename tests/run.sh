#!/usr/bin/env bash
# Every test that needs no GPU, in two pytest processes side by side: the fast ones, and those that start verl, vLLM, Snakemake
# or Slurm. One after the other they take longer than both together on two cores; each alone leaves one core idle.
#
#   tests/run.sh [pytest arguments]       exit code 0 only if both passed; the fast tests' output comes last
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
log=$(mktemp)
python -m pytest -q "$@" >"$log" 2>&1 &
fast=$!
trap 'kill "$fast" 2>/dev/null; rm -f "$log"' EXIT
python -m pytest -m "(slow or stack or slurm) and not gpu and not blackwell" --durations=25 "$@"
slow_code=$?
wait "$fast"
fast_code=$?
cat "$log"
# 5 is pytest's "no tests": an argument such as -k may leave one of the two without any.
if [ "$slow_code" = 5 ] && [ "$fast_code" = 0 ]; then exit 0; fi
if [ "$fast_code" = 5 ] && [ "$slow_code" = 0 ]; then exit 0; fi
if [ "$slow_code" != 0 ]; then echo "the tests that start verl, vLLM, Snakemake or Slurm failed (exit $slow_code), see above" >&2; fi
exit $((slow_code > fast_code ? slow_code : fast_code))
