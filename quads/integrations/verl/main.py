"""Driver of one training run: verl's task runner in this process, on a private Ray session.

    python -m quads.integrations.verl.main LAUNCH.json        LAUNCH.json = {"overrides", "environment", "launcher"}

overrides: list of key=value; environment: variables for actors on other nodes; launcher: id of the process to end with.

Differs from `verl.trainer.main_ppo` in two ways. The config is composed from an explicit list of overrides, without
Hydra's working-directory and logging side effects. And the task runner runs here, not in a Ray actor of its own:
one process and one round of imports less, about 20 s on two cores; its own actors do not notice.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

from quads.integrations.ray_cluster import ADDRESS
from quads.lifeline import watch_parent

log = logging.getLogger("quads.train")

STARTS = 3
SLOW_START = "timed out during startup"
WITHOUT_RAY = ("torch", "transformers", "tensordict", "vllm")


def compose(overrides: list[str]) -> Any:
    """verl's ppo_trainer config with the overrides applied."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return hydra_compose("ppo_trainer", overrides)


def check_platform(config: Any) -> None:
    """verl hides a failed platform plugin and falls back to CUDA; stop instead."""
    from verl.utils.device import get_device_name

    if get_device_name() != config.trainer.device:
        raise RuntimeError(
            f"verl runs on device {get_device_name()!r}, the config asks for {config.trainer.device!r}; "
            "VERL_PLATFORM and VERL_USE_EXTERNAL_MODULES decide it (quads.integrations.verl.session)"
        )


def start_ray(config: Any, environment: dict[str, str]) -> None:
    """A private Ray session, or the cluster named by QUADS_RAY_ADDRESS, with verl's runtime environment.

    The raylets of a cluster were started without `environment`, so every actor is given it by name.
    """
    import ray
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    runtime_env = get_ppo_ray_runtime_env(config)
    runtime_env.setdefault("env_vars", {})["TRANSFER_QUEUE_ENABLE"] = "1"
    options = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    address = os.environ.get(ADDRESS)
    if address is not None:
        runtime_env["env_vars"] |= environment
        options = {"address": address}
    else:
        # Somebody's cluster on this machine is not ours to join.
        os.environ.pop("RAY_ADDRESS", None)
    for tries_left in reversed(range(STARTS)):
        try:
            ray.init(**{**options, "runtime_env": runtime_env}, log_to_driver=True)
            return
        except Exception as error:
            # Ray gives its node 30 s and has no setting for it; on a machine with other work that is too short.
            if SLOW_START not in str(error) or not tries_left:
                raise
            log.warning("Ray's node did not start within its 30 s; trying again (%d left)", tries_left)
            ray.shutdown()


def train(config: Any) -> None:
    """Validate the config, start Ray, run verl's task runner here, and shut Ray down."""
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    import quads.integrations.verl.trainer  # noqa: F401  registers the trainer mode

    check_platform(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    runner = TaskRunnerV1.__ray_metadata__.modified_class()
    try:
        runner.run(config)
    finally:
        ray.shutdown()


def main() -> None:
    """Compose the config of LAUNCH.json, start Ray, train."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    launch = json.loads(Path(sys.argv[1]).read_text())
    watch_parent(parent=launch["launcher"])
    config = compose(launch["overrides"])
    # Ray's daemons and this process's imports take about ten seconds each: overlap them. Only packages that do not
    # touch Ray: verl's imports register usage tags, and ray.init fails when their dictionary changes while it reads it.
    starting = threading.Thread(target=lambda: [import_module(name) for name in WITHOUT_RAY], daemon=True)
    starting.start()
    start_ray(config, launch["environment"])
    starting.join()
    train(config)


if __name__ == "__main__":
    main()
