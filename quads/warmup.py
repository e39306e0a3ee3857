"""Stage: the warm checkpoint every arm starts from.

    python -m quads.warmup --experiment configs/toy.yaml --data DATA --out DIR
    -> DIR: transformers checkpoint (float32, one tensor per expert and projection), tokenizer, generation_config.json,
       then manifest.json with the measured accuracies before and after the outlier injection

Contract: one thread and fixed seeds, so the same sections model, data and warmup give the same weights on the same
machine; the manifest is written last, so a folder without it is unfinished. Eval prompts are never trained on.
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
from quads.config import ConfigError, Experiment, config_hash, load_experiment
from quads.data import build
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


def warm_up(experiment: Experiment, data: Path, out: Path) -> dict[str, Any]:
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
    model = toy_model.make_model(experiment.model, warmup.seed)
    losses = train.train(model, config, warmup, excluded)
    trained = time.monotonic()
    problems = train.draw_unseen(MEASURED_PROBLEMS, config, np.random.default_rng(MEASURE_SEED), excluded)
    before = train.measure(model, problems, MEASURE_SEED)
    channels = outliers.inject(model, warmup.outliers)
    after = train.measure(model, problems, MEASURE_SEED)
    save(model, make_tokenizer(), out)
    return {
        "config_hash": config_hash(experiment.model, config, warmup),
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
    parser.add_argument("--data", type=Path, required=True, help="folder written by quads.prepare")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint and the manifest")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    lifeline.watch_parents()
    experiment = load_experiment(args.experiment.stem, configs=args.experiment.parent)
    _require_matching_data(experiment, args.data)
    (args.out / "manifest.json").unlink(missing_ok=True)
    manifest = warm_up(experiment, args.data, args.out)
    write_json_atomic(args.out / "manifest.json", manifest)
    log.info("accuracy %s, %s", manifest["accuracy"], manifest["seconds"])


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, ResultFileError, OSError) as error:
        sys.exit(f"quads.warmup: {error}")
