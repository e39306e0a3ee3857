"""An engine made of arithmetic, and questions for it: right where the seed is even."""

from quads.evaluation.problems import Question
from quads.evaluation.sampling import Prompt, Sample


class SeededEngine:
    """Answers `^i+1=` with i + 1 where the seed is even; records what it was asked; dies at call `dies_at`."""

    def __init__(self, dies_at=None):
        self.calls, self.dies_at = [], dies_at

    def generate(self, prompts, seeds):
        self.calls.append((list(prompts), list(seeds)))
        if len(self.calls) == self.dies_at:
            raise KeyboardInterrupt
        right = [(p[1] + 1) % 10 for p in prompts]
        return [
            Sample([r if s % 2 == 0 else (r + 1) % 10, 41], [-0.25, -0.75], "stop")
            for r, s in zip(right, seeds, strict=True)
        ]


def question(name, i, samples=4):
    """Chains for "chain", boxed digits for anything else."""
    messages = ({"role": "user", "content": f"^{i}+1="},)
    graders = ("chain", None) if name == "chain" else ("math", "boxed_last")
    return Question(name, i, messages, graders[0], str((i + 1) % 10), samples, graders[1])


def prompts_of(questions):
    return {q.id: Prompt(q.messages[0]["content"], (42, q.index, 11, 40)) for q in questions}


def decode(ids):
    return str(ids[0])
