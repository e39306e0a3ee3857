"""The measurements at real size as a list of jobs for gpu_jobs.py: random weights at the shapes of Qwen3-30B-A3B.

    python workflow/scripts/real_size.py ROOT --gpus 2 [--layers 48] [--train-layers 16] [--only NAME ...] > JOBS.json
    python workflow/scripts/gpu_jobs.py ROOT start --jobs JOBS.json --gpus 2, then `wait` as often as needed

    model        the checkpoint, 61 GB at 48 layers, into --models (default ROOT/models); its first layers for training
    rollout-*    one GPU: engine modes, batch and length, prefill and decode, weight sync, memory
    preflight*   one GPU, layer-streamed: predicted gaps of every pair, by layer; all layers, and the trained ones
    tensor       two GPUs (left out with one): weights and log-probs under tensor parallelism against one GPU's
    train-*      all GPUs: five GRPO steps of each arm with FSDP2, by phase, with the gap's decomposition (by layer too)
                 and the GPU's time in one update
    scale-*      three steps of fewer layers on 1, 2, 4 ... GPUs, the same 128 responses a step

Resumable: a job whose JSON exists is not repeated, so that other options need another ROOT. Everything lands in
ROOT/results/real_size/bench. Differs from a Snakemake target in that nothing here is a result of training.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from quads.bench.real_model import VOCABULARY

CONFIG = "configs/real_size.yaml"
OUT = "results/real_size/bench"
SHAPES = "16x512x64,64x512x64,256x512x64,16x2048x64,64x2048x64"
# (modes of the plugin, vLLM's own) of one job each. One card's memory holds an emulated engine of 30B beside vLLM's FP8
# and not two of them: each takes 74 GiB while its weights load.
ENGINES: dict[str, tuple[str, str]] = {
    "stock": ("none", "bf16,fp8"),
    "w4a4": ("w4a4", "fp8"),
    "rac-50": ("w4a4+rac:50", ""),
    "bf16": ("bf16", ""),
    "w4a16": ("w4a16", ""),
    "rac-100": ("w4a4+rac:100", ""),
    "rac-25": ("w4a4+rac:25", ""),
    "rac-12.5": ("w4a4+rac:12.5", ""),
    "fp8": ("fp8", ""),
}
DATA = "results/real_size/data"
PROMPTS = "results/real_size/prompts.jsonl"
ARMS = ("quads", "nvfp4_naive", "bf16", "fp8")
PROFILED = 3  # the step whose update is profiled


def python(*words: object) -> list[str]:
    return [sys.executable, *map(str, words)]


def rollouts(model: Path, root: Path) -> list[dict]:
    """One job per group of engines; all at once in one card's memory, measured in turn."""
    jobs = []
    for label, (modes, stock) in ENGINES.items():
        target = f"{OUT}/rollout-{label}.json"
        command = python(
            "-m", "quads.bench.rollout", "--experiment", CONFIG, "--model", model, "--modes", modes,
            *(["--stock", stock] if stock else []), "--backend", "triton", "--graphs", "--shapes", SHAPES, "--rounds",
            2, "--together", "--out", root / target,
        )  # fmt: skip
        needs = [str(model / "manifest.json")]
        jobs.append({"name": f"rollout-{label}", "command": command, "target": target, "needs": needs, "share": 1.0,
                     "limit": 400.0})  # fmt: skip
    return jobs


def training(
    name: str,
    arm: str,
    model: Path,
    root: Path,
    gpus: int,
    options: Sequence[object] = (),
    settings: Sequence[str] = (),
) -> dict:
    """One job of real_train on all its GPUs; options: more words for it, settings: more for its --set."""
    data, target = root / DATA, f"{OUT}/{name}.json"
    command = python(
        "-m", "quads.bench.real_train", "--experiment", CONFIG, "--arm", arm, "--model", model, "--data", data, "--out",
        root / target, "--profile", PROFILED, *options, "--set", f"runtime.gpus_per_node={gpus}", *settings,
    )  # fmt: skip
    needs = [f"{model}/manifest.json", f"{data}/manifest.json"]
    return {"name": name, "command": command, "target": target, "needs": needs, "gpus": gpus, "share": 1.0,
            "limit": 600.0}  # fmt: skip


def preflight(name: str, model: Path, root: Path) -> dict:
    """One job of quads.preflight on one GPU."""
    command = python(
        "-m", "quads.preflight", model, "--prompts", root / PROMPTS, "--gap", 0, "--device", "cuda", "--chip", "H200",
        "--out", root / OUT / name,
    )  # fmt: skip
    return {"name": name, "command": command, "target": f"{OUT}/{name}/preflight.json",
            "needs": [f"{model}/manifest.json"], "share": 1.0, "limit": 400.0}  # fmt: skip


def plan(root: Path, models: Path, gpus: int, layers: int, train_layers: int, scale_layers: int) -> list[dict]:
    """All jobs, in the order in which they matter."""
    big, small, few = (models / f"layers{n}" for n in (layers, train_layers, scale_layers))
    make = ["-m", "quads.bench.real_model", "--experiment", CONFIG]
    made = [
        {"name": "data", "command": python("-m", "quads.prepare", "--experiment", CONFIG, "--out", root / DATA),
         "target": f"{root / DATA}/manifest.json", "gpus": 0},
        {"name": "model", "command": python(*make, "--layers", layers, "--out", big),
         "target": f"{big}/manifest.json", "share": 0.5},
    ]  # fmt: skip
    for name, first, folder in (("model-train", train_layers, small), ("model-scale", scale_layers, few)):
        made.append({"name": name, "command": python(*make, "--layers", first, "--first-of", big, "--out", folder),
                     "target": f"{folder}/manifest.json", "needs": [f"{big}/manifest.json"], "gpus": 0})  # fmt: skip
    tensor = python("tests/parity/tensor_parallel_runs.py", root / OUT / "tensor")
    two = {"name": "tensor", "command": tensor, "target": f"{OUT}/tensor/report.json", "gpus": 2, "share": 0.1}
    pair = [two] if gpus > 1 else []
    arms = [training(f"train-{arm}", arm, small, root, gpus) for arm in ARMS]
    counts = sorted({2**i for i in range(gpus.bit_length())} | {gpus})
    scaling = [
        training(f"scale-{n}", "quads", few, root, n, ("--steps", PROFILED), ("runtime.max_sequences=128",))
        for n in counts
    ]
    depths = (("preflight", big), ("preflight-train", small))
    ahead = [preflight(*depth, root) for depth in (depths if small != big else depths[:1])]
    jobs: dict[str, dict] = {}
    for job in (*made, *pair, *rollouts(big, root), *arms[:2], *ahead, *scaling, *arms[2:]):
        jobs.setdefault(job["target"], job)  # equal numbers of layers are one checkpoint
    return list(jobs.values())


def main() -> None:
    """Print the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder for checkpoints and results")
    parser.add_argument(
        "--gpus", type=int, default=1, help="GPUs of every training job (default 1); a rollout takes one"
    )
    parser.add_argument("--layers", type=int, default=48, help="layers of the checkpoint (default 48, 61 GB)")
    parser.add_argument(
        "--train-layers", type=int, default=16, help="first layers of it that are trained (default 16, for two GPUs)"
    )
    parser.add_argument(
        "--scale-layers", type=int, default=4, help="first layers of it whose training is timed on 1, 2, 4 ... GPUs"
    )
    parser.add_argument("--models", type=Path, help="folder for the checkpoints; default ROOT/models")
    parser.add_argument("--only", nargs="+", help="beginnings of job names")
    args = parser.parse_args()
    root = args.root.resolve()
    models = (args.models or root / "models").resolve()
    if args.gpus < 1:
        parser.error(f"--gpus {args.gpus}: at least one")
    for name in ("train_layers", "scale_layers"):
        if not 1 <= getattr(args, name) <= args.layers:
            word = name.replace("_", "-")
            parser.error(f"need 1 <= --{word} {getattr(args, name)} <= --layers {args.layers}")
    jobs = plan(root, models, args.gpus, args.layers, args.train_layers, args.scale_layers)
    draw = random.Random(0)  # text of a random network is uniform: entropy 11.4 of 11.9
    ids = [[draw.choices(range(VOCABULARY), k=n) for n in (16, 144)] for _ in range(8)]
    prompts = [{"input_ids": prompt, "response_ids": response} for prompt, response in ids]
    try:
        (root / PROMPTS).parent.mkdir(parents=True, exist_ok=True)
        (root / PROMPTS).write_text("".join(json.dumps(row) + "\n" for row in prompts))
    except OSError as error:
        parser.error(f"root {root} cannot be written to: {error}")
    if args.only:
        names = [job["name"] for job in jobs]
        jobs = [job for job in jobs if job["name"].startswith(tuple(args.only))]
        if not jobs:
            parser.error(f"--only {' '.join(args.only)} names no job; there are {', '.join(names)}")
    print(json.dumps(jobs, indent=1))


if __name__ == "__main__":
    main()
