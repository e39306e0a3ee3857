"""An engine that also scores given tokens, shows its routing, and compares its weights: what diagnostics need.

    score(sequences, starts)   log-probs of the tokens from `starts` on, by prefill (vLLM's prompt_logprobs)
    recorded()                 experts that every row of a forward was sent to, per layer, while the block runs
    hidden(sequence)           inputs and outputs of every attention and feed-forward block (quads.layers.blocks)
    compare(trainer weights)   element by element against what the engine multiplies with

Contract: as quads.integrations.vllm.generate.Engine; sampling is at temperature 1 and top_p 1, so that the log-probs
are those of the sampling distribution. Natural logarithms. Always eager; the experiment's backend with bfloat16, the
reference, which alone has it, with float32.
Differs from vLLM's own return of routed experts, which needs model runner V2 and is refused without it: here the
plugin's expert layers are listened to, in the process that holds the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quads.config import Evaluation, Experiment, Runtime
from quads.integrations.vllm.generate import Engine, EngineError
from quads.rollout.mode import RolloutMode


def _scoring(runtime: Runtime, dtype: str) -> dict[str, Any]:
    # Graphs replay without Python, so nothing could be listened to. A float32 engine is the definition.
    backend = runtime.rollout_backend if dtype == "bfloat16" else "reference"
    return {"engine_dtype": dtype, "rollout_graphs": False, "rollout_backend": backend}


class ScoringEngine(Engine):
    """One engine in `mode` from a checkpoint folder; dtype "bfloat16" (as in training) or "float32"."""

    def __init__(
        self,
        model: Path,
        mode: RolloutMode,
        experiment: Experiment,
        *,
        masks: Path | None,
        skip: Sequence[str],
        receipt: Path,
        dtype: str,
        seed: int = 0,
    ) -> None:
        grpo = experiment.grpo
        super().__init__(
            model,
            mode.to_quantization_config(str(masks) if mode.needs_masks else None, tuple(skip)),
            mode=mode.name,
            receipt=receipt,
            runtime=experiment.runtime.model_copy(update=_scoring(experiment.runtime, dtype)),
            sampling=Evaluation(temperature=1.0, top_p=1.0, seed=seed),
            max_tokens=grpo.max_response_tokens,
            # one more than a full response: scoring draws one token that nobody reads
            max_model_len=grpo.max_prompt_tokens + grpo.max_response_tokens + 1,
        )

    def _arguments(self) -> dict[str, Any]:
        has_tokenizer = (self.model / "tokenizer_config.json").is_file()
        return super()._arguments() | {"skip_tokenizer_init": not has_tokenizer}

    def module(self) -> Any:
        """The loaded torch model of this process. Raises EngineError when it lives in another process."""
        return self.runner.get_model()

    @contextmanager
    def recorded(self) -> Iterator[list[list[Any]]]:
        """While the block runs: one list per MoE layer, in model order, of int tensors [rows, S] per forward."""
        from quads.integrations.vllm.moe import QuadsMoEMethod

        methods = [m.quant_method for m in self.module().modules() if hasattr(m, "quant_method")]
        methods = [m for m in methods if isinstance(m, QuadsMoEMethod)]
        calls: list[list[Any]] = [[] for _ in methods]

        def listening(original: Any, layer_calls: list[Any]) -> Any:
            def apply(layer: Any, x: Any, topk_weights: Any, topk_ids: Any, *args: Any, **kwargs: Any) -> Any:
                layer_calls.append(topk_ids.detach().to("cpu", copy=True))
                return original(layer, x, topk_weights, topk_ids, *args, **kwargs)

            return apply

        for method, layer_calls in zip(methods, calls, strict=True):
            method.apply = listening(method.apply, layer_calls)
        try:
            yield calls
        finally:
            for method in methods:
                del method.apply  # uncovers the class's own

    def routing(self, sequence: Sequence[int], start: int) -> tuple[list[float], Any]:
        """One sequence alone: its log-probs from `start` on, and its experts, int16 [T, layers, S] or None.

        None when the model has no MoE layer of this plugin or when vLLM split the prompt over several forwards.
        """
        import torch

        with self.recorded() as calls:
            scored = self.score([sequence], [start])[0]
        # The one drawn token is not fed back, so that every row is a token of the sequence.
        if not calls or any(len(layer) != 1 or len(layer[0]) != len(sequence) for layer in calls):
            return scored, None
        return scored, torch.stack([layer[0] for layer in calls], 1).to(torch.int16)

    def hidden(self, sequence: Sequence[int]) -> dict[str, Any]:
        """One sequence alone, by prefill: float32 [T, D] by key of quads.layers.blocks. Raises EngineError."""
        import torch

        from quads.layers.blocks import recorded

        with recorded(self.module()) as kept:
            self.score([sequence], [len(sequence)])
        whole = {key: torch.cat(parts) for key, parts in kept.items()}
        if wrong := sorted(key for key, x in whole.items() if len(x) != len(sequence)):
            raise EngineError(f"{wrong[0]}: {len(whole[wrong[0]])} rows recorded for {len(sequence)} tokens")
        return whole

    def compare(self, trainer: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """quads.trainer.weights.compare_weights against the weights that this engine multiplies with."""
        from quads.integrations.vllm.reload import engine_weights
        from quads.trainer.weights import compare_weights

        return compare_weights(trainer, engine_weights(self.module()))
