"""Function-preserving outlier channels, INJECTED into a trained toy: activations grow, the function does not change.

    RMSNorm gain g_c  * s   and   column c of every matrix that reads it / s       (n channels per norm)
    up_proj row c     * s   and   column c of down_proj / s                        (one channel, all experts)
    v_proj row c      * s   and   the o_proj columns that read it / s              (one channel)

In exact arithmetic the logits are the same for every s. In float32 they are bit-equal where s is a power of two and
differ by rounding otherwise (at most 9e-6 at s = 12 in the warm toy, whose logits reach 14).
What changes is the spread inside a 16-block of the quantized activations: most values fall below half an FP4 step of
the block's largest. Trained MoEs have such channels, a model of width 64 has none; strength 1 changes nothing.

Source: the effect is the usual account of activation outliers; placement, number and strength are this project's
choices (README, "The toy"). Differs from smoothing methods in direction: they move outliers from activations into
weights, this moves them out of the weights. The router is a reader of the post-attention norm like the experts.
Legend: H width, F expert width, E experts. Works in place.
"""

from __future__ import annotations

import torch
from transformers import Qwen3MoeForCausalLM

from quads.config import Outliers


def _pick(size: int, count: int, generator: torch.Generator) -> torch.Tensor:
    if count > size:
        raise ValueError(f"outliers.channels_per_norm={count} exceeds the {size} channels there are; lower it")
    return torch.randperm(size, generator=generator)[:count]


def _norm_to_readers(gain: torch.Tensor, readers: list[torch.Tensor], channels: torch.Tensor, s: float) -> None:
    gain[channels] *= s
    for weight in readers:
        weight[..., channels] /= s


def _value_to_output(attention: torch.nn.Module, channel: int, s: float) -> None:
    """One value channel up; every query head of its group reads it, so each of their o_proj columns goes down."""
    head_dim, group = attention.head_dim, attention.num_key_value_groups
    kv_head, offset = divmod(channel, head_dim)
    attention.v_proj.weight[channel] *= s
    for head in range(kv_head * group, (kv_head + 1) * group):
        attention.o_proj.weight[:, head * head_dim + offset] /= s


@torch.no_grad()
def inject(model: Qwen3MoeForCausalLM, outliers: Outliers) -> dict[str, list[int]]:
    """Scale the channels in place and return which: module name -> channel indices (empty at strength 1).

    Raises ValueError if more channels are asked for than a norm has.
    """
    s = outliers.strength
    if s == 1.0:
        return {}
    generator = torch.Generator().manual_seed(outliers.seed)
    chosen: dict[str, list[int]] = {}
    for index, layer in enumerate(model.model.layers):
        attention, experts = layer.self_attn, layer.mlp.experts
        qkv = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        for name, readers in (
            ("input_layernorm", qkv),
            ("post_attention_layernorm", [layer.mlp.gate.weight, experts.gate_up_proj]),
        ):
            gain = getattr(layer, name).weight
            channels = _pick(len(gain), outliers.channels_per_norm, generator)
            _norm_to_readers(gain, readers, channels, s)
            chosen[f"model.layers.{index}.{name}"] = sorted(channels.tolist())
        F = experts.down_proj.shape[-1]
        inner = int(_pick(F, 1, generator))
        experts.gate_up_proj[:, F + inner] *= s  # rows F..2F-1 are up_proj; silu(gate) is not linear in its scale
        experts.down_proj[..., inner] /= s
        chosen[f"model.layers.{index}.mlp.experts.down_proj"] = [inner]
        value = int(_pick(attention.v_proj.weight.shape[0], 1, generator))
        _value_to_output(attention, value, s)
        chosen[f"model.layers.{index}.self_attn.v_proj"] = [value]
    return chosen


def crest_factor(x_TK: torch.Tensor) -> float:
    """Largest magnitude over root mean square: how far one channel stands out, 1 for a constant signal."""
    return float(x_TK.abs().max() / x_TK.float().pow(2).mean().sqrt())
