"""What is captured and graded: prompts of a data set or of a file, calibration tokens, and the grade of a response.

    .parquet  rows of quads.data.build            .jsonl  {"input_ids": [...]} or {"prompt": text or chat messages}

Differs from the evaluation's loader in that a prompt needs no ground truth: the gap can be measured without a grader
(the reward is then NaN and advantages are left out), and token ids need no tokenizer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quads.config import ConfigError


@dataclass(frozen=True)
class Prompt:
    """Token ids, and what its grader needs (None: not graded)."""

    token_ids: tuple[int, ...]
    ground_truth: str | None = None
    data_source: str | None = None


def load_prompts(path: Path, checkpoint: Path, max_tokens: int) -> list[Prompt]:
    """Prompts of a .parquet (rows of quads.data.build) or .jsonl file, in order.

    A .jsonl row holds `input_ids`, or `prompt` as text or chat messages. Raises ConfigError naming row and limit.
    """
    if path.suffix == ".parquet":
        from quads.data.build import read

        rows = read(path)
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    tokenizer = _tokenizer(checkpoint)
    prompts = []
    for index, row in enumerate(rows):
        ids = row["input_ids"] if "input_ids" in row else _encode(tokenizer, row.get("prompt"), f"{path}, row {index}")
        if not 0 < len(ids) <= max_tokens:
            raise ConfigError(f"{path}, row {index}: {len(ids)} prompt tokens, grpo.max_prompt_tokens is {max_tokens}")
        truth = (row.get("reward_model") or {}).get("ground_truth")
        prompts.append(Prompt(tuple(ids), truth, row.get("data_source")))
    if not prompts:
        raise ConfigError(f"{path}: no prompt")
    return prompts


def _tokenizer(checkpoint: Path) -> Any:
    if not (checkpoint / "tokenizer_config.json").is_file():
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)


def _encode(tokenizer: Any, prompt: Any, where: str) -> list[int]:
    if prompt is None or tokenizer is None:
        raise ConfigError(f"{where}: needs input_ids, or prompt and a checkpoint with a tokenizer")
    if not isinstance(prompt, str):
        prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return ids


def make_grade(checkpoint: Path) -> Callable[[Prompt, list[int], bool], float]:
    """score(prompt, response token ids, finished) by the prompt's grader; NaN for prompts without ground truth."""
    tokenizer = _tokenizer(checkpoint)

    def grade(prompt: Prompt, ids: list[int], finished: bool) -> float:
        if prompt.ground_truth is None or prompt.data_source is None or tokenizer is None:
            return math.nan
        from quads.rewards.registry import grader

        body = ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids
        text = tokenizer.decode(body, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return float(grader(prompt.data_source)(text, prompt.ground_truth, finished).score)

    return grade


def calibration_ids(data: Path | None, prompts: Sequence[Prompt], count: int = 64) -> Tensor:
    """int64 [B, T]: DATA/calibration.parquet, or else the first prompts of the most frequent length."""
    path = data / "calibration.parquet" if data is not None else None
    if path is not None and path.is_file():
        from quads.data.build import read

        return torch.tensor([row["input_ids"] for row in read(path)])
    lengths = [len(p.token_ids) for p in prompts]
    common = max(set(lengths), key=lengths.count)
    return torch.tensor([p.token_ids for p in prompts if len(p.token_ids) == common][:count])
