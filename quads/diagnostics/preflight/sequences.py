"""Prompts (and responses) of a file as token ids, split into calibration and scored sequences, in padded chunks.

    .jsonl    {"prompt": text or chat messages, "response": text}   or   {"input_ids": [...], "response_ids": [...]}
    .parquet  the same fields as columns; data sets of quads.data.build are such files
    basis     "response": given responses are scored | "prompt": the prompt's own tokens, from the second one |
              "generated": responses sampled from the checkpoint in BF16-rounded weights, temperature 1

A response is optional, in every row or in none. Chunk: b sequences, L the longest of them, ids right of a sequence are
0. Right padding is sound here: attention is causal, and no stream has a batch mask or a batch-wide scale.
Differs from quads.diagnostics.prompts in that nothing is graded and responses may come with the prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quads.config import ConfigError, Preflight

FILES = "a .jsonl, or a .parquet with the same fields as columns"
FIELDS = "a `prompt` (text or chat messages) or `input_ids`, and optionally `response` or `response_ids`"


@dataclass(frozen=True)
class Sequences:
    """ids: one list per sequence (prompt + response); start: first scored token; cut: how many were shortened."""

    ids: list[list[int]]
    start: list[int]
    basis: str
    cut: int

    def take(self, index: Sequence[int]) -> Sequences:
        """A subset."""
        return Sequences([self.ids[i] for i in index], [self.start[i] for i in index], self.basis, self.cut)

    @property
    def scored_tokens(self) -> int:
        """Tokens whose log-prob enters the gap."""
        return sum(len(ids) - start for ids, start in zip(self.ids, self.start, strict=True))


@dataclass(frozen=True)
class Chunk:
    """index int64 [b] into the sequences; ids int64 [b, L]; valid bool [b, L]: no padding."""

    index: Tensor
    ids: Tensor
    valid: Tensor


def chunks(sequences: Sequences, tokens_per_forward: int) -> Iterator[Chunk]:
    """Sequences of similar length together, at most `tokens_per_forward` tokens with padding (at least one of them)."""
    order = sorted(range(len(sequences.ids)), key=lambda i: len(sequences.ids[i]))
    while order:
        size = max(1, tokens_per_forward // len(sequences.ids[order[-1]]))
        part, order = order[-size:], order[:-size]
        length = torch.tensor([len(sequences.ids[i]) for i in part])
        ids = torch.zeros(len(part), int(length.max()), dtype=torch.int64)
        for row, i in zip(ids, part, strict=True):
            row[: len(sequences.ids[i])] = torch.tensor(sequences.ids[i])
        yield Chunk(torch.tensor(part), ids, torch.arange(ids.shape[1])[None] < length[:, None])


def read_sequences(path: Path, checkpoint: Path, vocabulary: int, settings: Preflight) -> Sequences:
    """The first `settings.sequences` rows as token ids, cut to `settings.tokens`. ConfigError names file and row."""
    rows = _rows(path)[: settings.sequences]
    tokenizer: Any = None
    if any("input_ids" not in row for row in rows):
        tokenizer = load_tokenizer(checkpoint)
    ids, start = [], []
    for number, row in enumerate(rows, 1):
        prompt, response = _encode(row, tokenizer, f"{path}, row {number}")
        bad = [token for token in (*prompt, *response) if not 0 <= token < vocabulary]
        if bad:
            raise ConfigError(
                f"{path}, row {number}: token id {bad[0]} is outside the model's vocabulary of {vocabulary}"
            )
        ids.append(prompt + response)
        start.append(len(prompt) if response else 1)
    answered = [s > 1 or "response" in row or "response_ids" in row for s, row in zip(start, rows, strict=True)]
    if any(answered) and not all(answered):
        raise ConfigError(f"{path}: row {answered.index(False) + 1} has no response, others have; give all or none")
    return _shortened(ids, start, "response" if all(answered) else "prompt", settings.tokens, path)


def _shortened(ids: list[list[int]], start: list[int], basis: str, limit: int, path: Path) -> Sequences:
    cut = sum(len(sequence) > limit for sequence in ids)
    short = [sequence[:limit] for sequence in ids]
    keep = [i for i, sequence in enumerate(short) if len(sequence) > start[i]]
    if len(keep) < 2:
        raise ConfigError(
            f"{path}: {len(keep)} sequence(s) with a token to score within {limit} tokens; at least 2 are needed, one "
            f"calibrates and one is scored (--tokens raises the limit)"
        )
    return Sequences([short[i] for i in keep], [start[i] for i in keep], basis, cut)


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        wrong = "is a folder" if path.is_dir() else "is no regular file" if path.exists() else "no such file"
        raise ConfigError(f"{path}: {wrong}; --prompts takes a file: {FILES}. A row has {FIELDS}")
    if path.suffix == ".parquet":
        return _parquet(path)
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"{path}, line {number}: not valid JSON ({error}); one object per line is needed"
            ) from None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number}: expected an object with {FIELDS}, got {type(row).__name__}")
        rows.append(row)
    if not rows:
        raise ConfigError(f"{path}: no prompt, the file is empty or blank; each line is an object with {FIELDS}")
    return rows


def _parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a complete parquet file ({error}); make it again, or give a .jsonl") from error
    if not rows:
        raise ConfigError(f"{path}: no prompt, the table has no row; each row has {FIELDS}")
    # a table has every column in every row: null stands for a field that a row of a .jsonl would lack
    return [{name: value for name, value in row.items() if value is not None} for row in rows]


def load_tokenizer(checkpoint: Path) -> Any:
    """The checkpoint's tokenizer. Raises ConfigError when there is none."""
    if not any((checkpoint / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")):
        raise ConfigError(
            f"{checkpoint}: no tokenizer (tokenizer_config.json), which text prompts need; add it or give `input_ids`"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise ConfigError(f"{checkpoint}: transformers cannot load the tokenizer: {error}") from error


def _encode(row: dict[str, Any], tokenizer: Any, where: str) -> tuple[list[int], list[int]]:
    if "input_ids" in row:
        prompt, response = row["input_ids"], row.get("response_ids", [])
        if not all(isinstance(ids, list | tuple) and all(type(t) is int for t in ids) for ids in (prompt, response)):
            raise ConfigError(f"{where}: input_ids and response_ids must be lists of integers")
        prompt, response = list(prompt), list(response)
    elif "prompt" in row:
        text = row["prompt"]
        if not isinstance(text, str):
            try:
                text = tokenizer.apply_chat_template(list(text), tokenize=False, add_generation_prompt=True)
            except Exception as error:  # a template raises what it likes, through jinja2's own classes
                raise ConfigError(f"{where}: the chat template does not take this prompt: {error}") from error
        if not text.strip():
            raise ConfigError(f"{where}: the prompt is blank")
        answer = "" if row.get("response") is None else row["response"]
        if not isinstance(answer, str):
            raise ConfigError(f"{where}: response is {type(answer).__name__} {answer!r}, expected a text")
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        response = tokenizer(answer, add_special_tokens=False)["input_ids"]
    else:
        raise ConfigError(f"{where}: has {', '.join(sorted(row)) or 'no field'}; needs {FIELDS}")
    if not prompt:
        raise ConfigError(f"{where}: the prompt has no token")
    return prompt, response


def split(sequences: Sequences, share: float) -> tuple[Sequences, Sequences]:
    """(calibration, scored): every n-th sequence calibrates, at least one; the order of the file decides, no chance."""
    total = len(sequences.ids)
    count = min(max(1, round(share * total)), total - 1)
    chosen = {(i * total) // count for i in range(count)}
    return (
        sequences.take(sorted(chosen)),
        sequences.take([i for i in range(total) if i not in chosen]),
    )


@torch.no_grad()
def generate(checkpoint: Path, sequences: Sequences, settings: Preflight, device: str) -> Sequences:
    """The same prompts with sampled responses (temperature 1, whole vocabulary, the eos token included).

    Loads the model whole, in bf16; sequences that hold responses already raise ConfigError, as does running out of
    memory.
    """
    from transformers import AutoModelForCausalLM

    if sequences.basis != "prompt":
        raise ConfigError("--generate samples responses, but the prompts file holds responses; drop one of them")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.bfloat16, attn_implementation="eager", local_files_only=True
        ).to(device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"--generate needs the whole model in memory: {error}; score given responses instead"
        ) from error
    torch.manual_seed(settings.seed)
    ids: list[list[int]] = [[] for _ in sequences.ids]
    for batch in _equal_lengths(sequences.ids, 64):
        tokens = torch.tensor([sequences.ids[i] for i in batch], device=device)
        drawn = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=settings.generate,
            pad_token_id=0,
        )
        for i, row in zip(batch, drawn.tolist(), strict=True):
            ids[i] = _until_end(row, tokens.shape[1], model.generation_config.eos_token_id)
    start = [len(prompt) for prompt in sequences.ids]
    return _shortened(ids, start, "generated", settings.tokens + settings.generate, checkpoint)


def _equal_lengths(ids: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    """Indices of prompts of one length, `size` at a time: nothing is padded on the left."""
    for length in sorted({len(prompt) for prompt in ids}):
        same = [i for i, prompt in enumerate(ids) if len(prompt) == length]
        yield from (same[i : i + size] for i in range(0, len(same), size))


def _until_end(row: list[int], start: int, eos: int | list[int] | None) -> list[int]:
    """The sequence up to its first end mark after `start`, that mark included."""
    marks = set(eos if isinstance(eos, list) else [eos])
    end = next((i + 1 for i in range(start, len(row)) if row[i] in marks), len(row))
    return row[:end]
