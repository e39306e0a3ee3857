"""The problems of an evaluation: held-out chains, benchmarks made offline, pinned sets; what is asked and how graded.

    questions(experiment, data, benchmarks, fetched) -> [Question]     no tokenizer, no torch: enough for grading
    prompts(questions, checkpoint, limit) -> {id: Prompt}, decode      with the checkpoint's own chat template

The held-out split that training logs its accuracy on is always first (`chain`, or `held_out` where training uses pinned
sets); it is not part of the macro average.
Contract: every refusal names the file or benchmark. Differs from a list of texts: a problem has an id that never
depends on which other benchmarks are evaluated, so cached samples stay valid when one is added.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quads.config import ConfigError, Evaluation, Experiment
from quads.data import chain, toy_benchmarks
from quads.data.build import read
from quads.evaluation.sampling import Prompt
from quads.files import read_result
from quads.rewards.prompts import CODE_SYSTEM, code_prompt, math_prompt

HELD_OUT = "held_out"
PINNED_SAMPLES = {"math": 32, "code": 8}


@dataclass(frozen=True)
class Question:
    """One problem. `grader` is chain, math or code; `truth` what that grader compares with."""

    benchmark: str
    index: int
    messages: tuple[Mapping[str, str], ...]
    grader: str
    truth: str
    samples: int
    adapter: str | None = None
    answer_type: str | None = None

    @property
    def id(self) -> str:
        return f"{self.benchmark}/{self.index}"


def held_out_name(experiment: Experiment) -> str:
    """Benchmark name of the training task's own held-out split."""
    return HELD_OUT if experiment.data.sets else chain.NAME


def questions(experiment: Experiment, data: Path, benchmarks: Path, fetched: Path) -> list[Question]:
    """All problems: the held-out chains in `data`, then `evaluation.benchmarks` in their order.

    Raises ConfigError or ResultFileError.
    """
    evaluation, own = experiment.evaluation, held_out_name(experiment)
    unknown = sorted(set(evaluation.samples) - {own, *evaluation.benchmarks.names})
    if unknown:
        raise ConfigError(f"evaluation.samples names {unknown}, known: {[own, *evaluation.benchmarks.names]}")
    default = evaluation.samples_per_problem
    out = [
        Question(own, i, tuple(row["prompt"]), row["data_source"], row["reward_model"]["ground_truth"], count)
        for count in (evaluation.samples.get(own, default),)
        for i, row in enumerate(read(data / "eval.parquet"))
    ]
    for name in evaluation.benchmarks.names:
        out += _toy(name, benchmarks, evaluation) if toy_benchmarks.is_toy(name) else _pinned(name, fetched, evaluation)
    return out


def _toy(name: str, folder: Path, evaluation: Evaluation) -> list[Question]:
    manifest = read_result(folder / "manifest.json", "benchmark manifest", ("rows", "sha256"))
    rows = read(folder / f"{name}.parquet")
    if manifest["rows"].get(name) != len(rows):
        raise ConfigError(f"{folder / name}.parquet holds {len(rows)} rows, the manifest says {manifest['rows']}")
    samples = evaluation.samples.get(name, evaluation.samples_per_problem)
    return [
        Question(name, row["index"], tuple(row["prompt"]), row["grader"], row["answer"], samples, row["adapter"])
        for row in rows
    ]


def _pinned(name: str, fetched: Path, evaluation: Evaluation) -> list[Question]:
    from quads.data import benchmarks
    from quads.data.benchmarks.errors import DataError

    try:
        rows = list(benchmarks.iterate(name, fetched))
    except DataError as error:
        raise ConfigError(f"evaluation.benchmarks.names: {name}: {error}") from error
    out = []
    for i, row in enumerate(rows):
        if "tests" in row:
            kind, truth = "code", json.dumps({"tests": row["tests"], "fn_name": row["func_name"]})
            text = code_prompt(row["question"], row["starter_code"])
            messages: tuple[dict[str, str], ...] = (_message("system", CODE_SYSTEM), _message("user", text))
        else:
            kind, truth = "math", row["answer"]
            messages = (_message("user", math_prompt(row["problem"])),)
        samples = evaluation.samples.get(name, PINNED_SAMPLES[kind])
        out.append(Question(name, i, messages, kind, truth, samples, answer_type=row.get("answer_type")))
    return out


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def prompts(
    asked: Sequence[Question], checkpoint: Path, limit: int
) -> tuple[dict[str, Prompt], Callable[[list[int]], str]]:
    """Prompts by problem id, and the decoder of responses. Raises ConfigError for a prompt longer than `limit`."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    out = {}
    for question in asked:
        messages = [dict(m) for m in question.messages]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) > limit:
            raise ConfigError(
                f"problem {question.id}: {len(ids)} prompt tokens, the limit is {limit}; raise "
                "evaluation.max_prompt_tokens (null: grpo.max_prompt_tokens)"
            )
        out[question.id] = Prompt(text, ids)

    def decode(ids: list[int]) -> str:
        # without the end mark only: dropping every special token would turn a wrong answer that contains one into
        # a right one
        body = ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids
        return str(tokenizer.decode(body, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return out, decode
