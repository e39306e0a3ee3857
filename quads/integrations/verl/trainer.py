"""verl's synchronous trainer as quads_sync: our worker, a fast replay-buffer poll, and what is measured on the way.

    start, end    the engine's weights against the trainer's, element by element
    some steps    the decomposition of the gap, on the step's own batch before its update (quads.diagnostics.during)
    every step    with grpo.stop_on_collapse: the collapse detector; a run that collapses ends with that step

Differs from PPOTrainerSync only in the overrides below; GRPO, batching, checkpoints and validation are verl's.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.workers.utils.padding import response_from_nested

from quads.config import Collapse
from quads.diagnostics import during
from quads.diagnostics.collapse import STOPPING, Detector, judge
from quads.diagnostics.decompose import Rungs
from quads.files import read_jsonl
from quads.integrations.verl.compat import use_direct_server
from quads.integrations.verl.history import eval_accuracy, history_row
from quads.integrations.verl.overrides import TRAINER_MODE
from quads.integrations.verl.worker import QuadsActorRolloutRefWorker
from quads.trainer.rungs import RUNGS

log = logging.getLogger(__name__)


@register_trainer(TRAINER_MODE)
class QuadsTrainer(PPOTrainerSync):
    """See the module docstring."""

    def _setup(self) -> None:
        if self.config.actor_rollout_ref.rollout.agent.get("agent_loop_manager_class"):
            use_direct_server()
        own = self.config.trainer.v1[TRAINER_MODE]
        self.out, self.decompose_every = Path(own.out), int(own.decompose_every)
        self.stop_on = None if own.stop_on is None else Collapse(**own.stop_on)
        self.compares = bool(own.get("compare_weights", True))  # only a benchmark of the steps goes without
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

    def on_train_begin(self) -> None:
        super().on_train_begin()
        self.planned_steps = self.total_training_steps
        if self.stop_on is None:
            return
        history = self.out / "history.jsonl"
        rows = read_jsonl(history, ("step",)) if history.exists() else []
        # The launcher has cut the history to the step that this attempt resumes from.
        self.detector = judge([r for r in rows if r["step"] < self.global_steps], self.stop_on)
        if self.detector.first(*STOPPING) is not None:
            log.warning("this run has stopped at step %d already: nothing to train", self.global_steps - 1)
            self.total_training_steps = self.global_steps - 1

    def fit(self, agent_loop_manager: Any) -> None:
        super().fit(agent_loop_manager)
        # The last step ends with a weight sync, so trainer and engine must hold the same weights now.
        self._compare_weights()

    def _compare_weights(self) -> None:
        if not self.compares:
            return
        # The call is asynchronous in the worker: its error would be lost if nobody waited for it.
        ray.get(self.actor_rollout_wg.check_engine_weights())

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_old_log_prob(batch, metrics)
        # Later mini-batches of a step are no longer scored by the weights that generated them.
        if self.local_trigger_step == 0 and during.due(self.global_steps, self.decompose_every, self.planned_steps):
            self._decompose(batch)
        return batch

    def _decompose(self, batch: Any) -> None:
        """Score the batch at every rung and append the rows of this step. Any failure ends the run."""
        start, before = time.perf_counter(), dict(batch.extra_info)
        batch.extra_info.update(
            calculate_entropy=False,
            compute_loss=False,
            temperature=self.config.actor_rollout_ref.rollout.temperature,
        )
        self.actor_rollout_wg.rung_log_probs(batch)
        layers = self.actor_rollout_wg.rung_layers()
        batch.extra_info = before
        fields = [*(f"rung_{name}" for name in RUNGS), "rollout_log_probs", "response_mask"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        for name in RUNGS:
            data[f"rung_{name}"] = response_from_nested(data[f"rung_{name}"], data["response_mask"])
        padded = data.to_padded_tensor()
        real = [not tag.get("is_padding", False) for tag in batch.tags]
        trainer, weights, everything, engine, mask = (padded[name][real] for name in fields)
        row = during.row(self.global_steps, Rungs(trainer, weights, everything, engine), mask)
        during.append_layers(self.out, self.global_steps, layers)
        during.append(self.out, row | {"seconds": time.perf_counter() - start})

    def _compute_metrics(
        self, batch: Any, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps: int, epoch: int
    ) -> None:
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        if self.stop_on is not None:
            self._stop_if_collapsed(self.detector, metrics, global_steps)

    def _stop_if_collapsed(self, detector: Detector, metrics: dict[str, Any], step: int) -> None:
        """On a collapse make this step the last one: what verl does at the end of a run, then the loop finds no more.

        Called after the step's weight sync, so that the validation sees the weights that the checkpoint holds.
        """
        row = history_row({"step": step, "data": metrics})
        alarm = detector.update(step, row["reward"], row["gap_mean"])
        if alarm is None or alarm.kind not in STOPPING or step >= self.total_training_steps:
            return
        log.warning("%s at step %d (%s): training stops here", alarm.kind, step, alarm.why)
        if step % self.config.trainer.save_freq:
            self._save_checkpoint()
        if eval_accuracy(metrics) is None:
            self.on_validate_begin()
            metrics.update(self._validate())
            self.on_validate_end()
        self.total_training_steps = step
