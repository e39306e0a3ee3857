# SPDX-License-Identifier: Apache-2.0
"""One engine of the rollout benchmark in a process of its own: JSON lines in, JSON lines out.

    python -m quads.integrations.vllm.bench
    <- the engine's description (quads.bench.rollout_plan.Engine)    -> {"seconds", "memory_bytes", "backend",
                                                                         "rollout_backend", "rollout_graphs"}
    <- {"do": "generate", "batch", "prompt", "response", "seed"}     -> {"seconds", "memory_bytes"}
    <- {"do": "sync"}                                                -> {"seconds", "bytes", "memory_bytes"}
    -> {"error": text} instead when something fails; the end of the input ends the process

generate: `batch` prompts of random token ids, exactly `response` tokens each (end tokens are ignored), log-probs of the
sampled tokens as in training. sync: the whole checkpoint as the trainer sends it (bfloat16, with the RAC masks) through
quads.integrations.vllm.reload, from tensors that lie on the engine's device: without the transport between processes.
The first layer's values stand for those of every layer, so that a model of real size need not lie there twice.
memory_bytes: peak of torch's allocator during the request on a GPU, resident memory of the process after it on a CPU;
both without the tensors that are kept here to be sent.
Contract: an engine serves the mode it says (receipt) or the process says why not. "stock" engines are vLLM's own BF16
or FP8 without the plugin; their weights are not refreshed here.
Differs from vLLM's own benchmarks in that engines wait for requests between rounds, so that several can be interleaved.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TextIO

from quads.config import Evaluation, Runtime
from quads.integrations.vllm.generate import Engine, EngineError, prepare_environment
from quads.integrations.vllm.update import update_masks
from quads.lifeline import watch_parent

log = logging.getLogger(__name__)

_LAYER = re.compile(r"\.layers\.\d+\.")


class BenchEngine(Engine):
    """An engine that is timed; `said` is its description as plain values."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.said = said
        self.weights: list[tuple[str, Any]] = []
        super().__init__(
            Path(said["model"]),
            said["quantization"],
            mode=said["mode"],
            receipt=Path(said["receipt"]),
            runtime=Runtime(**said["runtime"]),
            sampling=Evaluation(),
            max_tokens=said["max_tokens"],
            max_model_len=said["max_model_len"],
        )

    def _arguments(self) -> dict[str, Any]:
        arguments = super()._arguments() | {"skip_tokenizer_init": True}
        # Only times are read here, so positions beyond those of the checkpoint are allowed.
        arguments["hf_overrides"] = {**arguments["hf_overrides"], **self.said["overrides"]}
        if self.said["stock"]:
            del arguments["hf_overrides"]["quantization_config"]
            arguments["quantization"] = {"bf16": None, "fp8": "fp8"}[self.mode]
        return arguments

    def _graph_sizes(self) -> list[int]:
        return list(self.said["batches"])

    def __enter__(self) -> Self:
        if not self.said["stock"]:
            return super().__enter__()
        prepare_environment(self.runtime)
        from vllm import LLM

        self._llm = LLM(**self._arguments())
        return self

    @property
    def backend(self) -> str:
        """What multiplies, by the receipt."""
        return "native (vLLM)" if self.said["stock"] else str(self.receipt["backend"])

    def execution(self) -> dict[str, Any]:
        """Backend and graphs, by the receipt."""
        if self.said["stock"]:  # no receipt: these are vLLM's arguments
            return {"rollout_backend": "vllm", "rollout_graphs": self.runtime.rollout_graphs}
        found = self.receipt["execution"]
        return {"rollout_backend": found["backend"], "rollout_graphs": found["engine_mode"] != "eager"}

    def run(self, batch: int, prompt: int, response: int, seed: int) -> dict[str, Any]:
        """Time `batch` requests that are handed over at once."""
        from vllm import SamplingParams

        draw = random.Random(seed)
        vocabulary = range(self.said["vocabulary"])
        requests = [{"prompt_token_ids": draw.choices(vocabulary, k=prompt)} for _ in range(batch)]
        params = SamplingParams(temperature=1.0, max_tokens=response, ignore_eos=True, logprobs=0, detokenize=False)
        start = self._begin()
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        seconds = self._end(start)
        drawn = [len(o.outputs[0].token_ids) for o in outputs]
        if drawn != [response] * batch:
            raise EngineError(f"asked for {batch} responses of {response} tokens, got lengths {sorted(set(drawn))}")
        return {"seconds": seconds, "memory_bytes": self._memory()}

    def sync(self) -> dict[str, Any]:
        """Time one whole weight update."""
        from quads.integrations.vllm.reload import layerwise_reload

        if self.said["stock"]:
            raise EngineError("a stock engine is not refreshed: that is the plugin's part")
        if not self.weights:
            masks = Path(self.said["masks"]) if self.said["masks"] else None
            self.weights = [*self._tensors(), *update_masks(self.runner.get_model(), masks, self._device())]
        start = self._begin()
        # The trainer's receiver clones every tensor out of its buffer.
        layerwise_reload(self.runner, ((name, tensor.clone()) for name, tensor in self.weights))
        seconds = self._end(start)
        return {
            "seconds": seconds,
            "bytes": sum(tensor.nbytes for _, tensor in self.weights),
            "memory_bytes": self._memory(),
        }

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        import torch
        from safetensors import safe_open

        kept: dict[tuple[str, tuple[int, ...]], Any] = {}
        for path in sorted(self.model.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():
                    key = (_LAYER.sub(".", name), tuple(file.get_slice(name).get_shape()))
                    if key not in kept:
                        tensor = file.get_tensor(name)
                        sent = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
                        kept[key] = sent.to(self._device())
                    yield name, kept[key]

    def _device(self) -> str:
        return "cpu" if self.runtime.device == "cpu" else "cuda"

    def _begin(self) -> float:
        import torch

        if self.runtime.device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        return time.perf_counter()

    def _end(self, start: float) -> float:
        import torch

        if self.runtime.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def _kept(self) -> int:
        return sum({tensor.data_ptr(): tensor.nbytes for _, tensor in self.weights}.values())

    def _memory(self) -> int:
        import torch

        if self.runtime.device != "cpu":
            return int(torch.cuda.max_memory_allocated()) - self._kept()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") - self._kept()


def _ready(engine: BenchEngine, began: float) -> dict[str, Any]:
    seconds = time.perf_counter() - began
    if not engine.said["stock"]:
        engine.sync()  # static masks have to arrive before the first request
    said = {"seconds": seconds, "backend": engine.backend, "memory_bytes": engine._memory()}
    return said | engine.execution()


def _serve(engine: BenchEngine, requests: TextIO, answers: TextIO) -> None:
    for line in requests:
        said = json.loads(line)
        if said.pop("do") == "sync":
            _say(answers, engine.sync())
        else:
            _say(answers, engine.run(**said))


def _say(answers: TextIO, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def main() -> int:
    """Serve one engine until the input ends."""
    # vLLM and libraries below it write to standard output: it goes to standard error, answers keep the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    watch_parent()
    try:
        said = json.loads(sys.stdin.readline())
        began = time.perf_counter()
        with BenchEngine(said) as engine:
            _say(answers, _ready(engine, began))
            _serve(engine, sys.stdin, answers)
    except Exception as error:  # the parent goes on with the other engines and shows this one's reason
        log.exception("the engine failed")
        cause = f" <- {error.__cause__}" if error.__cause__ else ""
        _say(answers, {"error": f"{type(error).__name__}: {error}{cause}"[:2000]})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
