"""Names of the step-0 studies, in the order in which they are read; quads.diagnostics.studies holds the functions.

A module of its own, without imports: the workflow reads it, and the package's __init__ is part of the training code's
hash, which a new study must not change.
"""

STUDIES = (
    "decomposition",
    "tokens",
    "definitions",
    "quadrants",
    "fig7",
    "layers",
    "k_sweep",
    "masks",
    "matrix",
    "fp8",
    "scales",
    "drift",
    "outliers",
)
