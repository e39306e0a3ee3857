"""Stage: the checkpoint every arm starts from: warmed up here, or a pretrained one (`model.checkpoint`).

    python -m quads.warmup --experiment configs/toy.yaml --data DATA --out DIR
    -> DIR: transformers checkpoint (float32, one tensor per expert and projection), tokenizer, generation_config.json,
       then manifest.json with the measured accuracies before and after the outlier injection

Contract: one thread and fixed seeds, so the same sections model, data and warmup give the same weights on the same
machine (on a GPU up to the order of additions); the manifest is written last, so a folder without it is unfinished.
Eval prompts are never trained on.
Accuracies are on 512 fresh problems, one sample each at T = 1 and one greedy answer (1 s.e. of the sampled about .02).
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quads import lifeline
from quads.config import ConfigError, Experiment, config_hash, load_experiment, model_hash
from quads.data import build, pretrained
from quads.files import ResultFileError, read_result, write_json_atomic

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

log = logging.getLogger(__name__)

MEASURED_PROBLEMS = 512
MEASURE_SEED = 5


def weights_hash(model: torch.nn.Module) -> str:
    """sha256 hex digest over names and bytes of the state dict, sorted by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Checkpoint, configuration, generation defaults and tokenizer into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    # safetensors makes its file private (0600); the others follow the umask, as a shared file system needs.
    (out / "model.safetensors").chmod((out / "config.json").stat().st_mode & 0o777)


def warm_up(experiment: Experiment, data: Path, out: Path, device: str = "cpu") -> dict[str, Any]:
    """Train, measure, inject, measure, save; returns the manifest. Raises ValueError if the data is not this config's.

    Imports torch and transformers here, so that --help and errors in the configuration are quick.
    """
    import numpy as np
    import torch

    from quads.toy import model as toy_model
    from quads.toy import outliers, train
    from quads.toy.tokenizer import make_tokenizer

    torch.set_num_threads(1)
    torch.manual_seed(experiment.warmup.seed)
    started = time.monotonic()
    config, warmup = experiment.data, experiment.warmup
    excluded = build.eval_keys(data)
    model = toy_model.make_model(experiment.model, warmup.seed).to(device)
    losses = train.train(model, config, warmup, excluded)
    trained = time.monotonic()
    problems = train.draw_unseen(MEASURED_PROBLEMS, config, np.random.default_rng(MEASURE_SEED), excluded)
    before = train.measure(model, problems, MEASURE_SEED)
    channels = outliers.inject(model, warmup.outliers)
    after = train.measure(model, problems, MEASURE_SEED)
    model = model.cpu()
    save(model, make_tokenizer(), out)
    return {
        "config_hash": model_hash(experiment),
        "config": {
            "model": experiment.model.model_dump(mode="json"),
            "data": config.model_dump(mode="json"),
            "warmup": warmup.model_dump(mode="json"),
        },
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights_sha256": weights_hash(model),
        "accuracy": {"before_injection": asdict(before), "after_injection": asdict(after)},
        "outliers": {"injected": bool(channels), "strength": warmup.outliers.strength, "channels": channels},
        "loss_last": losses[-1] if losses else None,
        "seconds": {"train": round(trained - started, 2), "total": round(time.monotonic() - started, 2)},
    }


def default_device(experiment: Experiment) -> str:
    """runtime.device, but a model of at most a million matrix elements stays on the CPU: faster there, and exact."""
    m = experiment.model
    elements = m.layers * m.experts * 3 * m.hidden * m.expert_hidden
    return experiment.runtime.device if elements > 1_000_000 else "cpu"


def take_pretrained(experiment: Experiment, out: Path) -> dict[str, Any]:
    """Bring `model.checkpoint` to `out`; returns the manifest. Raises ValueError or OSError naming what is missing."""
    checkpoint = experiment.model.checkpoint
    assert checkpoint is not None
    found = pretrained.place(checkpoint, out)
    (out / "manifest.json").unlink(missing_ok=True)
    return {"config_hash": model_hash(experiment), "config": checkpoint.model_dump(mode="json"), **found}


def _require_matching_data(experiment: Experiment, data: Path) -> None:
    got = read_result(data / "manifest.json", "data manifest", ("config_hash",))["config_hash"]
    expected = config_hash(experiment.data)
    if got != expected:
        raise ValueError(
            f"{data}: made with data config {got}, but {experiment.name} has {expected}; "
            f"run python -m quads.prepare --experiment configs/{experiment.name}.yaml --out {data}"
        )


def main(argv: list[str] | None = None) -> None:
    """Parse, warm up, write the manifest."""
    parser = argparse.ArgumentParser(prog="quads.warmup", description="Warm up the toy and save its checkpoint.")
    parser.add_argument("--experiment", type=Path, required=True, help="configs/NAME.yaml")
    parser.add_argument("--data", type=Path, help="folder written by quads.prepare; not read with model.checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint and the manifest")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda for more than a million parameters")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    lifeline.watch_parents()
    experiment = load_experiment(args.experiment.stem, configs=args.experiment.parent)
    if experiment.model.checkpoint is not None:
        manifest = take_pretrained(experiment, args.out)
        log.info("%s, %d parameters", manifest["architecture"], manifest["parameters"])
    else:
        if args.data is None:
            parser.error("--data is required: this experiment warms its model up on chains")
        _require_matching_data(experiment, args.data)
        (args.out / "manifest.json").unlink(missing_ok=True)
        manifest = warm_up(experiment, args.data, args.out, args.device or default_device(experiment))
        log.info("accuracy %s, %s", manifest["accuracy"], manifest["seconds"])
    write_json_atomic(args.out / "manifest.json", manifest)


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, ResultFileError, ValueError, OSError) as error:
        sys.exit(f"quads.warmup: {error}")
