"""A stand-in for the vLLM engine: the trainer's own model, emulating the mode, with everything rounded to bf16."""

from __future__ import annotations

from typing import ClassVar

import torch

from quads.diagnostics import capture
from quads.diagnostics.ladder import Tokens, load_model, score
from quads.evaluation.sampling import Sample
from quads.layers.blocks import recorded
from quads.trainer.weights import compare_weights


class FakeEngine:
    """Random responses of 2 to 4 tokens; log-probs of the surgery model with everything rounded to bf16."""

    starts: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, mode: capture.EngineMode, dtype: str, masks, checkpoint) -> None:
        from safetensors.torch import load_file

        self.starts.append((mode.id, dtype))
        self.receipt = {"backend": "fake", "counts": {}}
        loaded = load_file(masks) if masks else None
        self.model = load_model(checkpoint, mode.trainer, masks=loaded, stored=dtype == "bfloat16")

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        return None

    def generate(self, prompts, seeds):
        responses = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            count = int(torch.randint(2, 5, (1,), generator=generator))
            responses.append(torch.randint(2, 43, (count,), generator=generator).tolist())
        whole = [[*p, *r] for p, r in zip(prompts, responses, strict=True)]
        scored = self.score(whole, [len(p) for p in prompts])
        return [Sample(r, logps, "stop") for r, logps in zip(responses, scored, strict=True)]

    def _scored(self, sequences, starts, routing=False):
        length = torch.tensor([len(s) for s in sequences])
        ids = torch.zeros(len(sequences), int(length.max()), dtype=torch.long)
        for b, sequence in enumerate(sequences):
            ids[b, : len(sequence)] = torch.tensor(sequence)
        tokens = Tokens(ids, torch.tensor(starts), length)
        return tokens, score(self.model, tokens, routing=routing)

    def score(self, sequences, starts):
        tokens, scored = self._scored(sequences, starts)
        return [row[keep].tolist() for row, keep in zip(scored.logp, tokens.mask, strict=True)]

    def routing(self, sequence, start):
        _, scored = self._scored([sequence], [start], routing=True)
        return scored.logp[0].tolist(), scored.routed[0]

    def hidden(self, sequence):
        with recorded(self.model) as kept, torch.no_grad():
            self.model(torch.tensor([sequence]), use_cache=False)
        return {key: parts[0] for key, parts in kept.items()}

    def compare(self, trainer):
        weights = dict(trainer)
        return compare_weights(weights.items(), weights)
