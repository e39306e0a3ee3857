"""A Hugging Face folder as a source of single parameters: nothing is in memory until one layer asks for it.

    skeleton     the transformers model on the meta device: every module, no values
    parameter    name in transformers -> tensor(s) on disk:
                 ...mlp.experts.gate_up_proj [E, 2F, D]   experts.{e}.gate_proj, up_proj (Mixtral: w1, w3), or fused
                 ...mlp.experts.down_proj    [E, D, F]    experts.{e}.down_proj (Mixtral: w2), or fused
                 lm_head.weight                           embed_tokens.weight when tied

E experts, D width, F expert width. Quantized weights are held in bf16, their first rounding in any format
(quads.numerics.qdq); everything else in float32. All names and shapes are checked before the first value is read;
values are checked for NaN and infinity as they are read, by the name on disk.
Differs from from_pretrained, which fills the whole model. The families of SUPPORTED were read: their decoder is
embedding, layers, norm, head and nothing else, which the layer-by-layer pass relies on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quads.config import ConfigError
from quads.layers.surgery import QuadsLinear, quads_layers
from quads.numerics.qdq import check_finite

SUPPORTED = (
    "Qwen3MoeForCausalLM",
    "OlmoeForCausalLM",
    "MixtralForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
INDEX = "model.safetensors.index.json"
_EXPERTS = re.compile(r"^(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")
# (container on disk, gate, up, down): transformers' common names, then Mixtral's.
_ON_DISK = (
    (".mlp.experts", "gate_proj", "up_proj", "down_proj"),
    (".block_sparse_moe.experts", "w1", "w3", "w2"),
)
_NO_WEIGHT = re.compile(r"rotary_emb\.inv_freq$")


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a supported, unquantized checkpoint. Raises ConfigError for anything else."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give the folder of a Hugging Face checkpoint")
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder}: no config.json, so this is no Hugging Face checkpoint; give the folder that has it"
        )
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(config).__name__}; give a checkpoint's folder")
    names = config.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1 or names[0] not in SUPPORTED:
        raise ConfigError(
            f"{path}: architectures={names} is not supported; known: {', '.join(SUPPORTED)}. Another family needs its "
            f"forward read and its name added in quads.diagnostics.preflight.checkpoint"
        )
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise ConfigError(
            f"{path}: the checkpoint is quantized already ({method}); give the bf16 one, what "
            f"its quantization costs is the question here"
        )
    return config


def make_skeleton(folder: Path) -> torch.nn.Module:
    """The model on the meta device, in eval mode, with a real rotary embedding. Raises ConfigError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    read_config(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    except Exception as error:  # values of config.json: transformers and its helpers have many classes for them
        raise ConfigError(f"{folder / 'config.json'}: transformers cannot build the model: {error}") from error
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)  # its buffers are on no disk
    return model.eval()


def _files(folder: Path) -> dict[str, Path]:
    """Tensor name on disk -> its file."""
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{index} is damaged: {error!r}") from None
        missing = sorted({file for file in weight_map.values() if not (folder / file).is_file()})
        if missing:
            raise ConfigError(f"{index} names {len(missing)} missing shard(s): {', '.join(missing[:5])}; fetch them")
        return {name: folder / file for name, file in weight_map.items()}
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with _opened(path) as handle:
            found |= dict.fromkeys(handle.keys(), path)
    if not found:
        raise ConfigError(f"{folder}: no *.safetensors and no {INDEX}; save the model with save_pretrained")
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is damaged or is no safetensors file: {error}") from None


class Checkpoint:
    """See the module docstring. Raises ConfigError when names or shapes on disk do not fit the skeleton."""

    def __init__(self, folder: Path, skeleton: torch.nn.Module) -> None:
        self.folder, self.skeleton = folder, skeleton
        self.files = _files(folder)
        self._handles: dict[Path, Any] = {}
        self._weights = {
            f"{name}.{parameter}"
            for name, module in quads_layers(skeleton)
            for parameter in (("weight",) if isinstance(module, QuadsLinear) else ("gate_up_proj", "down_proj"))
        }
        self._check_names()
        self._check_shapes()

    def _parts(self, name: str) -> list[list[str]] | None:
        """Tensors on disk that make up a parameter: [[w]] or, for experts, one list per expert (gate, up | down)."""
        if name in self.files:
            return [[name]]
        if name == "lm_head.weight" and self.skeleton.config.tie_word_embeddings:
            return [["model.embed_tokens.weight"]]
        if name.endswith(".mlp.gate.weight"):
            other = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
            return [[other]] if other in self.files else None
        match = _EXPERTS.match(name)
        if match is None:
            return None
        count = len(self.skeleton.get_parameter(name))
        for container, gate, up, down in _ON_DISK:
            stem = match[1].removesuffix(".mlp.experts") + container
            members = (gate, up) if match[2] == "gate_up_proj" else (down,)
            parts = [[f"{stem}.{e}.{member}.weight" for member in members] for e in range(count)]
            if parts[0][0] in self.files:
                return parts
        return None

    def _check_names(self) -> None:
        missing, used = [], set()
        for name, _ in self.skeleton.named_parameters():
            parts = [part for group in self._parts(name) or [[name]] for part in group]
            missing += [part for part in parts if part not in self.files]
            used |= set(parts)
        if missing:
            raise ConfigError(
                f"{self.folder}: {len(missing)} tensor(s) of {type(self.skeleton).__name__} are not on disk, first "
                f"{', '.join(missing[:3])}; the download is incomplete or config.json is another model's"
            )
        extra = sorted(name for name in set(self.files) - used if not _NO_WEIGHT.search(name))
        if extra and not (extra == ["lm_head.weight"] and self.skeleton.config.tie_word_embeddings):
            raise ConfigError(
                f"{self.folder}: {len(extra)} tensor(s) on disk that {type(self.skeleton).__name__} does not use, "
                f"first {', '.join(extra[:3])}; config.json is another model's"
            )

    def _check_shapes(self) -> None:
        by_file: dict[Path, list[tuple[str, list[int]]]] = {}
        for name, parameter in self.skeleton.named_parameters():
            parts = self._parts(name) or []
            want = list(parameter.shape)
            if parts != [[name]] and _EXPERTS.match(name):
                want = [want[1] // len(parts[0]), *want[2:]]
            for part in (part for group in parts for part in group):
                by_file.setdefault(self.files[part], []).append((part, want))
        for path, expected in by_file.items():
            with _opened(path) as handle:
                inside = set(handle.keys())
                for part, want in expected:
                    if part not in inside:
                        raise ConfigError(f"{path}: the index says it holds {part}, it does not; fetch the shard again")
                    got = list(handle.get_slice(part).get_shape())
                    if got != want:
                        raise ConfigError(f"{path}: {part} has shape {got}, config.json asks for {want}")

    def _read(self, part: str) -> Tensor:
        path = self.files[part]
        if path not in self._handles:
            # Kept open while a module is read: parsing the header again for every expert would cost minutes.
            self._handles[path] = safe_open(path, "pt").__enter__()
        value: Tensor = self._handles[path].get_tensor(part)
        if not value.is_floating_point():
            raise ConfigError(f"{self.files[part]}: {part} is {value.dtype}, expected a float tensor")
        try:
            check_finite(value, part)
        except ValueError as error:
            raise ConfigError(f"{self.files[part]}: {error}") from None
        return value

    def parameter(self, name: str, device: str) -> Tensor:
        """The values of a transformers parameter: bf16 for weights that surgery swapped, else float32."""
        dtype = torch.bfloat16 if name in self._weights else torch.float32
        parts = self._parts(name)
        assert parts is not None
        if len(parts) == 1 and len(parts[0]) == 1 and not (_EXPERTS.match(name) and parts[0][0] != name):
            return self._read(parts[0][0]).to(device, dtype)
        whole = torch.empty(self.skeleton.get_parameter(name).shape, dtype=dtype, device=device)
        for expert, members in enumerate(parts):
            for member, rows in zip(members, whole[expert].chunk(len(members)), strict=True):
                rows.copy_(self._read(member))
        return whole

    def close(self) -> None:
        """Unmap the files: their pages would count as this process's memory."""
        for handle in self._handles.values():
            handle.__exit__(None, None, None)
        self._handles.clear()

    @contextmanager
    def materialised(self, prefix: str, device: str) -> Iterator[torch.nn.Module]:
        """The skeleton's module `prefix` with values on `device`; on leaving it is on the meta device again."""
        module = self.skeleton.get_submodule(prefix)
        places = [(m, f"{prefix}.{n}".removesuffix(".")) for n, m in module.named_modules()]
        meta: list[tuple[torch.nn.Module, str, Any]] = []
        try:
            for owner, path in places:
                for name, parameter in list(owner._parameters.items()):
                    if parameter is not None:
                        value = self.parameter(f"{path}.{name}", device)
                        owner._parameters[name] = torch.nn.Parameter(value, requires_grad=False)
                        meta.append((owner, name, parameter))
            self.close()
            left = [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if tensor.is_meta]
            if left:
                raise ConfigError(f"{prefix}: buffer(s) {left} are on no disk; this family needs its own set-up")
            yield module
        finally:
            for owner, name, parameter in meta:
                owner._parameters[name] = parameter
