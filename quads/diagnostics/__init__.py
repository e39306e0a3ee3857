"""Where the rollout/trainer log-prob gap comes from: capture, ladders, decomposition, metrics, step-0 studies.

    capture.py    prompts, sampled tokens, every log-prob the engine gives for them, a file per engine mode (stored.py)
    ladder.py     the trainer's log-probs of the same tokens at any precision: T0, T1, T2
    decompose.py  delta_weight + delta_act + delta_num = total, and the parts of delta_num
    metrics.py    every definition of "the gap", each with its definition in its name
    layers.py     per layer: QSNR, dead zone, energy that RAC captures, mask overlap
    studies.py, by_token.py, layerwise.py, scales.py, drift.py, outliers.py
                  step-0 studies: one table and one figure each (figures.py); measure.py: what several share
    trained.py    the same decomposition after training: a run's checkpoint, its own engine and its own masks
    names.py      names of the studies
    during.py     the decomposition while training: when, and its files; during_layers.py: the same by layer
    collapse.py   when a training run counts as collapsed (no torch)

Reads checkpoints and captured files; needs no training run. Importing this package loads no torch.
"""
