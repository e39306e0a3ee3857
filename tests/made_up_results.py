"""SYNTHETIC result files of a small experiment, shaped like the stages' outputs; the numbers are made up."""

import json
import math

from quads import paths
from quads.config import Arm, Benchmarks, Evaluation, Experiment, Grpo, config_hash, resolve_run

# arm -> (share right at the start, share right at the end, mean gap at the end)
MADE_UP = {
    "bf16": (0.50, 0.90, 0.001),
    "nvfp4_naive": (0.45, 0.20, 0.24),
    "qat_only": (0.45, 0.60, 0.10),
    "quads": (0.50, 0.85, 0.01),
}
PROBLEMS, SAMPLES, STEPS = 100, 4, 12
BENCHMARKS = ("chain_depth2", "chain_code")


def made_up_arms():
    w4 = {"weight": "nvfp4"}
    a4 = {"weight": "nvfp4", "activation": "nvfp4"}
    return [
        Arm(name="bf16", title="BF16", paper_row="BF16 RL"),
        Arm(name="nvfp4_naive", title="Naive", paper_row="naive NVFP4 RL", rollout=a4),
        Arm(name="qat_only", title="QAT", paper_row="W4A16 QAT only", trainer=w4, rollout=a4),
        Arm(name="quads", title="QUADS", paper_row="QUADS", trainer=w4, rollout={**a4, "rac": {"k": 0.5}}),
    ]


def made_up_experiment(seeds=(0,)):
    return Experiment(
        name="made_up",
        title="Made-up numbers",
        arms=tuple(MADE_UP),
        seeds=seeds,
        grpo=Grpo(steps=STEPS),
        evaluation=Evaluation(samples_per_problem=SAMPLES, bootstrap=400, benchmarks=Benchmarks(names=BENCHMARKS)),
    )


def _history(start, end, gap, seed):
    rows = [{"step": 0, "eval_accuracy": start}]
    for step in range(1, STEPS + 1):
        wave = 1 + 0.1 * math.sin(step + seed)
        rows.append(
            {
                "step": step,
                "reward": start + (end - start) * step / STEPS,
                "gap_mean": gap * wave,
                "gap_max": 10 * gap * wave,
                "gap_p99": 5 * gap,
                "k1": gap / 10,
                "k3": gap / 20,
                "ess": 1 - gap,
                "clipped_share": gap / 5,
                "entropy": 0.5,
                "response_tokens_mean": 7.0,
                "tokens_per_s": 100.0,
                "seconds": 2.0,
                "seconds_rollout": 1.0,
                "seconds_update": 0.7,
                "seconds_sync": 0.3,
                "grad_norm": 1.0,
            }
        )
    rows[-1]["eval_accuracy"] = end
    return rows


def _engine(share, mode):
    """The first problems are always right, one is right half the time, the rest wrong."""
    right = int(share * PROBLEMS)
    per_problem = [1.0] * right + [0.5] + [0.0] * (PROBLEMS - right - 1)
    mean = sum(per_problem) / PROBLEMS
    return {
        "mode": mode,
        "pass_at_1": mean,
        "ci_low": mean - 0.05,
        "ci_high": mean + 0.05,
        "problems": PROBLEMS,
        "samples_per_problem": SAMPLES,
        "statuses": {"correct": 1},
        "tokens_mean": 7.0,
        "truncated_share": 0.0,
        "per_problem": per_problem,
        "benchmarks": {name: _benchmark(per_problem, name) for name in BENCHMARKS},
        "macro": {"average": mean},
    }


def _benchmark(per_problem, name):
    right = round(SAMPLES * sum(per_problem))
    program = name == "chain_code"
    return {
        "problems": PROBLEMS,
        "samples_per_problem": SAMPLES,
        "pass_at_1": sum(per_problem) / PROBLEMS,
        "pass_at_k": {"1": sum(per_problem) / PROBLEMS, "4": sum(p > 0 for p in per_problem) / PROBLEMS},
        "maj_at_k": None if program else 0.5,
        "statuses": {"correct": right, "wrong": SAMPLES * PROBLEMS - right - 4, "no_answer": 4},
        "failures": 0,
        "no_answer_share": 4 / (SAMPLES * PROBLEMS),
        "truncated_share": 0.01,
        "official_share": 0.25 if program else None,
        "tokens_mean": 7.0,
        "tokens_median": 7.0,
        "tokens_p95": 8.0,
        "logprob_mean": -0.5,
        "per_problem": per_problem,
        "graded_per_problem": [SAMPLES] * PROBLEMS,
    }


def _surgery(arm):
    """As a trainer writes it for one layer: q, k, v share an engine module, experts have two inputs."""
    formats = {"weight": arm.trainer.weight, "activation": arm.trainer.activation}
    quantized = {"status": "quantized", "reason": "", **formats}
    attention = "model.layers.0.self_attn"
    rows = [
        {"module": f"{attention}.{p}_proj", "kind": "Linear", **quantized, "keys": [f"{attention}.qkv_proj"]}
        for p in "qkv"
    ]
    experts = "model.layers.0.mlp.experts"
    rows.append({"module": experts, "kind": "E", **quantized, "keys": [f"{experts}.w13", f"{experts}.w2"]})
    unchanged = {"weight": "unchanged", "activation": "unchanged"}
    rows.append({"module": "lm_head", "kind": "Linear", "status": "skipped", "reason": "skip", **unchanged, "keys": []})
    return {"rows": rows}


def _receipt(arm):
    """The engine's side of the same layer."""
    rollout = arm.rollout
    formats = {"weight": rollout.weight, "activation": rollout.activation, "status": "quantized", "reason": ""}
    kept = {"weight": "unchanged", "activation": "unchanged", "status": "skipped", "reason": "embedding or head"}
    keys = ("model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.experts.w13", "model.layers.0.mlp.experts.w2")
    mask = {"selected": 32, "channels": 64, "sha256": "ab" * 8, "loads": 2}
    return {
        "mode": rollout.mode,
        "backend": "emulated (torch)",
        "model": "Qwen3MoeForCausalLM",
        "config": {"scale_group": arm.weight_scale_group, "rac": rollout.rac and rollout.rac.model_dump()},
        "modules": [
            {"module": "model.layers.0.self_attn.qkv_proj", **formats},
            {"module": "model.layers.0.mlp.experts", **formats},
            {"module": "lm_head", **kept},
        ],
        "masks": dict.fromkeys(keys, mask) if rollout.rac else {},
        "versions": {"vllm": "0", "torch": "0"},
    }


def write_run(results, experiment, arm, seed, numbers=None):
    """result.json, history.jsonl and the evaluation's result.json of one made-up run; returns its folders."""
    start, end, gap = numbers or MADE_UP[arm.name]
    run = resolve_run(experiment, arm, seed)
    train, evaluation = paths.train_dir(experiment, run, results), paths.eval_dir(experiment, run, results)
    train.mkdir(parents=True)
    evaluation.mkdir(parents=True)
    result = {
        "run": run.model_dump(mode="json"),
        "run_id": run.id,
        "config_hash": config_hash(run),
        "code_hash": "c0de",
        "commit": "0" * 40,
        "steps": STEPS,
        "checkpoint": "made/up",
        "rac_masks": None,
        "delta_weight": {"elements": 10, "different": 0, "max_abs": 0.0},
    }
    (train / "result.json").write_text(json.dumps(result))
    (train / "surgery.json").write_text(json.dumps(json.dumps(_surgery(arm))))
    (train / "receipt.json").write_text(json.dumps(_receipt(arm)))
    (train / "history.jsonl").write_text("".join(json.dumps(r) + "\n" for r in _history(start, end, gap, seed)))
    engines = {"own": _engine(end, arm.rollout.mode), "bf16": _engine(end, "bf16")}
    summary = {"run_id": run.id, "eval_hash": paths.eval_hash(experiment), "engines": engines, "sandbox": "bwrap"}
    (evaluation / "result.json").write_text(json.dumps(summary))
    return train, evaluation
