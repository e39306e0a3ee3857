"""A node that Ray gives up on is started again; any other error is not hidden."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.stack
SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup"


@pytest.mark.parametrize(
    ("errors", "starts", "raised"),
    [([SLOW], 2, None), ([SLOW] * 3, 3, "timed out"), (["no such address"], 1, "address")],
)
def test_starts(monkeypatch, errors, starts, raised) -> None:
    import ray
    from omegaconf import OmegaConf

    from quads.integrations.verl import main

    seen, left = [], list(errors)

    def init(**options):
        seen.append(options)
        if left:
            raise RuntimeError(left.pop(0))

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: seen.append("shutdown"))
    monkeypatch.setattr("verl.trainer.constants_ppo.get_ppo_ray_runtime_env", lambda config: {})
    config = SimpleNamespace(ray_kwargs=SimpleNamespace(ray_init=OmegaConf.create({"num_cpus": 2})))
    if raised is None:
        main.start_ray(config, {})
    else:
        with pytest.raises(RuntimeError, match=raised):
            main.start_ray(config, {})
    calls = [one for one in seen if one != "shutdown"]
    assert len(calls) == starts and all(one["num_cpus"] == 2 for one in calls)
    assert seen.count("shutdown") == starts - 1
