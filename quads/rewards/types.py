"""What a grader returns.

    score    1.0 or 0.0 (a reward and a pass@1 sample at once)
    status   correct | wrong | no_answer | timeout | memory | grader_error | infra_error

Contract: every way in which a response can fail to earn its reward has its own status and is counted, so that a broken
grader or sandbox never looks like a wrong answer. Differs from returning a float: score is 1 exactly if status is
"correct", and the constructor refuses anything else. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

Status = Literal["correct", "wrong", "no_answer", "timeout", "memory", "grader_error", "infra_error"]
STATUSES: tuple[Status, ...] = get_args(Status)
# The grader failed, not the answer: such a sample is masked from the reward.
FAILURES: tuple[Status, ...] = ("grader_error", "infra_error")


@dataclass(frozen=True)
class Grade:
    """The verdict on one response. `extracted` is the answer that was read from it, None where there is none."""

    score: float
    status: Status
    extracted: str | None = None
    detail: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"unknown status {self.status!r}; known: {', '.join(STATUSES)}")
        if self.score != float(self.status == "correct"):
            raise ValueError(f"score {self.score} does not fit status {self.status!r}: 1 for correct, 0 for the rest")


class Grader(Protocol):
    """Grades one response; `finished` says whether it ended by itself (end mark) and not at the length limit."""

    def __call__(self, text: str, ground_truth: str, finished: bool) -> Grade: ...
