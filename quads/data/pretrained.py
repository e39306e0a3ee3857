"""A pretrained checkpoint where a warm one would lie: fetched at its pinned revision, or linked from a local folder.

    place(checkpoint, out) -> {"files": {name: {"bytes", "sha256"}}, "parameters", "architecture"}

Contract: `out` then holds a complete Hugging Face checkpoint in safetensors (config, tokenizer, every shard that its
index names); weights in other formats and code of the repository are never fetched and never run. Local files are
linked, not copied. Every file is hashed once, here, so that a result can be traced to the bytes it started from.
Differs from handing a hub name to verl: every process of every job would resolve it again, over the network. No torch.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from math import prod
from pathlib import Path
from typing import Any

from quads.config.experiment import Checkpoint
from quads.data.benchmarks.hub import file_sha256
from quads.files import SHARD_INDEX, indexed_shards

log = logging.getLogger(__name__)

WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


def place(checkpoint: Checkpoint, out: Path) -> dict[str, Any]:
    """Bring the checkpoint to `out`. Raises ValueError naming what is missing, OSError where the hub cannot be read."""
    out.mkdir(parents=True, exist_ok=True)
    if checkpoint.path is not None:
        _link(Path(checkpoint.path), out)
    else:
        _download(checkpoint, out)
    return describe(out)


def _link(source: Path, out: Path) -> None:
    if not source.is_dir():
        raise ValueError(f"model.checkpoint.path={str(source)!r}: no such folder; give a Hugging Face checkpoint")
    if out.resolve() in (source.resolve(), *source.resolve().parents) or source.resolve() in out.resolve().parents:
        raise ValueError(
            f"model.checkpoint.path={str(source)!r} and --out {out} lie in one another; give another --out"
        )
    for pattern in WANTED:
        for path in source.glob(pattern):
            link = out / f"{path.name}.part"
            link.unlink(missing_ok=True)
            link.symlink_to(path.resolve())
            os.replace(link, out / path.name)


def _download(checkpoint: Checkpoint, out: Path) -> None:
    import huggingface_hub

    log.info("%s at %s into %s", checkpoint.repo, checkpoint.revision, out)
    try:
        huggingface_hub.snapshot_download(
            repo_id=checkpoint.repo, revision=checkpoint.revision, allow_patterns=list(WANTED), local_dir=out
        )
    except Exception as error:  # network boundary: whatever the client raises means that the hub cannot be read now
        raise OSError(
            f"{checkpoint.repo} at {checkpoint.revision}: the hub cannot be read ({type(error).__name__}: {error}). "
            "On a machine with network run the same command and copy the folder, or set model.checkpoint.path"
        ) from error


def describe(folder: Path) -> dict[str, Any]:
    """Hashes, parameter count and architecture of a complete checkpoint. Raises ValueError when it is not complete."""
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder}: no {name}; a complete Hugging Face checkpoint with its tokenizer is needed")
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    if (folder / SHARD_INDEX).is_file():
        named = indexed_shards(folder)
        if missing := sorted(set(named) - set(shards)):
            raise ValueError(f"{folder}: {SHARD_INDEX} names {len(named)} shards, missing: {', '.join(missing)}")
        shards = named
    if not shards:
        raise ValueError(f"{folder}: no .safetensors file; convert the checkpoint to safetensors")
    config = json.loads((folder / "config.json").read_text())
    files = {}
    for path in sorted(p for pattern in WANTED for p in folder.glob(pattern) if p.name != "manifest.json"):
        size = os.stat(path).st_size
        if size > 1 << 30:
            log.info("hashing %s (%.1f GiB)", path.name, size / 2**30)
        files[path.name] = {"bytes": size, "sha256": file_sha256(path)}
    return {
        "architecture": (config.get("architectures") or ["unknown"])[0],
        "parameters": sum(_parameters(folder / name) for name in shards),
        "files": files,
    }


def _parameters(path: Path) -> int:
    """Elements in one safetensors file, from its header alone."""
    with path.open("rb") as file:
        head = file.read(8)
        if len(head) < 8:
            raise ValueError(f"{path}: {len(head)} bytes, not a safetensors file; fetch it again")
        (length,) = struct.unpack("<Q", head)
        if length > 100 << 20:
            raise ValueError(f"{path}: not a safetensors file (header of {length} bytes); fetch it again")
        header = json.loads(file.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        size = os.fstat(file.fileno()).st_size
        if size != 8 + length + end:
            raise ValueError(f"{path}: {size} bytes, its header says {8 + length + end}: cut off; fetch it again")
    return sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
