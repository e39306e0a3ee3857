"""Where the rollout/trainer log-prob gap comes from: capture, ladders, decomposition, metrics, step-0 studies.

    capture.py    prompts, sampled tokens and every log-prob the engine gives for them, in one file per engine mode
    ladder.py     the trainer's log-probs of the same tokens at any precision: T0, T1, T2
    decompose.py  delta_weight + delta_act + delta_num = total, and the parts of delta_num
    metrics.py    every definition of "the gap", each with its definition in its name
    layers.py     per layer: QSNR, dead zone, energy that RAC captures, mask overlap
    studies.py, scales.py, drift.py, outliers.py   step-0 studies: one table and one figure each (figures.py)
    collapse.py   when a training run counts as collapsed (no torch)

Reads checkpoints and captured files; needs no training run. Importing this package loads no torch.
"""

# Names of the studies, in the order in which they are read; quads.diagnostics.studies holds the functions.
STUDIES = (
    "decomposition",
    "tokens",
    "layers",
    "k_sweep",
    "masks",
    "matrix",
    "fp8",
    "scales",
    "drift",
    "outliers",
)
