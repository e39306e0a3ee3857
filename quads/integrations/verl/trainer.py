"""verl's synchronous trainer as quads_sync: our worker, a fast replay-buffer poll, a weight check at the end.

Differs from PPOTrainerSync only in the overrides below; GRPO, batching, checkpoints and validation are verl's.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from quads.integrations.verl.compat import use_direct_server
from quads.integrations.verl.overrides import TRAINER_MODE
from quads.integrations.verl.worker import QuadsActorRolloutRefWorker


@register_trainer(TRAINER_MODE)
class QuadsTrainer(PPOTrainerSync):
    """See the module docstring."""

    def _setup(self) -> None:
        if self.config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class"):
            use_direct_server()
        super()._setup()

    def _build_replay_buffer(self) -> Any:
        # Six branches of verl's trainer test trainer_mode == "sync" and would otherwise pick the asynchronous buffer.
        self.trainer_mode = "sync"
        buffer = super()._build_replay_buffer()
        buffer.poll_interval = 0.05  # verl's 2.0 s makes every step wait for a multiple of it
        return buffer

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(QuadsActorRolloutRefWorker)

    def prepare_step(self) -> dict[str, Any]:
        metrics = super().prepare_step()
        return {**metrics, **getattr(self.agent_loop_manager, "metrics", {})}

    def on_init_end(self) -> None:
        super().on_init_end()
        self._compare_weights()  # a mismatch must not cost a whole training run

    def fit(self, agent_loop_manager: Any) -> None:
        super().fit(agent_loop_manager)
        # The last step ends with a weight sync, so trainer and engine must hold the same weights now.
        self._compare_weights()

    def _compare_weights(self) -> None:
        # The call is asynchronous in the worker: its error would be lost if nobody waited for it.
        ray.get(self.actor_rollout_wg.check_engine_weights())
