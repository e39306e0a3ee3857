"""The toy's model: transformers' own Qwen3MoeForCausalLM in float32, small enough for two CPU cores.

    init   embeddings N(0, 0.5^2); matrices N(0, 1/fan_in); o_proj N(0, 1/(fan_in 2L)); experts' down_proj twice that
           standard deviation; norm gains 1                                       (L layers)

Legend: V vocabulary, L layers, E experts. With the default configuration 154,432 parameters.
Differs from transformers' init (0.02 everywhere): with width 64 that leaves residual branches too weak to learn the
chain within a few hundred steps. Untied embeddings, every layer sparse, top-k probabilities renormalised.
"""

from __future__ import annotations

import torch
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from quads.config import Model
from quads.data import chain

CONTEXT = 64  # tokens; the longest chain needs 12 + 3 + 13


def make_config(model: Model) -> Qwen3MoeConfig:
    """transformers' configuration of the toy."""
    return Qwen3MoeConfig(
        vocab_size=len(chain.SYMBOLS),
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        num_experts=model.experts,
        num_experts_per_tok=model.experts_per_token,
        moe_intermediate_size=model.expert_hidden,
        intermediate_size=model.expert_hidden,  # dense layers only; there are none
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        max_position_embeddings=CONTEXT,
        eos_token_id=chain.ID[chain.END],
        pad_token_id=chain.ID[chain.START],
        bos_token_id=None,
        dtype="float32",
    )


def init_std(name: str, weight: torch.Tensor, layers: int) -> float:
    """Standard deviation of a matrix [..., out, fan_in] by its place in the network."""
    fan_in = weight.shape[-1]
    if name.endswith("embed_tokens.weight"):
        return 0.5
    if name.endswith("o_proj.weight"):
        return (fan_in * 2 * layers) ** -0.5
    if name.endswith("down_proj"):
        return 2 * (fan_in * 2 * layers) ** -0.5
    return fan_in**-0.5


def make_model(model: Model, seed: int) -> Qwen3MoeForCausalLM:
    """A freshly initialised float32 toy; the same seed gives the same bits."""
    generator = torch.Generator().manual_seed(seed)
    made = Qwen3MoeForCausalLM(make_config(model)).float()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, init_std(name, weight, model.layers), generator=generator)
    # Stored with the checkpoint: engines read the end mark and the sampling defaults (none: T = 1, whole vocabulary).
    made.generation_config = GenerationConfig(
        eos_token_id=chain.ID[chain.END], pad_token_id=chain.ID[chain.START], do_sample=True, temperature=1.0, top_k=0
    )
    return made
