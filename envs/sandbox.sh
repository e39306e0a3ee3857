#!/usr/bin/env bash
# The one system package: bubblewrap, in which generated programs are graded. Checked before hours are spent on training.
# As root on a Debian-like system it is installed; otherwise this says what to type.
set -euo pipefail
if command -v bwrap >/dev/null; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "[sandbox] installing the system package bubblewrap (10 s)"
    apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap >/dev/null
    exit 0
fi
echo "[sandbox] ERROR: bubblewrap (bwrap) is not installed; generated programs are graded in it." >&2
echo "[sandbox]   Debian, Ubuntu: sudo apt-get install bubblewrap     Fedora: sudo dnf install bubblewrap" >&2
echo "[sandbox]   Without it: evaluation.sandbox in the experiment names a weaker level (docs/sandbox.md)," >&2
echo "[sandbox]   and \`snakemake toy\` instead of \`make toy\` skips this check." >&2
exit 1
