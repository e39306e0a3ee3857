"""Tensor parallel size 1 and 2 of the real vLLM, compared: held weights bit for bit, log-probs, a weight update.

    python tests/parity/tensor_parallel_runs.py OUT [--modes w4a4,w4a4+rac] [--dtype float32] [--backend reference]

Needs two GPUs with vLLM's GPU build, or none with its CPU build (two worker processes). Builds two tiny MoE models A, B
and their RAC masks, then one child process per size runs every mode: engine from A, masks and weights A, dump, score;
weights B through the layerwise reload, dump, score. OUT/report.json and one line per mode and update:

    differing    elements of q*s and of its factors that differ (0 is the claim), of how many
    per_shard    elements that would differ if every rank took the scale of its shard alone: what the claim excludes
    above        share of log-probs that differ by more than 1e-4; median, mean and max of all differences

Float32 engines differ by the order of additions, 1e-6; where an activation lies on a rounding boundary that flips a
code and moves the token and its successors by up to 1e-2. w4a16 runs with one k/v head, which both ranks hold.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from vllm_engines import HIGH_PRECISION, ON_GPU, WORKER_EXTENSION, new_engine, score, stop  # isort: skip  (no vLLM yet)

TESTS = Path(__file__).resolve().parents[1]
MODES = ("bf16", "fp8", "w4a16", "w4a4", "w4a4+rac")
SIZES = (1, 2)
THRESHOLD = 1e-4
# NCCL alone: vLLM's own all-reduce first tries peer access in a process of its own; two partial sums have one order.
GPU_ENGINE = {"gpu_memory_utilization": 0.05, "disable_custom_all_reduce": True}


def environment() -> dict[str, str]:
    """Of a child, whose workers inherit it."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path}


def rollout_mode(name: str):
    from quads.numerics.rac import RacSpec
    from quads.rollout.mode import RolloutMode

    formats = {"bf16": ("bf16", "bf16"), "fp8": ("fp8", "fp8"), "w4a16": ("nvfp4", "bf16")}
    weight, activation = formats.get(name, ("nvfp4", "nvfp4"))
    return RolloutMode(weight, activation, RacSpec(0.5) if name == "w4a4+rac" else None)


def prepare(out: Path, modes: list[str], dtype: str, backend: str) -> dict:
    """Checkpoints and masks in OUT, and the job of the children."""
    from programs import random_prompts, two_models

    sequences = random_prompts(24, 16)
    job: dict = {"out": str(out), "modes": modes, "dtype": dtype, "backend": backend, "models": {}, "masks": {}}
    for heads in (1, 2):
        for key, files in two_models(out, sequences, str(heads), num_key_value_heads=heads).items():
            job[key] |= files
    job["sequences"] = sequences.tolist()
    (out / "job.json").write_text(json.dumps(job))
    return job


def heads_of(mode: str) -> int:
    """k/v heads of the model that `mode` runs with."""
    return 1 if mode == "w4a16" else 2


def start(job: dict, mode: str, size: int, receipt: str | None = None, **changes):
    """An engine from A; `changes` of its quantization config."""
    wanted = rollout_mode(mode)
    config = wanted.to_quantization_config(
        "sync" if wanted.needs_masks else None, HIGH_PRECISION, receipt, job["backend"]
    )
    return new_engine(
        job["models"][f"A{heads_of(mode)}"],
        config | changes,
        dtype=job["dtype"],
        tensor_parallel_size=size,
        distributed_executor_backend="mp" if size > 1 else None,
        **(GPU_ENGINE if ON_GPU else {}),
        worker_extension_cls=WORKER_EXTENSION,
    )


def child(job: dict, size: int) -> None:
    """Every mode with one size: OUT/<mode>.tp<size>.json and dumps OUT/<mode>.tp<size>.<A or B>.safetensors."""
    out = Path(job["out"])
    for mode in job["modes"]:
        stem, began = out / f"{mode}.tp{size}", time.monotonic()
        llm = start(job, mode, size, f"{stem}.receipt.json")
        result: dict = {"start_s": time.monotonic() - began}
        for name in ("A", "B"):
            key = f"{name}{heads_of(mode)}"
            masks = job["masks"][key] if rollout_mode(mode).needs_masks else None
            updates = llm.collective_rpc("quads_reload_from_file", args=(job["models"][key], masks))
            assert len(updates) == size, updates
            llm.collective_rpc("quads_dump_weights", args=(f"{stem}.{name}.safetensors", True))
            result[name] = score(llm, job["sequences"], 2)
        Path(f"{stem}.json").write_text(json.dumps(result))
        stop(llm)
        del llm
    if size > 1 and job["backend"] == "reference":
        (out / "refusals.json").write_text(json.dumps(refusals(job, size)))


def refusals(job: dict, size: int) -> dict[str, str]:
    """What start-up says to a configuration that tensor parallelism does not support."""
    said = {}
    token = {"k": 0.5, "granularity": "block16", "mask": "token", "score": "sumsq"}
    broken = break_weight(job, "layers.0.self_attn.o_proj.weight")
    for name, source, changes in (("token_mask", job, {"rac": token}), ("broken", broken, {})):
        try:
            start(source, "w4a4", size, **changes)
        except Exception as error:  # the executor's own class, with the worker's message in it
            said[name] = f"{type(error).__name__}: {error}"
    return said


def break_weight(job: dict, part: str) -> dict:
    """The job with another model A, whose weight named by `part` ends in NaN: the last rank's part of it."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = Path(job["out"]) / "broken"
    shutil.copytree(job["models"]["A2"], folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(part):
            tensor.view(-1)[-1] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return job | {"models": job["models"] | {"A2": str(folder)}}


def compare(job: dict) -> dict[str, dict]:
    """The report: by "<mode> <A or B>" what the module docstring lists."""
    import torch
    from safetensors.torch import load_file

    report = {}
    for mode in job["modes"]:
        runs = {s: json.loads(Path(f"{job['out']}/{mode}.tp{s}.json").read_text()) for s in SIZES}
        for name in ("A", "B"):
            one, two = (load_file(f"{job['out']}/{mode}.tp{s}.{name}.safetensors") for s in SIZES)
            if one.keys() != two.keys() or any(one[k].shape != two[k].shape for k in one):
                raise SystemExit(f"{mode} {name}: the engines hold other weights: {sorted(one)} and {sorted(two)}")
            moved = torch.cat([(torch.tensor(a) - torch.tensor(b)).abs() for a, b in
                               zip(runs[1][name], runs[2][name], strict=True)])  # fmt: skip
            report[f"{mode} {name}"] = {
                "tensors": len(one),
                "elements": sum(t.numel() for t in one.values()),
                "differing": sum(int((one[k] != two[k]).sum()) for k in one),
                "per_shard": per_shard(job, mode, name, two),
                "logprobs": moved.numel(),
                "above": float((moved > THRESHOLD).float().mean()),
                "median": float(moved.median()),
                "mean": float(moved.mean()),
                "max": float(moved.max()),
                "start_s": [runs[s]["start_s"] for s in SIZES],
            }
    return report


def per_shard(job: dict, mode: str, name: str, held: dict) -> int:
    """Elements of o_proj's q*s that differ when each of two shards along K is quantized by itself."""
    import torch
    from safetensors.torch import load_file

    from quads.numerics.qdq import quantize_weight

    fmt, differing = rollout_mode(mode).weight, 0
    for key, w in load_file(Path(job["models"][f"{name}{heads_of(mode)}"]) / "model.safetensors").items():
        if key.endswith("o_proj.weight"):
            alone = torch.cat([quantize_weight(part.contiguous(), fmt).qs for part in w.chunk(2, -1)], -1)
            differing += int((alone != held[f"{key}.qs"].float()).sum())
    return differing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(json.loads((options.out / "job.json").read_text()), options.child)
        return
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]
    options.out.mkdir(parents=True, exist_ok=True)
    job = prepare(options.out.resolve(), options.modes.split(","), options.dtype, options.backend)
    for size in SIZES:
        command = [sys.executable, __file__, str(options.out), "--child", str(size)]
        subprocess.run(command, env=environment(), check=True)
    versions = {name: importlib.metadata.version(name) for name in ("vllm", "torch")}
    rows = compare(job)
    report = {"dtype": options.dtype, "backend": options.backend, "versions": versions, "rows": rows}
    (options.out / "report.json").write_text(json.dumps(report, indent=1))
    for name, row in rows.items():
        print(name, {key: value for key, value in row.items() if key != "start_s"})


if __name__ == "__main__":
    main()
