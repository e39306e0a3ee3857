"""Tiny random MoE models of other families than the toy's, small enough for seconds on one core."""

from __future__ import annotations

import torch
from transformers import MixtralConfig, MixtralForCausalLM, OlmoeConfig, OlmoeForCausalLM

COMMON = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "attn_implementation": "eager",
    "dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def tiny_olmoe(seed: int = 0) -> OlmoeForCausalLM:
    """OLMoE: q/k norms over the whole width, 8 experts, router weights not renormalised."""
    torch.manual_seed(seed)
    return OlmoeForCausalLM(OlmoeConfig(**COMMON, num_experts=8, norm_topk_prob=False)).float().eval()


def tiny_mixtral(seed: int = 0) -> MixtralForCausalLM:
    """Mixtral: 4 experts, router weights renormalised."""
    torch.manual_seed(seed)
    return MixtralForCausalLM(MixtralConfig(**COMMON, num_local_experts=4)).float().eval()
