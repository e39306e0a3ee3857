# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: `protocol` says how anything is timed here, the other modules what is timed."""
