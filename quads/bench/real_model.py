# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of real size with random weights, layer by layer: for costs and numerics, never for accuracy.

    python -m quads.bench.real_model --experiment configs/real_size.yaml --out DIR [--layers N] [--device cuda]
    python -m quads.bench.real_model --experiment configs/real_size.yaml --out DIR --layers N --first-of LARGER
    -> DIR: config.json, tokenizer, one safetensors shard per decoder layer and one for the rest (bfloat16, one tensor
       per expert and projection, Hugging Face's Qwen3-MoE names), then manifest.json

Values: the toy's initialisation (quads.toy.model) with the outlier channels of quads.toy.outliers, each layer from a
seed of its own, so that the first N layers of a deeper model are a model too (`--first-of` links them). The vocabulary
is padded to VOCABULARY with words that no prompt holds, because the head's cost belongs to the size. On a GPU: 30
billion parameters take the time of writing them.
Differs from `quads.warmup` in that no whole model is ever in memory and nothing is trained.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from quads.config import ConfigError, Experiment, Model, Outliers, load_experiment
from quads.files import ResultFileError, read_result, write_json_atomic

log = logging.getLogger("quads.bench.real_model")

VOCABULARY = 151_936  # Qwen3's
CONTEXT = 40_960
REST = "model-rest.safetensors"
INDEX = "model.safetensors.index.json"
WRITERS = 4  # a shard is 1.2 GB at 30B-A3B


def layer_file(index: int) -> str:
    """Shard of one decoder layer."""
    return f"model-layer{index:03d}.safetensors"


def make_config(model: Model, layers: int) -> Any:
    """transformers' configuration: the toy's, with the vocabulary and context of a real model."""
    from quads.toy import model as toy

    config = toy.make_config(model)
    config.vocab_size, config.max_position_embeddings, config.num_hidden_layers = VOCABULARY, CONTEXT, layers
    config.dtype = "bfloat16"
    config.architectures = ["Qwen3MoeForCausalLM"]
    return config


def layer_tensors(config: Any, index: int, outliers: Outliers, seed: int, device: str) -> Iterator[tuple[str, Any]]:
    """(name on disk, bfloat16 tensor on the CPU) of decoder layer `index`; fills it on `device` in float32."""
    import torch
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

    from quads.toy.model import init_std
    from quads.toy.outliers import inject

    with torch.device("meta"):
        layer = Qwen3MoeDecoderLayer(config, index)
    layer = layer.to_empty(device=device).float()
    generator = torch.Generator(device).manual_seed(seed + 1 + index)
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, init_std(name, weight, config.num_hidden_layers), generator=generator)
    inject(SimpleNamespace(model=SimpleNamespace(layers=[layer])), outliers.model_copy(update={"seed": seed + index}))
    for name, weight in layer.named_parameters():
        stored = weight.detach().to(torch.bfloat16).cpu()
        for part, tensor in on_disk(name, stored):
            yield f"model.layers.{index}.{part}", tensor.contiguous()


def on_disk(name: str, weight: Any) -> Iterator[tuple[str, Any]]:
    """transformers' fused experts [E, 2F, D], [E, D, F] as one tensor per expert and projection; others as they are."""
    if name.endswith("experts.gate_up_proj"):
        stem, half = name.removesuffix(".gate_up_proj"), weight.shape[1] // 2
        for e, both in enumerate(weight):
            yield f"{stem}.{e}.gate_proj.weight", both[:half]
            yield f"{stem}.{e}.up_proj.weight", both[half:]
    elif name.endswith("experts.down_proj"):
        stem = name.removesuffix(".down_proj")
        for e, one in enumerate(weight):
            yield f"{stem}.{e}.down_proj.weight", one
    else:
        yield name, weight


def rest_tensors(config: Any, seed: int, device: str) -> dict[str, Any]:
    """Embedding, last norm and head."""
    import torch

    from quads.toy.model import init_std

    generator = torch.Generator(device).manual_seed(seed)
    made = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weight = torch.empty(config.vocab_size, config.hidden_size, device=device)
        weight.normal_(0.0, init_std(name, weight, config.num_hidden_layers), generator=generator)
        made[name] = weight.to(torch.bfloat16).cpu()
    made["model.norm.weight"] = torch.ones(config.hidden_size, dtype=torch.bfloat16)
    return made


def write_shards(config: Any, outliers: Outliers, seed: int, device: str, out: Path) -> dict[str, str]:
    """All shards, a few written at a time while the next is made; name of tensor -> shard."""
    from safetensors.torch import save_file

    places: dict[str, str] = {}
    waiting: list[Future] = []
    started = time.monotonic()

    def write(tensors: dict[str, Any], name: str) -> None:
        save_file(tensors, out / f"{name}.part", metadata={"format": "pt"})
        os.replace(out / f"{name}.part", out / name)

    with ThreadPoolExecutor(WRITERS) as pool:
        for index in range(-1, config.num_hidden_layers):
            name = REST if index < 0 else layer_file(index)
            made = (
                rest_tensors(config, seed, device)
                if index < 0
                else dict(layer_tensors(config, index, outliers, seed, device))
            )
            places |= dict.fromkeys(made, name)
            waiting.append(pool.submit(write, made, name))
            del made
            if len(waiting) > WRITERS:  # bounded memory: a slow disk holds the GPU back
                waiting.pop(0).result()
            done, seconds = index + 2, time.monotonic() - started
            left = seconds / done * (config.num_hidden_layers + 1 - done)
            log.info("%s, %d of %d, ETA %.0f s", name, done, config.num_hidden_layers + 1, left)
        for one in waiting:
            one.result()
    return places


def check_source(source: Path, experiment: Experiment, out: Path) -> None:
    """Raises ConfigError unless `source` is another folder, finished, of the same sizes, outliers and seed."""
    if source.resolve() == out.resolve():
        raise ConfigError(f"--first-of {source} is --out itself, whose files it would replace; give another --out")
    try:
        made = json.loads((source / "manifest.json").read_text())
        found = {key: made[key] for key in ("model", "outliers", "seed")}
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{source} has no manifest of quads.bench.real_model; give a finished folder of it") from None
    wanted = described(experiment, found["model"].get("layers"))
    if differ := [key for key in wanted if wanted[key] != found[key]]:
        raise ConfigError(
            f"{source} was made with another {differ[0]}: {found[differ[0]]}, {experiment.name} says "
            f"{wanted[differ[0]]}; give a folder made from this experiment"
        )


def described(experiment: Experiment, layers: int) -> dict[str, Any]:
    """What decides the values of a checkpoint of this many layers."""
    return {
        "model": experiment.model.model_dump(mode="json") | {"layers": layers, "vocabulary": VOCABULARY},
        "outliers": experiment.warmup.outliers.model_dump(mode="json"),
        "seed": experiment.warmup.seed,
    }


def link_shards(source: Path, layers: int, out: Path) -> dict[str, str]:
    """The first `layers` layers of `source` as links. Raises ConfigError when it has fewer."""
    index = read_result(source / INDEX, "index of shards", ("weight_map",))["weight_map"]
    wanted = {REST, *(layer_file(i) for i in range(layers))}
    if missing := sorted(name for name in wanted if not (source / name).is_file()):
        raise ConfigError(
            f"{source} has no {missing[0]}; give a model of at least {layers} layers made by this program"
        )
    for name in wanted:
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to((source / name).resolve())
    return {tensor: shard for tensor, shard in index.items() if shard in wanted}


def make(experiment: Experiment, layers: int, device: str, out: Path, source: Path | None = None) -> dict[str, Any]:
    """Write the checkpoint; returns its manifest. Raises ConfigError."""
    from quads.toy.tokenizer import make_tokenizer

    started = time.monotonic()
    free = shutil.disk_usage(out.parent if out.parent.is_dir() else Path()).free
    config = make_config(experiment.model, layers)
    seed, outliers = experiment.warmup.seed, experiment.warmup.outliers
    parameters = count(experiment.model, layers)
    if source is None and free < 2 * parameters:
        raise ConfigError(
            f"{out}: {2 * parameters / 1e9:.0f} GB are needed, {free / 1e9:.0f} GB are free; give another --out or "
            "fewer --layers"
        )
    if source is None and device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("torch sees no CUDA device here; make the model with --device cpu, which takes longer")
    if source is not None:
        check_source(source, experiment, out)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("manifest.json", INDEX):
        (out / name).unlink(missing_ok=True)
    config.save_pretrained(out)
    # A sampled id must have a text, whatever it is.
    make_tokenizer(VOCABULARY).save_pretrained(out)
    places = (
        link_shards(source, layers, out) if source is not None else write_shards(config, outliers, seed, device, out)
    )
    total = {"total_size": 2 * parameters}
    write_json_atomic(out / INDEX, {"metadata": total, "weight_map": places})
    return {
        **described(experiment, layers),
        "parameters": parameters,
        "first_of": str(source) if source is not None else None,
        "seconds": round(time.monotonic() - started, 1),
    }


def count(model: Model, layers: int) -> int:
    """Parameters of the model with this many layers."""
    heads, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    attention = model.hidden * (2 * heads + 2 * kv) + 2 * model.head_dim
    experts = model.experts * 3 * model.hidden * model.expert_hidden
    layer = attention + experts + model.experts * model.hidden + 2 * model.hidden
    return layers * layer + 2 * VOCABULARY * model.hidden + model.hidden


def main(argv: list[str] | None = None) -> int:
    """Parse, make, write the manifest last; 1 with a message on a known error."""
    parser = argparse.ArgumentParser(prog="python -m quads.bench.real_model", description=__doc__.split("\n\n")[0])
    parser.add_argument("--experiment", type=Path, required=True, help="configs/NAME.yaml; its model and outliers")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="default: those of the experiment")
    parser.add_argument("--first-of", type=Path, help="link the first layers of this checkpoint instead of making any")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: runtime.device")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        experiment = load_experiment(args.experiment.stem, configs=args.experiment.parent)
        layers = experiment.model.layers if args.layers is None else args.layers
        if layers < 1:
            raise ConfigError(f"--layers {layers}: at least one layer is needed")
        device = args.device or experiment.runtime.device
        manifest = make(experiment, layers, device, args.out, args.first_of)
    except (ConfigError, ResultFileError, OSError) as error:
        log.error("%s", error)
        return 1
    write_json_atomic(args.out / "manifest.json", manifest)
    log.info("%.2f billion parameters in %s s: %s", manifest["parameters"] / 1e9, manifest["seconds"], args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
