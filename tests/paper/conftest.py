"""Result files of a made-up experiment, one folder per test."""

import pytest
from made_up_results import made_up_arms, made_up_experiment, write_run

from quads import report
from quads.paper.sources import load_sources


@pytest.fixture
def made_up(tmp_path):
    """(results folder, experiment, arms) with one made-up run per arm and seed 0."""
    experiment, arms = made_up_experiment(), made_up_arms()
    for arm in arms:
        write_run(tmp_path, experiment, arm, 0)
    return tmp_path, experiment, arms


@pytest.fixture
def inputs(made_up):
    """Function () -> Inputs as the stage reads them; studies in `diagnose`, benchmarks in `throughput`."""

    def read(kernels=()):
        results, experiment, arms = made_up
        places = {"diagnose": results / "diagnose", "throughput": results / "throughput"}
        sources = load_sources(results, experiment, arms)
        return report.read_inputs(experiment, sources, results, **places, kernels=kernels)

    return read
