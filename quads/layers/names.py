# SPDX-License-Identifier: Apache-2.0
"""Module names of the trainer and of the engine, and which modules stay in high precision. No torch here.

    trainer (Hugging Face)                     engine (vLLM)                         mask keys
    ...self_attn.{q,k,v}_proj                  ...self_attn.qkv_proj                 ...self_attn.qkv_proj
    ...self_attn.o_proj                        ...self_attn.o_proj                   ...self_attn.o_proj
    ...mlp.{gate,up}_proj                      ...mlp.gate_up_proj                   ...mlp.gate_up_proj
    ...mlp.experts.{gate_up_proj,down_proj}    ...mlp.experts.{w13_weight,w2_weight} ...mlp.experts.{w13,w2}

Mixtral's ...mlp is ...block_sparse_moe in vLLM; keys and reports use the trainer's name (trainer_module).

Contract: a skip entry is a dotted sequence of name components ("mlp.gate" matches `model.layers.0.mlp.gate` and not
`model.layers.0.mlp.gate_proj`). Differs from substring matching, which would silently leave `mlp.gate_up_proj` alone.
"""

from __future__ import annotations

from collections.abc import Iterable

# Members of one fused engine module, in the order of the rows of its weight.
FUSED: dict[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# Routers decide which expert a token takes: one flipped choice outweighs any rounding, so they are never quantized.
# By name, because not every engine version gives the router a class of its own.
ROUTERS = ("gate", "shared_expert_gate")
# Name of a mask in a stream of weights: prefix + mask key.
RAC_MASK_PREFIX = "quads.rac_mask."
# What a causal language model keeps in high precision besides its routers.
DEFAULT_SKIP = ("lm_head", "embed_tokens", "norm")
# Engine modules under another name than in the trainer: vLLM kept Mixtral's, transformers renamed it.
_ENGINE_ALIASES = {"block_sparse_moe": "mlp"}
_FUSED_BY_MEMBER = {member: fused for fused, members in FUSED.items() for member in members}


def skip_reason(name: str, skip: Iterable[str]) -> str | None:
    """A sentence why module `name` stays in high precision, or None when it is to be quantized."""
    parts = name.split(".")
    if parts[-1] in ROUTERS:
        return f"router {parts[-1]!r} is never quantized"
    for entry in skip:
        want = entry.split(".")
        if any(parts[i : i + len(want)] == want for i in range(len(parts) - len(want) + 1)):
            return f"listed in skip as {entry!r}"
    return None


def trainer_module(engine_module: str) -> str:
    """Name of an engine module with the trainer's name for every part that the two call differently."""
    return ".".join(_ENGINE_ALIASES.get(part, part) for part in engine_module.split("."))


def engine_name(trainer_name: str) -> str:
    """Engine module that holds trainer module `trainer_name` (its own name when it is not fused)."""
    head, _, last = trainer_name.rpartition(".")
    fused = _FUSED_BY_MEMBER.get(last, last)
    return f"{head}.{fused}" if head else fused


def trainer_names(name: str) -> tuple[str, ...]:
    """Trainer modules held by engine module `name`, in the order of the weight's rows."""
    head, _, last = name.rpartition(".")
    return tuple(f"{head}.{member}" if head else member for member in FUSED.get(last, (last,)))


def group_members(trainer_name: str) -> tuple[str, ...]:
    """Last name components of the modules that share a scale with `trainer_name`; () when it stands alone."""
    return FUSED.get(_FUSED_BY_MEMBER.get(trainer_name.rpartition(".")[2], ""), ())
