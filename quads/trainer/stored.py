# SPDX-License-Identifier: Apache-2.0
"""A checkpoint in another dtype than its files': read as stored, then widened.

bfloat16 -> float32 is exact, so the parameters are the same to the last bit. Only the way differs: asked for float32,
transformers converts each expert's matrix while it fuses them, on one thread, which took 28 s for 1.9 billion
parameters on two cores where reading them as stored took 2.2 s and widening another 2.2 s. Read as asked: files of
another dtype than bfloat16, or of several, and models that compute a buffer in the dtype they are read in (Gemma's
`embed_scale` is sqrt(D), rounded to it). Rotary frequencies are float32 at every dtype.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from quads.files import SHARD_INDEX, indexed_shards


def shards(checkpoint: str | Path) -> list[Path]:
    """The safetensors files that from_pretrained reads; others in the folder (adapters, a vendor's own) are not."""
    folder = Path(checkpoint)
    if (whole := folder / "model.safetensors").is_file():
        return [whole]
    return [folder / name for name in indexed_shards(folder)] if (folder / SHARD_INDEX).is_file() else []


def stored_dtypes(checkpoint: str | Path) -> set[str]:
    """safetensors' names ("BF16", "F32") of the dtypes of a checkpoint's tensors; empty without safetensors files."""
    found: set[str] = set()
    for path in shards(checkpoint):
        with safe_open(path, "pt") as file:
            found |= {file.get_slice(name).get_dtype() for name in file.keys()}
    return found


def load_widened(auto_class: Any, checkpoint: str | Path, dtype: torch.dtype, **more: Any) -> Any:
    """`auto_class.from_pretrained(checkpoint, dtype=dtype, **more)`, by the faster way where it is exact."""
    exact = dtype == torch.float32 and stored_dtypes(checkpoint) == {"BF16"}
    if exact:
        model = auto_class.from_pretrained(str(checkpoint), dtype=torch.bfloat16, **more)
        if all(buffer.dtype == dtype for buffer in model.buffers() if buffer.is_floating_point()):
            model.to(dtype).config.dtype = dtype
            return model
        del model  # two of them need not be in memory at once
    return auto_class.from_pretrained(str(checkpoint), dtype=dtype, **more)
