"""Graders: model output and ground truth in, a `Grade` with a counted status out (no torch)."""

from quads.rewards.registry import GRADERS, grader
from quads.rewards.types import STATUSES, Grade, Grader, Status

__all__ = ["GRADERS", "STATUSES", "Grade", "Grader", "Status", "grader"]
