#!/usr/bin/env bash
# Every test that needs no GPU, in two pytest processes side by side: the fast ones and Slurm's, then some engines that
# fill up the time; and the other tests that start verl or vLLM. One after the other they take longer than both together
# on two cores. All trainings are in the second process, so that never two of them hold the memory of a training.
#
#   tests/run.sh [pytest arguments]       exit code 0 only if all passed; the first process's output comes last
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
here="not gpu and not blackwell and not long"
light="$here and ((slurm and not stack) or not (slow or stack or slurm))"
heavy="$here and (stack or (slow and not slurm))"
filling=(tests/parity/test_guard.py tests/parity/test_tensor_parallel.py)
log=$(mktemp)
codes=$(mktemp)
(
    python -m pytest -q -m "$light" "$@"
    echo $? >>"$codes"
    # Paths among the arguments choose tests themselves: then everything heavy is the second process's.
    if [ $# = 0 ]; then
        python -m pytest -q -m "$heavy" --durations=10 "${filling[@]}"
        echo $? >>"$codes"
    fi
) >"$log" 2>&1 &
first=$!
trap 'kill "$first" 2>/dev/null; rm -f "$log" "$codes"' EXIT
if [ $# = 0 ]; then set -- "${filling[@]/#/--ignore=}"; fi
python -m pytest -m "$heavy" --durations=25 "$@"
echo $? >>"$codes"
wait "$first"
cat "$log"
# 5 is pytest's "no tests": an argument such as -k may leave a part without any, but not all of them.
worst=0 ran=0
while read -r code; do
    if [ "$code" != 5 ]; then ran=1; else code=0; fi
    if [ "$code" -gt "$worst" ]; then worst=$code; fi
done <"$codes"
if [ "$ran" = 0 ]; then exit 5; fi
if [ "$worst" != 0 ]; then echo "a part failed (exit codes $(paste -sd' ' "$codes")), see above" >&2; fi
exit "$worst"
