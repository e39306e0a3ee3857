"""Code grading: programs written by a model, LiveCodeBench semantics, run in a sandbox (no torch)."""

from quads.rewards.code.extract import extract_program
from quads.rewards.code.grade import (
    CodeGrader,
    CodeResult,
    as_ground_truth,
    default_grader,
    grade_case,
    grade_stdin_program,
    grade_text,
)
from quads.rewards.code.limits import Limits
from quads.rewards.code.probe import SandboxUnavailableError, open_sandbox
from quads.rewards.code.sandbox import Sandbox
from quads.rewards.code.task import Example, Task

__all__ = [
    "CodeGrader",
    "CodeResult",
    "Example",
    "Limits",
    "Sandbox",
    "SandboxUnavailableError",
    "Task",
    "as_ground_truth",
    "default_grader",
    "extract_program",
    "grade_case",
    "grade_stdin_program",
    "grade_text",
    "open_sandbox",
]
