"""A tiny Qwen3-MoE with random weights and a few loud channels, so that quantization is visible."""

from __future__ import annotations

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def tiny_model(seed: int = 0, **changes) -> Qwen3MoeForCausalLM:
    """float32, 2 layers, hidden 64, 8 experts of width 32, head_dim 32 (the smallest that vLLM serves on CPU).

    Vocabulary 43: an engine pads it to 64 rows.
    """
    values = {
        "vocab_size": 43,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "attn_implementation": "eager",
        "dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
        **changes,
    }
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**values)).float().eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[:2] = 12.0
    return model
