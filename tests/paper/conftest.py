"""Result files of a made-up experiment, one folder per test."""

import pytest
from made_up_results import made_up_arms, made_up_experiment, write_run


@pytest.fixture
def made_up(tmp_path):
    """(results folder, experiment, arms) with one made-up run per arm and seed 0."""
    experiment, arms = made_up_experiment(), made_up_arms()
    for arm in arms:
        write_run(tmp_path, experiment, arm, 0)
    return tmp_path, experiment, arms
