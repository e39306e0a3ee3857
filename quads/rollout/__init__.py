# SPDX-License-Identifier: Apache-2.0
"""Engine-independent description of what a rollout engine multiplies with; knows nothing of the trainer."""
