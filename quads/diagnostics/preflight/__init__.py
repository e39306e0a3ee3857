"""Pre-flight: what a rollout precision would do to RL on a checkpoint, from one layer-streamed pass, before any RL.

    checkpoint.py   safetensors on disk -> parameters of one decoder layer at a time; every check of the folder
    sequences.py    prompts and responses -> token ids, split into calibration and scored sequences
    variants.py     the streams: trainer precisions (float32) and rollout precisions (a bf16 engine's stand-in)
    engine.py       arithmetic of the stand-in between and inside quantized layers
    stream.py       all streams through layer i, then layer i + 1; masks, per-layer statistics, drift
    head.py         log-probs and gaps per trainer x rollout pair
    cost.py         bytes and modelled time per rollout precision
    verdict.py      thresholds with their provenance; ok | risky | will hurt | unknown (no torch)
    report.py, render.py, figure.py    preflight.json, preflight.md, preflight.svg/.png, the summary

Differs from the studies in quads.diagnostics in that no engine runs and no model is ever whole in memory.
"""
