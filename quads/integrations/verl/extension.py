"""vLLM worker extension for verl: receives each weight sync through vLLM's layerwise reload.

Differs from verl's own extension, which calls `model.load_weights` alone: that bypasses re-quantization (and, for BF16
experts on a CPU, silently keeps the old weights). Set by config: `engine_kwargs.vllm.worker_extension_cls`.
"""

from __future__ import annotations

from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from quads.integrations.verl.session import weight_socket
from quads.integrations.vllm.reload import LayerwiseReload, operand_tensors
from quads.integrations.vllm.shards import is_first_rank


class QuadsWorkerExtension(vLLMColocateWorkerExtension):
    """Mixed into vLLM's worker; method names must not collide with the worker's own."""

    def _get_zmq_handle(self) -> str:
        return weight_socket(super()._get_zmq_handle())

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """One weight sync: every bucket that the trainer sends, then re-quantization, layer by layer."""
        model = self.model_runner.get_model()
        receiver = BucketedWeightReceiver(zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm)

        def on_bucket(weights: list[tuple[str, Tensor]], is_last: bool) -> None:
            # The receive buffer is reused, and layerwise loading keeps tensors until a layer is full.
            reload.load([(name, tensor.clone()) for name, tensor in weights])

        with LayerwiseReload(model, self.vllm_config, self.model_runner.model_config) as reload:
            receiver.receive_weights(on_bucket_received=on_bucket)

    def quads_dump_weights(self, path: str) -> None:
        """Write what this engine multiplies with, as it is stored, for quads.trainer.weights.Dump (first rank)."""
        stored = operand_tensors(self.model_runner.get_model())
        if not is_first_rank():
            return
        save_file({name: tensor.contiguous().cpu() for name, tensor in stored.items()}, path)
