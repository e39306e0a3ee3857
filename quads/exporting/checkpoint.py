"""Hugging Face checkpoints as safetensors: read tensor by tensor, written in shards of bounded size.

Memory holds one tensor being read and one shard being written, whatever the size of the model. A folder is complete
when its last file is there: shards first, then the index, then config.json (written by the caller).
Raises CheckpointError naming the folder and what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 << 30


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not hold what is needed; the message says which and what to do."""


class Checkpoint:
    """A folder with config.json and model.safetensors, or shards with an index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = read_json(folder / "config.json")
        if (folder / INDEX).is_file():
            self._files: dict[str, str] = read_json(folder / INDEX).get("weight_map") or {}
            if not self._files:
                raise CheckpointError(f"{folder / INDEX}: no weight_map; copy the folder again")
        elif (folder / SINGLE).is_file():
            self._files = dict.fromkeys(self._held(SINGLE), SINGLE)
        else:
            raise CheckpointError(f"{folder}: neither {SINGLE} nor {INDEX}; give a folder with safetensors weights")
        absent = sorted({name for name in self._files.values() if not (folder / name).is_file()})
        if absent:
            raise CheckpointError(f"{folder}: {INDEX} names {', '.join(absent)}, missing; copy the folder again")
        # headers only; a torn file is found here and not in the middle of an export
        held = {name: self._held(name) for name in set(self._files.values())}
        lost = sorted(tensor for tensor, name in self._files.items() if tensor not in held[name])
        if lost:
            raise CheckpointError(
                f"{folder}: {INDEX} places {lost[0]} ({len(lost)} in all) in a file without it; copy the folder again"
            )

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        with self._open(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def get(self, name: str) -> Tensor:
        """One tensor on the CPU, in its stored dtype."""
        with self._open(name) as file:
            value: Tensor = file.get_tensor(name)
            return value

    def _held(self, file_name: str) -> set[str]:
        with _opened(self.folder / file_name) as file:
            return set(file.keys())

    @contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        if name not in self._files:
            raise CheckpointError(f"{self.folder}: no tensor {name!r}; it holds {', '.join(self.names()[:4])}, ...")
        with _opened(self.folder / self._files[name]) as file:
            yield file

    def data_bytes(self) -> int:
        """Bytes of tensor data in all files: their sizes without the headers."""
        total = 0
        for name in set(self._files.values()):
            with (self.folder / name).open("rb") as file:
                header = int.from_bytes(file.read(8), "little")
            total += (self.folder / name).stat().st_size - 8 - header
        return total

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor, by name."""
        for name in self.names():
            yield name, self.get(name)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file. Raises CheckpointError for one that is cut off or damaged."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise CheckpointError(f"{path}: damaged or cut off ({error}); copy or write the file again") from None


class ShardWriter:
    """Collects tensors and writes `model-00001.safetensors`, ...; `close` writes the index and returns the bytes."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder, self.limit = folder, shard_bytes
        self._held: dict[str, Tensor] = {}
        self._bytes = self.total = 0
        self._map: dict[str, str] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Take one tensor; names must not repeat."""
        if name in self._held or name in self._map:
            raise CheckpointError(f"{self.folder}: tensor {name!r} written twice")
        size = value.numel() * value.element_size()
        if self._held and self._bytes + size > self.limit:
            self._flush()
        self._held[name] = value.detach().cpu().contiguous()
        self._bytes += size
        self.total += size

    def _flush(self) -> None:
        if not self._held:
            return
        name = f"model-{len(set(self._map.values())) + 1:05d}.safetensors"
        # vLLM and transformers read this mark; without it some versions refuse the file
        save_file(self._held, self.folder / name, metadata={"format": "pt"})
        (self.folder / name).chmod(0o644)  # save_file leaves it readable for the owner alone
        self._map |= dict.fromkeys(self._held, name)
        self._held, self._bytes = {}, 0

    def close(self) -> int:
        """Write what is held, then the index; returns the bytes of all tensors."""
        self._flush()
        index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(self._map.items()))}
        (self.folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        return self.total


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError."""
    try:
        loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: unusable ({error}); give the folder of a Hugging Face checkpoint") from None
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(loaded).__name__}")
    return loaded
