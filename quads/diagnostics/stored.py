"""Checkpoint folders as captures see them: their weight version, and a copy with the values that an engine stores."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quads.config import ConfigError


def checkpoint_sha256(checkpoint: Path) -> str:
    """Weight version: over names and bytes of config.json and every .safetensors. Raises ConfigError without any."""
    files = sorted([*checkpoint.glob("*.safetensors"), *checkpoint.glob("config.json")])
    if not any(p.suffix == ".safetensors" for p in files):
        raise ConfigError(f"{checkpoint} holds no .safetensors file: not a checkpoint")
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Of one file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def bf16_copy(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint with every float tensor rounded to bf16, made once in `folder`; itself when it is that already.

    A float32 engine on it differs from a bf16 engine in arithmetic alone: it stores the same values.
    """
    files = sorted(checkpoint.glob("*.safetensors"))
    if (folder / "done").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    changed = False
    for file in files:
        tensors = load_file(file)
        rounded = {k: t.to(torch.bfloat16) if t.is_floating_point() else t for k, t in tensors.items()}
        changed |= any(tensors[k].dtype != t.dtype for k, t in rounded.items())
        save_file(rounded, folder / file.name, metadata={"format": "pt"})
    if not changed:
        shutil.rmtree(folder)
        return checkpoint
    for file in checkpoint.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, folder)
    (folder / "done").touch()
    return folder
