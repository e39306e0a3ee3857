"""verl workers that hand the QUADS options to the engine, use gloo on CPU, and compare weights with the engine's.

`check_engine_weights` is the definition of delta_weight = 0: the dequantized weights that the rollout engine holds,
dumped by the engine itself, against the fake-quantized weights that the trainer multiplies with, element by element.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from quads.integrations.verl.engine import QuadsOptions, set_options
from quads.integrations.verl.loss import ppo_loss_with_gap
from quads.integrations.verl.session import weight_socket
from quads.layers.surgery import quantized_weights
from quads.trainer.weights import compare_weights


class QuadsTrainingWorker(TrainingWorker):
    """TrainingWorker whose process group exists before verl would build its own."""

    def __init__(self, config: Any) -> None:
        if get_device_name() == "cpu":
            # verl's own backend string for a CPU device is "cpu:gloo,cpu:gloo", which torch rejects as a duplicate;
            # it skips the step when a group exists.
            initialize_global_process_group_ray(backend="gloo")
        super().__init__(config)

    def set_loss_fn(self, loss_fn: Any) -> None:
        """verl passes partial(ppo_loss, config=...): keep its config, measure the gap beside its loss."""
        from functools import partial

        super().set_loss_fn(partial(ppo_loss_with_gap, **loss_fn.keywords))


class QuadsActorRolloutRefWorker(ActorRolloutRefWorker):
    """ActorRolloutRefWorker with the QUADS engine, a private weight socket and the weight comparison."""

    actor_worker_cls = QuadsTrainingWorker
    ref_worker_cls = QuadsTrainingWorker

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.options = QuadsOptions.from_config(self.config.quads)
        set_options(self.options)
        super().init_model()
        # verl names the socket by Ray job id, which is the same in every fresh Ray session: two runs on one machine
        # would send their weights to each other.
        self.rollout.zmq_handle = weight_socket(self.rollout.zmq_handle)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def check_engine_weights(self) -> dict[str, Any]:
        """Dump the engine's weights, compare with the trainer's, write and return the report (rank 0 writes)."""
        path = self.options.engine_weights
        await self.rollout._execute_method("quads_dump_weights", args=(path,))
        report = compare_weights(quantized_weights(self.actor.engine.module), load_file(path))
        if self.rank == 0:
            Path(self.options.delta_weight_report).write_text(json.dumps(report, indent=1))
        Path(path).unlink(missing_ok=True)
        return report
