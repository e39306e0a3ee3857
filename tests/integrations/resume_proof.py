"""What a training run computes at every save and after every resume, written down by the run itself.

    python resume_proof.py <arguments of quads.train>       with QUADS_RESUME_PROOF=FILE and this folder on PYTHONPATH

The stage, verl and vLLM are the real ones; one override differs: verl's `external_lib`, the module that brings the
engine, is this file, which loads the stock one and wraps its save_checkpoint and load_checkpoint. Each appends a row
{"event": "saved" | "loaded", "step", "log_probs", "parameters", "optimizer"} to FILE: SHA-256 of the bits of the
trainer's log-probs on the calibration tokens (a forward pass of the very module that trains), of all parameters, and of
the optimizer's state. Saved: after the files are written, by the process that wrote them. Loaded: by the next process.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FILE = "QUADS_RESUME_PROOF"
NAME = "resume_proof"


def digest(tensors: Iterable[Any]) -> str:
    """SHA-256 over the bytes of tensors (sharded ones: this rank's part), in order."""
    import torch

    sha = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        sha.update(local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def log_probs(engine: Any) -> Any:
    """log pi of every calibration token after the first [tokens], float32, from the trainer's own forward."""
    import torch

    from quads.integrations.verl.engine import _load_calibration

    ids, attention = _load_calibration(engine.quads.calibration, engine.model_config.local_path)
    training = engine.module.training
    engine.module.eval()
    with torch.no_grad():
        logits = engine.module(input_ids=ids, attention_mask=attention, use_cache=False).logits
    engine.module.train(training)
    found = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return found[attention[:, 1:].bool()]


def write_row(engine: Any, event: str, actor: str) -> None:
    """Append this event's row; `actor` is CHECKPOINTS/global_step_N/actor."""
    from quads.files import append_jsonl

    state = engine.optimizer.state_dict()["state"]
    row = {
        "event": event,
        "step": int(Path(actor).parent.name.rpartition("_")[2]),
        "log_probs": digest([log_probs(engine)]),
        "parameters": digest(p for _, p in sorted(engine.module.named_parameters())),
        "optimizer": digest(state[i][name] for i in sorted(state) for name in sorted(state[i])),
    }
    append_jsonl(Path(os.environ[FILE]), row)


def wrap_engine() -> None:
    """Make the QUADS engine of this process write a row at every save and load."""
    from quads.integrations.verl.engine import QuadsFSDPEngine

    save, load = QuadsFSDPEngine.save_checkpoint, QuadsFSDPEngine.load_checkpoint

    def save_checkpoint(self: Any, local_path: str, *args: Any, **kwargs: Any) -> None:
        save(self, local_path, *args, **kwargs)
        write_row(self, "saved", local_path)

    def load_checkpoint(self: Any, local_path: str, *args: Any, **kwargs: Any) -> None:
        load(self, local_path, *args, **kwargs)
        write_row(self, "loaded", local_path)

    QuadsFSDPEngine.save_checkpoint, QuadsFSDPEngine.load_checkpoint = save_checkpoint, load_checkpoint


def main() -> int:
    """The training stage with one override replaced."""
    from quads import train
    from quads.integrations.verl import launch

    stock = launch.verl_overrides

    def overrides(run: Any, paths: Any) -> list[str]:
        lib = "actor_rollout_ref.model.external_lib="
        kept = [o for o in stock(run, paths) if not o.startswith(lib)]
        assert len(kept) == len(stock(run, paths)) - 1
        return [*kept, f'{lib}"{NAME}"']

    launch.verl_overrides = overrides
    return train.main()


if __name__ == "__main__":
    sys.exit(main())
elif __name__ == NAME and FILE in os.environ:
    wrap_engine()
