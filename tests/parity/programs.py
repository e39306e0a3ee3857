"""What the tests of this folder give to their programs, and how they run them: every one in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_moe import tiny_model

from quads.layers.setup import Precision
from quads.layers.surgery import apply_surgery
from quads.numerics.rac import RacSpec
from quads.trainer.calibration import calibrate

HERE = Path(__file__).resolve().parent
SEEDS = {"A": 1, "B": 2}
Done = subprocess.CompletedProcess[str]


def random_prompts(count: int, tokens: int) -> torch.Tensor:
    """int64 [count, tokens], none of them special."""
    return torch.randint(2, 43, (count, tokens), generator=torch.Generator().manual_seed(0))


def two_models(out: Path, prompts: torch.Tensor, suffix: str = "", **changes) -> dict[str, dict[str, str]]:
    """Models A and B, tiny MoEs with float32 values, and their RAC masks (k = 0.5) of `prompts`, as files below `out`.

    {"models", "masks"}: path by name and `suffix`; `changes` of the model's config.
    """
    job: dict[str, dict[str, str]] = {"models": {}, "masks": {}}
    for name, seed in SEEDS.items():
        model, key = tiny_model(seed, **changes), name + suffix
        job["models"][key] = str(out / key)
        model.save_pretrained(out / key)
        apply_surgery(model, Precision("nvfp4"))
        job["masks"][key] = str(out / f"masks_{key}.safetensors")
        save_file(calibrate(model, prompts, torch.ones_like(prompts), RacSpec(0.5)), job["masks"][key])
    return job


def run_program(name: str, *words: str | Path, folders: tuple[str, ...] = (), timeout: float = 600) -> Done:
    """Run a program of this folder to its end; fails with its last lines. `folders` of tests/ that it imports from,
    besides tests/ itself.
    """
    tests = HERE.parent
    paths = [str(tests), *(str(tests / folder) for folder in folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    child = subprocess.run(
        [sys.executable, str(HERE / name), *map(str, words)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-6000:]
    return child
