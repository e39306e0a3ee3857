"""Tiny checkpoints on disk for the pre-flight tests: every supported family, and prompts as token ids."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from other_moe import tiny_mixtral, tiny_olmoe
from tiny_moe import tiny_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

DENSE = {
    "vocab_size": 43,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "attn_implementation": "eager",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def _dense(model: type, config: type, **changes: object) -> torch.nn.Module:
    torch.manual_seed(0)
    return model(config(**DENSE, **changes)).float().eval()


FAMILIES = {
    "qwen3_moe": tiny_model,
    "olmoe": tiny_olmoe,
    "mixtral": tiny_mixtral,
    "llama": lambda: _dense(LlamaForCausalLM, LlamaConfig, tie_word_embeddings=True),
    "mistral": lambda: _dense(MistralForCausalLM, MistralConfig, sliding_window=4),
    # layers of two kinds, and biases
    "qwen2": lambda: _dense(
        Qwen2ForCausalLM, Qwen2Config, use_sliding_window=True, sliding_window=3, max_window_layers=1
    ),
    "qwen3": lambda: _dense(Qwen3ForCausalLM, Qwen3Config, head_dim=16),
}


def save(model: torch.nn.Module, folder: Path, *, shards: bool = False) -> Path:
    """The checkpoint as save_pretrained writes it; shards: several files and an index."""
    model.save_pretrained(folder, max_shard_size="50KB" if shards else "5GB")
    return folder


def some_ids(count: int, seed: int, *, low: int = 6, high: int = 12) -> list[list[int]]:
    """Random token ids, lengths low..high."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [torch.randint(2, 43, (n,), generator=generator).tolist() for n in lengths]


def write_prompts(path: Path, count: int = 16, *, responses: bool = True) -> Path:
    """A .jsonl of token ids."""
    rows = []
    for ids in some_ids(count, 1):
        rows.append({"input_ids": ids[:4], "response_ids": ids[4:]} if responses else {"input_ids": ids})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
