"""What the processes of one training session share: environment variables and the name of its weight socket.

Contract: `environment(run)` is complete: the launcher passes it to the driver, whose Ray session hands it to every
actor. Values are fixed here and nowhere else; a variable that the user has set is not overridden where it only tunes
speed, and is where it would change a result.
"""

from __future__ import annotations

import os
from pathlib import Path

from quads.config import Run
from quads.rollout.device import GPU

SESSION = "QUADS_SESSION"


def weight_socket(handle: str) -> str:
    """verl's ZMQ handle with this session's name in it, so that sessions on one machine do not meet.

    Unchanged without a session: a verl run of somebody else's launcher names its sockets itself, on both ends.
    """
    session = os.environ.get(SESSION)
    if not session:
        return handle
    return handle.replace("rl-colocate-zmq", f"rl-colocate-zmq-{session}")


def environment(run: Run, ray_dir: Path, metrics: Path) -> dict[str, str]:
    """Environment of the driver of one run; values of the calling process stay where not listed."""
    env = {
        SESSION: ray_dir.name,
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "VERL_USE_EXTERNAL_MODULES": "quads.integrations.verl.platform",
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        "VLLM_PLUGINS": "quads",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # One engine process: without this vLLM's CPU platform turns the "uni" executor back into "mp".
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        # Ray starts workers at niceness 15, which starves them on a machine that does anything else.
        "RAY_worker_niceness": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "HYDRA_FULL_ERROR": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if run.runtime.device == "cpu":
        env |= {
            "VERL_PLATFORM": "cpu",
            # vLLM compiles parts of its sampler at the first request (16 s on two cores), for nothing at this size.
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": str(run.runtime.threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    else:
        # The stock FSDP engine is registered for (cuda, nvidia): the vendor picks ours over it.
        env |= {"VERL_PLATFORM": "nvidia", "VERL_ENGINE_VENDOR": "quads", **GPU}
    return env
