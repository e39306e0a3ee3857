"""verl workers that hand the QUADS options to the engine, use gloo on CPU, and measure trainer against engine.

`check_engine_weights` is the definition of delta_weight = 0: the dequantized weights that the rollout engine holds,
dumped by the engine itself, against the fake-quantized weights that the trainer multiplies with, element by element.
`rung_log_probs` scores a rollout batch at the precisions of the decomposition (quads.trainer.rungs), with the rollout's
precision read from the options that the engine itself was started with. Rank 0 also records what the layers compute for
the first tokens of its share; `rung_layers` hands out the comparison (quads.diagnostics.during_layers).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from verl.single_controller.base.decorator import Dispatch, Execute, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from quads.diagnostics import during_layers
from quads.integrations.verl.engine import QuadsOptions, set_options
from quads.integrations.verl.loss import ppo_loss_with_gap
from quads.integrations.verl.session import weight_socket
from quads.layers.blocks import recorded
from quads.layers.setup import Precision
from quads.layers.surgery import quantized_weights
from quads.rollout.mode import EngineConfig
from quads.trainer.profile import profiled
from quads.trainer.rungs import at_precision, rung_precisions
from quads.trainer.weights import Dump, compare_weights


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


def rollout_precision(rollout: Any) -> Precision:
    """Precision of the rollout engine, from the Hydra node of its start-up options."""
    options = rollout.engine_kwargs.vllm.hf_overrides.quantization_config
    config = EngineConfig.from_dict(OmegaConf.to_container(options, resolve=True))
    mode = config.mode
    return Precision(mode.weight, mode.activation, mode.scale_group, mode.rac, config.skip)


class QuadsActorRolloutRefWorker(ActorRolloutRefWorker):
    """ActorRolloutRefWorker with the QUADS engine, a private weight socket and the measurements."""

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
        # Each rank has an engine replica of its own, and ranks may share a file system.
        path = f"{self.options.engine_weights}.rank{self.rank}"
        await self.rollout._execute_method("quads_dump_weights", args=(path,))
        report = compare_weights(quantized_weights(self.actor.engine.module), Dump(path))
        if self.rank == 0:
            Path(self.options.delta_weight_report).write_text(json.dumps(report, indent=1))
        Path(path).unlink(missing_ok=True)
        return report

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: TensorDict) -> TensorDict:
        """verl's; the `quads.profile_update`-th one of a benchmark is profiled (rank 0 writes profile.json)."""
        self.updates = getattr(self, "updates", 0) + 1
        if self.updates != self.config.quads.get("profile_update"):
            return super().update_actor(data)
        with profiled() as found:
            output = super().update_actor(data)
        if self.rank == 0:
            Path(self.options.surgery_report).with_name("profile.json").write_text(json.dumps(found, indent=1))
        return output

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def rung_log_probs(self, data: TensorDict) -> TensorDict:
        """Log-probs of the batch at each of quads.trainer.rungs.RUNGS, as fields `rung_<name>` (nested [B, tokens]).

        Same forward, micro-batches and weights as the update that follows; rungs of equal precision are one forward.
        """
        engine = self.actor.engine
        rungs = rung_precisions(self.options.precision, rollout_precision(self.config.rollout))
        scored: dict[Precision, Any] = {}
        layers: dict[Precision, Mapping[str, list[Tensor]]] = {}
        for precision in rungs.values():
            if precision not in scored:
                with at_precision(engine.module, precision, engine.sent_masks), self._recorded() as kept:
                    output = self.actor.infer_batch(data)
                scored[precision] = None if output is None else output["log_probs"]
                layers[precision] = kept
        self._layer_rows = during_layers.rows(
            [{key: x for key, (x,) in layers[precision].items()} for precision in rungs.values()], get_device_name()
        )
        found = {f"rung_{name}": scored[precision] for name, precision in rungs.items()}
        if any(value is None for value in found.values()):
            return None
        return tu.get_tensordict(tensor_dict=found, non_tensor_dict={}).cpu()

    @contextmanager
    def _recorded(self) -> Iterator[Mapping[str, list[Tensor]]]:
        """While the block runs, rank 0 keeps what the layers compute for the first tokens of its first micro-batch."""
        if self.rank != 0:
            yield {}
            return
        engine = self.actor.engine
        with recorded(engine.module, lambda x: during_layers.first_rows(x, engine.lengths_B)) as kept:
            yield kept

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def rung_layers(self) -> list[dict[str, Any]]:
        """Rows by layer of the last `rung_log_probs`, rank 0's tokens only."""
        return self._layer_rows
