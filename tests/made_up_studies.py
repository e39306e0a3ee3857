"""SYNTHETIC studies and rollout benchmarks, shaped like the files of quads.diagnose and quads.bench.rollout."""

import csv
import json

HARDWARE = {"cpu": "Made-up CPU", "cores": 2, "memory_gib": 8.0, "gpus": [], "system": "none"}
KS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
SEEDS = (0, 1, 2)
# largest gap by k: falls at every step, by far more than the seeds differ
LARGEST = dict(zip(KS, (4.0, 3.0, 2.0, 1.0, 0.6, 0.3), strict=True))
FLOOR = 0.25


def write_study(folder, name, table, experiment="made_up", **changes):
    """NAME.csv and NAME.json of one study."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = list(dict.fromkeys(key for row in table for key in row))
    with open(folder / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(table)
    said = {
        "study": name,
        "experiment": experiment,
        "checkpoint_sha256": "c" * 64,
        "settings": {"seeds": list(SEEDS)},
        "arms": [],
        "rows": len(table),
        "notes": [],
        "commit": "1" * 40,
        "hardware": HARDWARE,
        "versions": {"torch": "0"},
    }
    (folder / f"{name}.json").write_text(json.dumps({**said, **changes}))


def k_sweep_rows(largest=LARGEST):
    """Both granularities; seeds differ by 1 %, the same for every k."""
    rows = []
    for granularity in ("channel", "block16"):
        for k, gap in largest.items():
            rows += [_sweep_row(granularity, k, "nvfp4/bf16", gap, seed) for seed in SEEDS]
    return rows + [_sweep_row("none", "floor", "bf16/bf16", FLOOR, seed) for seed in SEEDS]


def _sweep_row(granularity, k, trainer, gap, seed):
    gap *= 1 + 0.01 * (seed - 1)
    keys = {"granularity": granularity, "k": k, "trainer": trainer, "rollout": "x", "seed": seed}
    return {**keys, "max_token_abs_d": gap, "mean_seq_max_token_abs_d": gap / 5}


def fig7_rows(symmetric=2.0):
    """Two layers and the log-probs; the symmetric trainer's mismatch is `symmetric` times the asymmetric one's."""
    rows = []
    for layer, metric in (
        ("model.layers.0", "mean_token_rel_l2"),
        ("model.layers.1", "mean_token_rel_l2"),
        ("model.layers.0.mlp", "mean_same_input_token_rel_l2"),
        ("log-probs", "mean_token_abs_d"),
    ):
        for rollout in ("w4a4", "w4a4+rac"):
            for trainer, mean in (("w4a4", 0.1 * symmetric), ("w4a4+rac", 0.1 * symmetric), ("w4a16", 0.1)):
                row = {"layer": layer, "trainer": trainer, "rollout": rollout, "metric": metric}
                rows.append({**row, "mean": mean, "sd": 0.002, "seeds": 3})
    return rows


def decomposition_rows():
    """Total and terms of two arms."""
    terms = {"total": 0.3, "delta_weight": 0.0, "delta_act": 0.2, "delta_num": 0.1}
    return [
        {
            "arm": arm,
            "seed": seed,
            "level": "total" if term == "total" else "term",
            "term": term,
            "mean_token_abs": size,
        }
        for arm in ("bf16", "quads")
        for term, size in terms.items()
        for seed in SEEDS
    ]


def bench_file(**changes):
    """A rollout benchmark in which QUADS is 1.1 times FP8 in three decode shapes; the emulated rows say otherwise."""
    rows = []
    for batch in (8, 16, 32):
        for mode, speed in (("fp8", 100.0), ("w4a4+rac", 110.0), ("w4a4", 120.0)):
            rows.append(_bench_row(mode, "native", batch, speed * batch * (1 + 0.001 * (batch == 16))))
            rows.append(_bench_row(mode, "emulated", batch, 1000.0 / speed))
    sync = {**_bench_row("w4a4", "native", 1, 1.0), "phase": "sync", "tokens_per_s": None, "seconds": 2.0}
    said = {
        "schema": "quads.rollout_bench/1",
        "hardware": {**HARDWARE, "gpus": ["Made-up GPU, 1 MiB, 0"]},
        "versions": {"vllm": "0"},
        "commit": "2" * 40,
        "rows": [*rows, {**sync, "bytes": 5}],
    }
    return {**said, **changes}


def _bench_row(mode, backend, batch, speed):
    shape = {"phase": "decode", "batch": batch, "prompt_tokens": 128, "response_tokens": 128}
    return {"mode": mode, "backend": backend, **shape, "tokens_per_s": speed}
