"""Sampling from a checkpoint through real vLLM with the quads quantization method.

    with Engine(...) as engine:  engine.generate(prompt token ids, seeds) -> token ids, log-probs, finish reason

Contract: one engine at a time per process; `prepare_environment` runs before the first import of vllm or torch; on
leaving the block the engine is shut down, so that the next one can be built (vLLM is imported once). The plugin's
receipt is read after the model is loaded: an engine that does not hold the asked mode stops the evaluation, because
vLLM without the plugin would silently serve BF16.
Log-probs are vLLM's raw ones (before temperature), natural log, of exactly the sampled tokens.
Differs from vllm.LLM.generate on text in that prompts are token ids and every request has its own seed: a sample
depends on (evaluation seed, problem, sample) and not on its place in the batch.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from quads.config import Evaluation, Runtime
from quads.evaluation.sampling import Sample
from quads.integrations.vllm.execution import capture_sizes, execution_arguments, mismatch, serving_backend
from quads.rollout.device import GPU

log = logging.getLogger(__name__)

# Read by vllm (and OpenMP) at import: set later they do nothing.
_ALWAYS = {
    "HF_HUB_OFFLINE": "1",  # checkpoints are local folders; a lookup would hang where there is no network
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process: one import, receipts, plain tracebacks
    "VLLM_PLUGINS": "quads",
}
_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # vLLM's sampler is decorated with torch.compile: on CPU that calls a C++ compiler at the first token, which costs
    # 15 s of a 34 s evaluation of the toy and fails on a machine without g++. Models run eagerly anyway.
    "TORCHDYNAMO_DISABLE": "1",
}
_UNLESS_SET = {"VLLM_LOGGING_LEVEL": "ERROR"}  # else a hundred lines stand between two progress lines


class EngineError(RuntimeError):
    """The engine does not serve what was asked for; the message says what it serves and what to do."""


def prepare_environment(runtime: Runtime) -> None:
    """Environment variables that vLLM needs on this device. Raises RuntimeError when it is too late for them."""
    wanted = dict(_ALWAYS)
    if runtime.device == "cpu":
        # without these vLLM pins OpenMP threads to cores that other jobs use, and its barriers wait for them
        wanted |= _CPU | {"OMP_NUM_THREADS": str(runtime.threads)}
    else:
        wanted |= GPU
    late = [k for k, v in wanted.items() if os.environ.get(k) != v]
    if late and "vllm" in sys.modules:
        raise RuntimeError(f"vllm is already imported, {', '.join(late)} would be ignored; call this first")
    os.environ.update(wanted)
    for name, value in _UNLESS_SET.items():
        os.environ.setdefault(name, value)


def check_receipt(path: Path, mode: str) -> dict[str, Any]:
    """The plugin's receipt; raises EngineError when it is missing, damaged, or states another mode."""
    if not path.is_file():
        raise EngineError(
            f"no receipt at {path}: the engine runs without the quads plugin and would serve unquantized weights. "
            "Install the project in this environment (pip install -e . --no-deps) so that vLLM finds its entry point "
            "'quads' in the group vllm.general_plugins"
        )
    try:
        receipt: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise EngineError(f"receipt {path} is damaged: {error}; delete it and evaluate again") from None
    if receipt.get("mode") != mode:
        raise EngineError(f"the engine serves mode {receipt.get('mode')!r}, asked for {mode!r} (receipt {path})")
    if not receipt.get("modules"):
        raise EngineError(f"receipt {path} lists no module: the plugin was loaded but handled nothing")
    return receipt


class Engine:
    """One vLLM engine in one rollout mode; a context manager.

    `quantization` is the dict of quads.rollout.mode without `receipt` and `backend`: the first is added here, the other
    is runtime.rollout_backend. `max_tokens` bounds the response; `max_model_len` prompt plus response.
    """

    def __init__(
        self,
        model: Path,
        quantization: Mapping[str, Any],
        *,
        mode: str,
        receipt: Path,
        runtime: Runtime,
        sampling: Evaluation,
        max_tokens: int,
        max_model_len: int,
    ) -> None:
        self.model, self.mode, self.receipt_path = model, mode, receipt
        self.runtime, self.sampling = runtime, sampling
        self.max_tokens, self.max_model_len = max_tokens, max_model_len
        self.quantization = {
            **quantization,
            "receipt": str(receipt.resolve()),
            "backend": serving_backend(mode, runtime.rollout_backend),
        }
        self.receipt: dict[str, Any] = {}
        self._llm: Any = None

    def _arguments(self) -> dict[str, Any]:
        """Every vLLM argument that decides speed or numbers, stated; vLLM's own defaults decide none of them."""
        runtime = self.runtime
        arguments: dict[str, Any] = {
            "model": str(self.model),
            "dtype": runtime.engine_dtype,
            "quantization": "quads",
            "hf_overrides": {"quantization_config": self.quantization},
            "max_model_len": self.max_model_len,
            "max_num_seqs": runtime.max_sequences,
            # chunked prefill splits prompts otherwise, and a floor below max_num_seqs is refused
            "max_num_batched_tokens": max(runtime.max_batched_tokens, runtime.max_sequences),
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "seed": self.sampling.seed,
            **execution_arguments(runtime.rollout_graphs, self._graph_sizes()),
        }
        # Stated in bytes, as in training: by default vLLM takes a share of all memory of the machine, and on a GPU that
        # others use it measures that share while they allocate, which it then takes for an error of its own.
        arguments["kv_cache_memory_bytes"] = runtime.kv_cache_mib << 20
        if runtime.device != "cpu":
            arguments["gpu_memory_utilization"] = runtime.gpu_memory_utilization
        if runtime.attention_backend:
            arguments["attention_backend"] = runtime.attention_backend
        return arguments

    def _graph_sizes(self) -> list[int]:
        return capture_sizes(self.runtime.max_sequences)

    def __enter__(self) -> Self:
        prepare_environment(self.runtime)
        from vllm import LLM

        self.receipt_path.parent.mkdir(parents=True, exist_ok=True)
        self.receipt_path.unlink(missing_ok=True)  # a receipt of an earlier engine proves nothing about this one
        self._llm = LLM(**self._arguments())
        try:
            self.receipt = check_receipt(self.receipt_path, self.mode)
            if wrong := mismatch(self.receipt, self.runtime):
                raise EngineError(f"{wrong} (receipt {self.receipt_path})")
        except EngineError:
            self._shutdown()
            raise
        log.info("engine %s holds %d modules (%s)", self.mode, len(self.receipt["modules"]), self.receipt_path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shutdown()

    def _shutdown(self) -> None:
        """Free the engine and vLLM's global parallel groups; without it the next engine in this process fails."""
        if self._llm is None:
            return
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        gc.collect()

    @property
    def runner(self) -> Any:
        """vLLM's model runner, in this process. Raises EngineError when it lives in another one."""
        if self._llm is None:
            raise EngineError(f"the engine is not running; use it as `with {type(self).__name__}(...) as engine`")
        try:
            worker = self._llm.llm_engine.model_executor.driver_worker
        except AttributeError:
            raise EngineError(
                "the engine's model is in another process; set VLLM_ENABLE_V1_MULTIPROCESSING=0"
            ) from None
        return getattr(worker, "worker", worker).model_runner

    def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[float]]:
        """Log-probs of sequences[i][starts[i]:] by prefill; all are handed over at once, vLLM forms the batches."""
        from vllm import SamplingParams

        if self._llm is None:
            raise EngineError(f"the engine is not running; use it as `with {type(self).__name__}(...) as engine`")
        params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": list(s)} for s in sequences], params, use_tqdm=False)
        scored = []
        for output, sequence, start in zip(outputs, sequences, starts, strict=True):
            steps = zip(output.prompt_logprobs[start:], sequence[start:], strict=True)
            scored.append([float(step[token].logprob) for step, token in steps])
        return scored

    def generate(self, prompts: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[Sample]:
        """One sample per prompt, in order. `prompts` are token ids, `seeds` 0 <= seed < 2**31, one per prompt."""
        from vllm import SamplingParams

        if self._llm is None:
            raise EngineError(f"the engine is not running; use it as `with {type(self).__name__}(...) as engine`")
        params = [
            SamplingParams(
                n=1,
                temperature=self.sampling.temperature,
                top_p=self.sampling.top_p,
                max_tokens=self.max_tokens,
                logprobs=0,
                seed=seed,
                detokenize=False,
            )
            for seed in seeds
        ]
        requests = [{"prompt_token_ids": list(p)} for p in prompts]
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        return [_sample(out.outputs[0]) for out in outputs]


def _sample(output: Any) -> Sample:
    """vLLM's completion as plain numbers; finish_reason is vLLM's: stop or length."""
    ids = [int(t) for t in output.token_ids]
    logprobs = [float(step[t].logprob) for step, t in zip(output.logprobs, ids, strict=True)]
    return Sample(ids, logprobs, str(output.finish_reason))
