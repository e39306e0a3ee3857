"""Benchmarks: what is pinned (sets/*.yaml), how it is fetched, normalised and checked, and how a job reads it.

    python -m quads.fetch --set NAME --out DIR      once, on a machine with network
    load(NAME, DIR) / iterate(NAME, DIR)            everywhere else: reads DIR/NAME only, never the network

Rows, mathematics: id, problem, answer, source, answer_type ("int", or None: the grader reads it off its form)
Rows, code:        id, question, starter_code, func_name (or None), tests [{input, output, testtype}], date, platform,
                   difficulty
Contract: importing this package touches neither the network nor huggingface_hub; every refusal has its own class in
`errors`. Differs from datasets.load_dataset in the evaluation script: the row count and a hash over the NORMALISED rows
are checked, so that a warm cache with another subset, a mirror with damaged LaTeX or a silent re-upload is an error.
No torch.
"""

from quads.data.benchmarks.spec import Spec, load_spec, names
from quads.data.benchmarks.store import build, iterate, load

__all__ = ["Spec", "build", "iterate", "load", "load_spec", "names"]
