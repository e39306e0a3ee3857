# SPDX-License-Identifier: Apache-2.0
"""One engine's answers to the same prompts, for the comparison of two backends (quads.parity).

    observe(...) -> {"tokens": [[int]], "decode": [[log-prob]], "top": [[{token: log-prob}]], "receipt": {...}}
    then, in the same engine, the log-probs of given sequences by prefill: {"prefill": [[log-prob]]}

Greedy decoding of exactly `response` tokens (end tokens are ignored), after one whole weight update with masks, as in
training: with CUDA graphs, steps are then replayed on weights that arrived after the capture.
Contract: as quads.integrations.vllm.generate.Engine; log-probs are raw (before any temperature), natural.
Differs from the two-engine tests in that engine, backend and graphs are those of an experiment, on any checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quads.config import Evaluation, Runtime
from quads.integrations.vllm.generate import Engine, EngineError
from quads.integrations.vllm.update import whole_update
from quads.rollout.mode import RolloutMode

log = logging.getLogger(__name__)

TOP = 20  # candidates kept of every step, to say how close the other engine's token was; vLLM gives no more


class ParityEngine(Engine):
    """A greedy engine of one backend, refreshed once from its own checkpoint."""

    def __init__(
        self, model: Path, mode: RolloutMode, runtime: Runtime, *, skip: Sequence[str], receipt: Path, prompt: int,
        response: int,
    ) -> None:  # fmt: skip
        super().__init__(
            model,
            mode.to_quantization_config("sync" if mode.needs_masks else None, tuple(skip)),
            mode=mode.name,
            receipt=receipt,
            runtime=runtime,
            sampling=Evaluation(temperature=0.0, top_p=1.0),
            max_tokens=response,
            max_model_len=prompt + response + 1,  # scoring draws one token that nobody reads
        )

    def _arguments(self) -> dict[str, Any]:
        return super()._arguments() | {"skip_tokenizer_init": True}

    def refresh(self, masks: Path | None) -> None:
        """One whole weight update from the checkpoint, with the masks of the file or random ones."""
        from quads.integrations.vllm.reload import layerwise_reload

        device = "cpu" if self.runtime.device == "cpu" else "cuda"
        layerwise_reload(self.runner, whole_update(self.model, self.runner.get_model(), masks, device))

    def greedy(self, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """{"tokens", "decode", "top"} of `max_tokens` greedy tokens per prompt."""
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0.0, max_tokens=self.max_tokens, ignore_eos=True, logprobs=TOP, detokenize=False
        )
        outputs = self._llm.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
        said: dict[str, Any] = {"tokens": [], "decode": [], "top": []}
        for output in (o.outputs[0] for o in outputs):
            ids = [int(t) for t in output.token_ids]
            if len(ids) != self.max_tokens:
                raise EngineError(f"asked for {self.max_tokens} tokens, got {len(ids)} ({output.finish_reason})")
            said["tokens"].append(ids)
            said["decode"].append([float(step[t].logprob) for step, t in zip(output.logprobs, ids, strict=True)])
            said["top"].append([{int(t): float(v.logprob) for t, v in step.items()} for step in output.logprobs])
        return said


def observe(
    start: Callable[[], ParityEngine],
    prompts: Sequence[Sequence[int]],
    masks: Path | None,
    reference: Sequence[Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Start an engine, refresh it, decode greedily, score prompts + `reference` (default: its own tokens), stop it."""
    began = time.monotonic()
    with start() as engine:
        ready = time.monotonic() - began
        engine.refresh(masks)
        said = engine.greedy(prompts)
        answers = said["tokens"] if reference is None else reference
        whole = [[*p, *a] for p, a in zip(prompts, answers, strict=True)]
        said["prefill"] = engine.score(whole, [len(p) for p in prompts])
        said["receipt"] = {key: engine.receipt.get(key) for key in ("backend", "execution", "backend_check")}
    said["seconds"] = {"start": round(ready, 2), "all": round(time.monotonic() - began, 2)}
    log.info("backend %s: %s", engine.runtime.rollout_backend, said["seconds"])
    return said
