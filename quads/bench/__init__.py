# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: `protocol` says how kernels are timed, `fleet` how engines are, the other modules what is timed."""
