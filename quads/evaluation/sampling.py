"""Draw what is missing in the generation cache. No engine and no torch here.

    problems x samples, minus what the store holds, minus other shards' problems -> store (quads.evaluation.generations)

Contract: samples are drawn in chunks; a chunk is forced to disk before the next one starts, so that a kill costs at
most one chunk. A sample depends on (evaluation seed, problem, sample), never on its place in the batch or on the shard.
Grading is not done here: it needs no engine (quads.evaluation.grading).
Differs from generating in one call in that the file, not the process, holds the progress.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from quads.evaluation.generations import Generation, Shard, Store, sample_seed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sample:
    """What an engine returns for one request; log-probs in nats, one per token."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


@dataclass(frozen=True)
class Prompt:
    """One prompt as the engine gets it, and its text for the record."""

    text: str
    token_ids: tuple[int, ...]

    @property
    def request(self) -> str:
        """16 hex digits over the token ids."""
        return hashlib.sha256(json.dumps(self.token_ids).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Wanted:
    """One sample to draw."""

    problem: str
    sample: int
    request: str


class Sampler(Protocol):
    """The part of an engine that is needed here."""

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Sample]: ...


def wanted(requests: Mapping[str, str], samples: Mapping[str, int]) -> list[Wanted]:
    """Every sample of an evaluation: `samples[problem]` of each problem in `requests` (problem -> request)."""
    return [Wanted(p, s, request) for p, request in requests.items() for s in range(samples[p])]


def missing(store: Store, samples: Sequence[Wanted], shard: Shard | None = None) -> list[Wanted]:
    """Those not in the store, of this shard's problems."""
    return [
        w
        for w in samples
        if (w.problem, w.sample, w.request) not in store.done and (shard is None or shard.holds(w.problem))
    ]


def collect(
    engine: Sampler,
    todo: Sequence[Wanted],
    prompts: Mapping[str, Prompt],
    store: Store,
    *,
    seed: int,
    decode: Callable[[list[int]], str],
    chunk: int,
    label: str,
) -> None:
    """Draw `todo`, `chunk` samples at a time, and log progress with the expected rest in seconds."""
    start = time.monotonic()
    for first in range(0, len(todo), chunk):
        batch = todo[first : first + chunk]
        seeds = [sample_seed(seed, w.problem, w.sample) for w in batch]
        samples = engine.generate([prompts[w.problem].token_ids for w in batch], seeds)
        if len(samples) != len(batch):
            raise RuntimeError(f"{label}: the engine returned {len(samples)} samples for {len(batch)} requests")
        store.append(
            _generation(w, s, sample, prompts[w.problem].text, decode)
            for w, s, sample in zip(batch, seeds, samples, strict=True)
        )
        drawn, spent = first + len(batch), time.monotonic() - start
        rest = spent / drawn * (len(todo) - drawn)
        log.info("%s %d/%d samples | %.0f s, about %.0f s left", label, drawn, len(todo), spent, rest)


def _generation(w: Wanted, seed: int, sample: Sample, prompt: str, decode: Callable[[list[int]], str]) -> Generation:
    mean = math.fsum(sample.logprobs) / len(sample.logprobs) if sample.logprobs else None
    if mean is not None and not math.isfinite(mean):
        raise ValueError(
            f"problem {w.problem}, sample {w.sample}: log-prob mean is {mean}; the engine's logits are not finite. "
            "Check the checkpoint's weights and the quantization receipt"
        )
    return Generation(
        problem=w.problem,
        sample=w.sample,
        request=w.request,
        seed=seed,
        prompt=prompt,
        text=decode(sample.token_ids),
        tokens=len(sample.token_ids),
        finish_reason=sample.finish_reason,
        logprob_mean=mean,
    )
