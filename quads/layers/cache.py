# SPDX-License-Identifier: Apache-2.0
"""Quantized weights kept from one optimizer step to the next: W(w) is computed once, not once per forward.

    entry[name] = (variant, stamps of the parameters it was computed from, value)      used again while both are equal

Stamp of a plain parameter: identity, version counter, address. Under FSDP2 the parameter seen in a forward is a buffer
that each all-gather refills without touching its version; what the optimizer and a weight load write is the shard, so
the stamp is that of the shard (seen as a DTensor before the model's forward). Besides stamps everything is dropped
after every step of any torch optimizer and after every load_state_dict, which also gives the memory back between
updates. Edits through `.data` reach no counter: call `invalidate` after them; `verify` recomputes and compares.

Where no stamp can be had (an FSDP2 shard not seen yet, a parameter of another type) nothing is kept: the layer
computes anew, and `counts["bypassed"]` says so. Memory: one copy of every quantized weight per process, in the
weight's dtype and unsharded. Differs from `_version` of what a layer holds: FSDP2 preserves it on purpose.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

logger = logging.getLogger(__name__)
_live: weakref.WeakSet[WeightCache] = weakref.WeakSet()


class Source(NamedTuple):
    """A parameter of a swapped layer, by its owner: the tensor object behind the name may change."""

    module: torch.nn.Module
    name: str


class _Entry(NamedTuple):
    stamps: tuple  # variant first
    value: Tensor
    holders: tuple  # the stamped tensors, so that their identities cannot be given to others


class WeightCache:
    """One per model. counts: "computed", "reused", "bypassed" (no stamp), "verified"."""

    def __init__(self, verify: bool = False):
        self.verify = verify
        self.counts: Counter[str] = Counter()
        self._entries: dict[str, _Entry] = {}
        self._shards: dict[tuple[int, str], tuple[torch.nn.Module, Tensor]] = {}
        if not _live:
            _register_once()
        _live.add(self)

    def __deepcopy__(self, memo: dict) -> WeightCache:
        return memo.setdefault(id(self), WeightCache(self.verify))

    def __reduce__(self) -> tuple:
        return WeightCache, (self.verify,)

    @property
    def nbytes(self) -> int:
        """Bytes of all kept values."""
        return sum(entry.value.nbytes for entry in self._entries.values())

    def invalidate(self, *_: object) -> None:
        """Drop everything; also a hook for load_state_dict."""
        self._entries.clear()
        self._shards.clear()

    def see_shards(self, model: torch.nn.Module, *_: object) -> None:
        """Forward pre-hook of the whole model: FSDP2 modules are still sharded here."""
        for module in model.modules():
            if hasattr(module, "quads"):
                for name, parameter in module._parameters.items():
                    if isinstance(parameter, DTensor):
                        self._shards[id(module), name] = (module, parameter)

    def get(self, key: str, variant: Hashable, sources: Sequence[Source], compute: Callable[[], Tensor]) -> Tensor:
        """The kept value of `key`, or compute() when a source or `variant` changed. The result must not be written to.

        variant: what decides the value besides the weights (a format, say); one value is kept per key.

        Raises RuntimeError naming `key` in verify mode when the kept value is not what compute() gives now.
        """
        found = [self._stamp(source) for source in sources]
        if None in found:
            if not self.counts["bypassed"]:
                logger.warning("%s: no reliable version of its weight (FSDP2 shard unseen?); computed anew", key)
            self.counts["bypassed"] += 1
            return compute()
        stamps, holders = zip(*found, strict=True)
        stamps = (variant, *stamps)
        entry = self._entries.get(key)
        if entry is not None and entry.stamps == stamps:
            self.counts["reused"] += 1
            if self.verify:
                self._check(key, entry.value, compute)
            return entry.value
        # A value made in inference mode could not be saved for a later backward.
        with torch.inference_mode(False), torch.no_grad():
            value = compute()
        self.counts["computed"] += 1
        self._entries[key] = _Entry(stamps, value, holders)
        return value

    def _stamp(self, source: Source) -> tuple[tuple, Tensor] | None:
        parameter = source.module._parameters.get(source.name)
        if type(parameter) is not torch.nn.Parameter or parameter.is_inference():
            return None
        holder = counted = parameter
        if any(isinstance(ancestor, FSDPModule) for ancestor in source.module.quads.ancestors):
            seen = self._shards.get((id(source.module), source.name))
            if seen is None:
                return None
            holder = seen[1]
            with torch.no_grad():
                counted = holder.to_local()
        where = (counted.data_ptr(), counted.device, parameter.dtype, parameter.device)
        # An in-place operation on a DTensor counts on the DTensor, one on its local tensor there.
        return (id(holder), holder._version, counted._version, *where), holder

    def _check(self, key: str, kept: Tensor, compute: Callable[[], Tensor]) -> None:
        self.counts["verified"] += 1
        fresh = compute()
        if not torch.equal(kept.contiguous().view(torch.uint8), fresh.contiguous().view(torch.uint8)):
            raise RuntimeError(
                f"{key}: the kept quantized weight is not that of the current weight; it was changed in a way no "
                f"version counter shows (.data, a raw kernel): call invalidate_weight_cache(model) after such an edit"
            )


_registered = False


def _register_once() -> None:
    global _registered
    if not _registered:
        register_optimizer_step_post_hook(_after_step)
        _registered = True


def _after_step(*_: object) -> None:
    for cache in list(_live):
        cache.invalidate()
