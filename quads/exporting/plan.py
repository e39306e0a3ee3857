"""Which matrices of a checkpoint are quantized, which share a global scale, and which input each multiplies.

    q_proj k_proj v_proj                      one group, input ...self_attn.qkv_proj
    o_proj                                    alone,     input ...self_attn.o_proj
    experts.<e>.gate_proj, .up_proj           one group per expert, input ...mlp.experts.w13
    experts.<e>.down_proj                     alone per expert,     input ...mlp.experts.w2

Decided by the same surgery as in training, applied to the model on the meta device (no weights are read), so that an
export cannot quantize another set of modules than the trainer did. Checkpoints store experts one by one; the model
holds them fused. Raises CheckpointError for a layout of expert names that is not the one above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quads.exporting.checkpoint import Checkpoint, CheckpointError
from quads.layers.names import engine_name, group_members
from quads.layers.setup import Precision
from quads.layers.surgery import SurgeryRow, apply_surgery


@dataclass(frozen=True)
class Group:
    """Matrices [n_i, K] that share one global scale; `input` is the engine name of what they multiply."""

    modules: tuple[str, ...]
    input: str


@dataclass(frozen=True)
class Plan:
    """groups: everything quantized. skipped: modules with a matrix that stay in bf16, for the list of ignored ones."""

    groups: tuple[Group, ...]
    skipped: tuple[str, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """Quantized modules by their names in the checkpoint."""
        return tuple(name for group in self.groups for name in group.modules)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Engine names of all quantized inputs."""
        return tuple(dict.fromkeys(group.input for group in self.groups))


@dataclass(frozen=True)
class Blueprint:
    """Every tensor that a checkpoint of the plan has. matrices: [N, K] by quantized module; rest: shape by name.

    tied: names in `rest` that share another's values, so that a checkpoint may leave them out.
    """

    plan: Plan
    matrices: dict[str, tuple[int, ...]]
    rest: dict[str, tuple[int, ...]]
    tied: frozenset[str]


def make_plan(checkpoint: Checkpoint, skip: Sequence[str]) -> Plan:
    """The plan for `checkpoint` with `skip` as in quads.layers.names. Raises CheckpointError, and what surgery does."""
    plan = make_blueprint(checkpoint, skip).plan
    absent = [name for name in plan.modules if f"{name}.weight" not in checkpoint]
    if absent:
        raise CheckpointError(
            f"{checkpoint.folder}: no tensor {sorted(absent)[0]}.weight; exports know checkpoints that store experts "
            "as experts.<e>.{gate,up,down}_proj (Qwen3-MoE, OLMoE): save the model with save_pretrained"
        )
    return plan


def make_blueprint(checkpoint: Checkpoint, skip: Sequence[str]) -> Blueprint:
    """From config.json, `skip` and the names of the tensors; the quantized ones need not be there."""
    model = meta_model(checkpoint)
    shapes = _on_disk(model)
    tied = getattr(model, "_tied_weights_keys", None) if getattr(model.config, "tie_word_embeddings", False) else None
    report = apply_surgery(model, Precision("nvfp4", "bf16", skip=tuple(skip)))
    groups: list[Group] = []
    for row in report.rows:
        if row.status == "quantized":
            groups += _expert_groups(row) if len(row.keys) > 1 else _linear_group(row)
    quantized = {name for group in groups for name in group.modules}
    matrices = [n.removesuffix(".weight") for n in checkpoint.names() if n.endswith(".weight")]
    skipped = {n for n in matrices if n not in quantized and len(checkpoint.shape(f"{n}.weight")) == 2}
    # a tied head has no tensor of its own, but engines build the module and ask for its scheme
    skipped |= {row.module for row in report.rows if row.status == "skipped"}
    plan = Plan(tuple(groups), tuple(sorted(skipped)))
    rest = {name: shape for name, shape in shapes.items() if name.removesuffix(".weight") not in quantized}
    return Blueprint(plan, {m: shapes[f"{m}.weight"] for m in plan.modules}, rest, frozenset(tied or ()))


def _on_disk(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes by the names in a checkpoint, which stores experts one by one: [E, 2F, D] -> E gate, E up [F, D]."""
    out: dict[str, tuple[int, ...]] = {}
    for name, value in model.state_dict().items():
        head, _, last = name.rpartition(".")
        if value.ndim != 3 or last not in ("gate_up_proj", "down_proj"):
            out[name] = tuple(value.shape)
            continue
        experts, n, k = value.shape
        parts, rows = (("gate_proj", "up_proj"), n // 2) if last == "gate_up_proj" else (("down_proj",), n)
        out |= {f"{head}.{e}.{part}.weight": (rows, k) for e in range(experts) for part in parts}
    return out


def meta_model(checkpoint: Checkpoint) -> torch.nn.Module:
    """The architecture of config.json without weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(checkpoint.folder, local_files_only=True)
    if hasattr(config, "quantization_config"):  # an export's: the modules are built as without it
        del config.quantization_config
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return model


def _linear_group(row: SurgeryRow) -> list[Group]:
    """The group of one nn.Linear, made by its first member."""
    head, _, last = row.module.rpartition(".")
    members = group_members(row.module) or (last,)
    if last != members[0]:
        return []
    return [Group(tuple(f"{head}.{m}" if head else m for m in members), engine_name(row.module))]


def _expert_groups(row: SurgeryRow) -> list[Group]:
    out = []
    for expert in range(row.shapes["gate_up_proj"][0]):
        name = f"{row.module}.{expert}"
        out.append(Group((f"{name}.gate_proj", f"{name}.up_proj"), f"{row.module}.w13"))
        out.append(Group((f"{name}.down_proj",), f"{row.module}.w2"))
    return out
