#!/usr/bin/env bash
# Slurm for the tests marked `slurm`, which start it on this one machine. As root on a Debian-like system it is installed;
# elsewhere those tests are skipped, and say so.
set -euo pipefail
for name in slurmctld slurmd munged; do command -v "$name" >/dev/null || missing=1; done
if [ -z "${missing:-}" ]; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "[slurm] installing the system packages slurm-wlm and munge (up to 2 minutes)"
    if apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null; then exit 0; fi
fi
echo "[slurm] slurmctld, slurmd or munged is not here; the tests marked slurm will be skipped"
