"""Every change to verl's own names, one function each: symptom, cause, why it is safe, version window, idempotent.

Everything else in this package is a subclass, a registry entry or a config key.
"""

from __future__ import annotations

from typing import Any

import verl.trainer.ppo.v1.trainer_base as trainer_base
from verl.workers.rollout.llm_server import LLMServerManager


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
