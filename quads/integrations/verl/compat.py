"""Every change to verl's own names, one function each: symptom, cause, why it is safe, version window, idempotent.

Everything else in this package is a subclass, a registry entry or a config key.
"""

from __future__ import annotations

from typing import Any

import verl.trainer.ppo.v1.trainer_base as trainer_base
import verl.utils.model as verl_model
import verl.utils.torch_functional as torch_functional
import verl.workers.engine.fsdp.transformer_impl as transformer_impl
from verl.workers.rollout.llm_server import LLMServerManager

from quads.trainer import head
from quads.trainer.stored import load_widened


class DirectServerManager(LLMServerManager):
    """LLMServerManager without a balancer actor; its client is the one server's handle."""

    async def _init_global_load_balancer(self) -> None:
        if len(self.server_handles) != 1:
            raise ValueError(
                f"the inline agent loop serves one replica, got {len(self.server_handles)}; "
                "use runtime.agent_loop: verl for more"
            )
        self.global_load_balancer = None

    def get_client(self, client_cls: Any = None, **_: Any) -> Any:
        return self.server_handles[0]


def use_direct_server() -> None:
    """Let the trainer talk to its only rollout server without a balancer in between.

    Symptom: a run is ready about 25 s late on two cores, waiting for a balancer that has one server to choose from.
    Cause: PPOTrainer builds `LLMServerManager`, which starts a Ray actor; to unpickle the server handles (their method
    signatures name vLLM types) that actor imports verl and vLLM, whatever its own class needs.
    Safe because: the subclass changes only the balancer and the client, and only our inline agent loop, which needs a
    handle and nothing else, asks for the client. With runtime.agent_loop "verl" this function is not called.
    Window: verl 0.9.1 (trainer_base looks the class up by its module-level name). Idempotent.
    """
    if not hasattr(trainer_base, "LLMServerManager"):
        raise RuntimeError("verl.trainer.ppo.v1.trainer_base has no LLMServerManager: written for verl 0.9.1")
    trainer_base.LLMServerManager = DirectServerManager


def use_chunked_head() -> None:
    """Let verl's FSDP engine take log-probs and entropy from logits by quads.trainer.head (runtime.chunked_head).

    Symptom: without flash-attn an update spends its time in launches and its memory in float32 copies of the logits.
    Cause: verl's fallback loops over tokens in Python and, with its entropy, keeps three arrays [tokens, vocabulary].
    Safe because: same values and gradients up to the order of sums (tests/trainer/test_head.py compares them).
    Window: verl 0.9.1 (the engine looks both functions up by these names at every micro-batch). Idempotent.
    """
    for module, name in ((transformer_impl, "logprobs_from_logits"), (torch_functional, "entropy_from_logits")):
        if not hasattr(module, name):
            raise RuntimeError(f"{module.__name__} has no {name}: written for verl 0.9.1; set chunked_head: false")
    transformer_impl.logprobs_from_logits = head.log_probs
    torch_functional.entropy_from_logits = head.entropy


class StoredDtype:
    """An auto class of transformers whose from_pretrained reads bfloat16 files as such and widens afterwards."""

    def __init__(self, auto_class: Any) -> None:
        self.auto_class = auto_class

    def __getattr__(self, name: str) -> Any:
        return getattr(self.auto_class, name)

    def from_pretrained(self, pretrained_model_name_or_path: str, *, torch_dtype: Any, **more: Any) -> Any:
        """As verl's FSDP engine calls it."""
        return load_widened(self.auto_class, pretrained_model_name_or_path, torch_dtype, **more)


def use_stored_dtype() -> None:
    """Let verl read checkpoints in the dtype of their files (quads.trainer.stored).

    Symptom: 10.6 billion parameters are in the trainer after two minutes, from files that lie in memory already.
    Cause: transformers converts every expert's matrix on its way into the fused tensor, on one thread.
    Safe because: bfloat16 to float32 is exact; what that does not cover is read as before (quads.trainer.stored).
    Window: verl 0.9.1 (the engine looks get_hf_auto_model_class up at every build). Idempotent.
    """
    stock = getattr(verl_model, "get_hf_auto_model_class", None)
    if stock is None:
        raise RuntimeError("verl.utils.model has no get_hf_auto_model_class: written for verl 0.9.1")
    if getattr(stock, "stored_dtype", False):
        return

    def get_hf_auto_model_class(hf_config: Any) -> Any:
        return StoredDtype(stock(hf_config))

    get_hf_auto_model_class.stored_dtype = True  # type: ignore[attr-defined]
    verl_model.get_hf_auto_model_class = get_hf_auto_model_class
