# SPDX-License-Identifier: Apache-2.0
"""Trainer-side algorithms on top of quads.layers; knows nothing of the rollout engine."""
