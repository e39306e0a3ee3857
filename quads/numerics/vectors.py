# SPDX-License-Identifier: Apache-2.0
"""What a check of golden vectors is made of: `Vectors`, one npz file's arrays, and `Checks`, the comparisons of a line.

    Vectors   name -> tensor; knows which arrays were read, so that none is passed over silently
    Checks    got against expected: exact, or within a limit per element; keeps the first difference with its index

Which arrays are compared with what: quads.numerics.verify.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class VectorError(Exception):
    """A vector file lacks an array or holds one that does not fit."""


class Vectors:
    """Arrays of one npz file as tensors; remembers which were read, so that none is passed over silently."""

    def __init__(self, path: Path, device: str = "cpu") -> None:
        self._device = device
        with path.open("rb") as file, np.load(file, allow_pickle=False) as npz:
            self._arrays = {name: npz[name] for name in npz.files}
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __getitem__(self, name: str) -> Tensor:
        """Tensor of an array (uint16 *_bf16 arrays become bfloat16). Raises VectorError if the file lacks it."""
        if name not in self._arrays:
            raise VectorError(f"the file lacks array {name!r}")
        self._read.add(name)
        array = self._arrays[name]
        if name.endswith("_bf16") and array.dtype == np.uint16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(self._device)
        return torch.from_numpy(np.asarray(array)).to(self._device)

    def first(self, *names: str) -> Tensor:
        """The first of these arrays that the file holds."""
        return self[next((name for name in names if name in self), names[-1])]

    def bits(self, name: str, shape: torch.Size) -> Tensor:
        """bool tensor of a packbits mask."""
        count = shape.numel()
        flat = np.unpackbits(self[name].cpu().numpy())
        if flat.size < count:
            raise VectorError(f"array {name!r} holds {flat.size} bits, {count} are needed")
        return torch.from_numpy(flat[:count].astype(bool)).view(shape).to(self._device)

    def suffixes(self, *prefixes: str) -> list[str]:
        """Distinct Y of arrays named <prefix>Y, in order of first appearance."""
        found = [n[len(p) :] for n in self._arrays for p in prefixes if n.startswith(p)]
        return list(dict.fromkeys(found))

    def unread(self) -> list[str]:
        """Names of arrays that nobody asked for."""
        return [name for name in self._arrays if name not in self._read]


class Checks:
    """Comparisons behind one output line: keeps the first difference and a list of what was compared."""

    def __init__(self) -> None:
        self.compared: list[str] = []
        self.failure: str | None = None

    def fail(self, message: str) -> None:
        """Record a failure that is not a differing element."""
        self.failure = self.failure or message

    def equal(self, what: str, got: Tensor, expected: Tensor) -> None:
        """Exact equality, shape included; fp32 zeros of either sign are equal, NaN equals NaN."""
        if got.shape != expected.shape:
            self.fail(f"{what}: got shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
            return
        differs = got != expected
        if got.dtype.is_floating_point:
            differs &= ~(got.isnan() & expected.isnan())
        self._report(what, got, expected, differs)

    def close(self, what: str, got: Tensor, expected: Tensor, limit: Tensor) -> None:
        """|got - expected| <= limit elementwise, computed in float64; NaN fails."""
        if not got.shape == expected.shape == limit.shape:
            self.fail(f"{what}: got shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
            return
        differs = ~((got.double() - expected.double()).abs() <= limit.double())
        self._report(what, got, expected, differs)

    def _report(self, what: str, got: Tensor, expected: Tensor, differs: Tensor) -> None:
        self.compared.append(f"{what} {got.numel()}")
        if not bool(differs.any()):
            return
        index = tuple(differs.nonzero()[0].tolist())
        count = f"{int(differs.sum())} of {differs.numel()} differ"
        self.fail(f"{what}{list(index)}: got {_show(got[index])}, expected {_show(expected[index])} ({count})")


def _show(value: Tensor) -> str:
    return f"0x{int(value):02x}" if value.dtype == torch.uint8 else repr(value.item())
