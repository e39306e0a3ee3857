"""Configuration: closed, frozen, stable hashes, and messages that name what is known."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from quads import paths
from quads.config import (
    Arm,
    ConfigError,
    Data,
    Experiment,
    Model,
    Run,
    canonical_json,
    config_hash,
    load_arm,
    load_arms,
    load_experiment,
    load_experiments,
    resolve_run,
)
from quads.schema import schema

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
ARMS = sorted(p.stem for p in (CONFIGS / "arms").glob("*.yaml"))
EXPERIMENTS = sorted(p.stem for p in CONFIGS.glob("*.yaml"))


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    """A copy of configs/ to break."""
    return Path(shutil.copytree(CONFIGS, tmp_path / "configs"))


def edit(path: Path, **values: Any) -> None:
    """Set top-level keys of a YAML file."""
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **values}))


def run_of(experiment: Experiment, arm: str = "quads", seed: int = 0) -> Run:
    return resolve_run(experiment, load_arm(arm, CONFIGS), seed)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_loads(name: str) -> None:
    experiment = load_experiment(name, CONFIGS)
    assert [arm.name for arm in load_arms(experiment, CONFIGS, more=True)] == [*experiment.arms, *experiment.more_arms]


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_loads_and_is_used(name: str) -> None:
    used = {arm for e in load_experiments(CONFIGS).values() for arm in e.arms + e.more_arms}
    assert load_arm(name, CONFIGS).name in used, f"configs/arms/{name}.yaml is in no experiment"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_schema_accepts_experiments(name: str) -> None:
    document = schema()
    jsonschema.validate(
        yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()), {**document, "$ref": "#/$defs/Experiment"}
    )


@pytest.mark.parametrize("name", ARMS)
def test_schema_accepts_arms(name: str) -> None:
    arm = yaml.safe_load((CONFIGS / "arms" / f"{name}.yaml").read_text())
    jsonschema.validate(arm, {**schema(), "$ref": "#/$defs/Arm"})


def test_schema_is_closed() -> None:
    with pytest.raises(jsonschema.ValidationError, match="weigth"):
        jsonschema.validate({"name": "x", "title": "x", "weigth": 1}, {**schema(), "$ref": "#/$defs/Arm"})


def test_schema_stage_writes_it(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "schema.json"
    subprocess.run([sys.executable, "-m", "quads.schema", "--out", str(out)], check=True, cwd=ROOT)
    assert json.loads(out.read_text()) == json.loads(json.dumps(schema()))


def test_unknown_key_names_file_and_known_keys(configs: Path) -> None:
    edit(configs / "smoke.yaml", lerning_rate=1)
    with pytest.raises(ConfigError) as caught:
        load_experiment("smoke", configs)
    message = str(caught.value)
    assert "smoke.yaml" in message and "unknown key 'lerning_rate'" in message
    for known in ("arms", "grpo", "seeds", "tracking"):
        assert known in message


def test_unknown_nested_key_names_its_own_neighbours(configs: Path) -> None:
    edit(configs / "smoke.yaml", grpo={"steps": 3, "stepss": 4})
    with pytest.raises(ConfigError, match=r"grpo\.stepss: unknown key 'stepss'; known: .*prompts_per_step.*'steps'"):
        load_experiment("smoke", configs)


def test_unknown_key_below_an_optional_model(configs: Path) -> None:
    edit(configs / "arms" / "quads.yaml", rollout={"weight": "nvfp4", "activation": "nvfp4", "rac": {"kk": 0.5}})
    with pytest.raises(ConfigError, match="unknown key 'kk'; known: granularity, k, mask, score"):
        load_arm("quads", configs)


def test_all_problems_at_once(configs: Path) -> None:
    edit(configs / "smoke.yaml", one=1, two=2)
    with pytest.raises(ConfigError, match=r"(?s)2 problem.*one.*two"):
        load_experiment("smoke", configs)


def test_unknown_arm_names_known(configs: Path) -> None:
    edit(configs / "smoke.yaml", arms=["quad"])
    with pytest.raises(ConfigError) as caught:
        load_arms(load_experiment("smoke", configs), configs)
    assert "unknown arm 'quad'" in str(caught.value) and "Did you mean 'quads'?" in str(caught.value)
    assert all(arm in str(caught.value) for arm in ARMS)


def test_unknown_experiment_names_known() -> None:
    with pytest.raises(ConfigError, match=r"unknown experiment 'toi'; known: .*smoke.*toy.*Did you mean 'toy'"):
        load_experiment("toi", CONFIGS)


@pytest.mark.parametrize(
    ("rollout", "expected"),
    [
        ({"weight": "nvfp5", "activation": "bf16"}, "'bf16', 'fp8' or 'nvfp4'"),
        ({"weight": "fp8", "activation": "nvfp4"}, "not a mode; known: bf16/bf16, fp8/fp8, nvfp4/bf16, nvfp4/nvfp4"),
        ({"weight": "nvfp4", "activation": "bf16", "rac": {"k": 0.5}}, "it needs rollout.activation=nvfp4"),
    ],
)
def test_unknown_mode_names_known(configs: Path, rollout: dict[str, Any], expected: str) -> None:
    edit(configs / "arms" / "quads.yaml", rollout=rollout)
    with pytest.raises(ConfigError) as caught:
        load_arm("quads", configs)
    assert expected in str(caught.value)


@pytest.mark.parametrize(("width", "fix"), [(40, "use 32 or 48"), (8, "use 16$"), (100, "use 96 or 112")])
def test_k_not_a_multiple_of_16(width: int, fix: str) -> None:
    for field in ("hidden", "expert_hidden"):
        with pytest.raises(ValidationError) as caught:
            Model.model_validate({field: width})
        (error,) = caught.value.errors()
        assert re.search(f"model.{field}={width} is not a multiple of 16.*{fix}", error["msg"])


def test_file_stem_must_equal_name(configs: Path) -> None:
    (configs / "toy.yaml").rename(configs / "game.yaml")
    with pytest.raises(ConfigError, match="name is 'toy'; it must equal the file's stem 'game'"):
        load_experiment("game", configs)


@pytest.mark.parametrize(
    ("text", "expected"), [("- a\n", "expected a mapping"), ("a: [1\n", "not valid YAML"), ("", "got NoneType")]
)
def test_damaged_yaml(configs: Path, text: str, expected: str) -> None:
    (configs / "smoke.yaml").write_text(text)
    with pytest.raises(ConfigError, match=expected):
        load_experiment("smoke", configs)


def test_prompts_must_not_repeat(configs: Path) -> None:
    edit(configs / "smoke.yaml", grpo={"steps": 1000})
    with pytest.raises(ConfigError, match=r"raise data.train_prompts to 12000"):
        load_experiment("smoke", configs)


def test_frozen() -> None:
    experiment = load_experiment("toy", CONFIGS)
    with pytest.raises(ValidationError):
        experiment.grpo.steps = 3  # type: ignore[misc]


def test_hash_of_a_known_model_is_fixed() -> None:
    """Pinned by hand: sha256 over the canonical JSON. If it moves, every finished run is orphaned."""
    text = (
        '{"calibration_prompts":64,"eval_prompts":384,"operations":6,"operators":"+-*","seed":1000,"sets":[],"tests_per_program":15,'
        '"train_prompts":1920}'
    )
    data = Data.model_validate(json.loads(text))
    assert canonical_json(data) == text
    assert config_hash(data) == hashlib.sha256(text.encode()).hexdigest()[:10]


def test_hash_ignores_key_order_and_stated_defaults() -> None:
    one = Arm.model_validate({"name": "a", "title": "t", "trainer": {"weight": "nvfp4", "activation": "bf16"}})
    two = Arm.model_validate({"trainer": {"weight": "nvfp4"}, "title": "t", "name": "a"})
    assert config_hash(one) == config_hash(two)


@pytest.mark.parametrize(
    "change",
    [
        {"evaluation": {"samples_per_problem": 9, "bootstrap": 77}},
        {"tracking": {"uri": "http://localhost:1", "enabled": False}},
        {"seeds": [0, 1, 2]},
        {"arms": ["quads", "fp8"]},
        {"title": "another"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_does_not_move_a_run(configs: Path, change: dict[str, Any]) -> None:
    before = load_experiment("smoke", configs)
    edit(configs / "smoke.yaml", **change)
    after = load_experiment("smoke", configs)
    assert after != before
    assert run_of(after).id == run_of(before).id
    assert paths.model_dir(after) == paths.model_dir(before)


@pytest.mark.parametrize(
    "change",
    [{"grpo": {"steps": 2}}, {"model": {"hidden": 80}}, {"warmup": {"seed": 5}}, {"data": {"train_prompts": 97}}],
    ids=lambda change: next(iter(change)),
)
def test_what_moves_a_run(configs: Path, change: dict[str, Any]) -> None:
    before = load_experiment("smoke", configs)
    edit(configs / "smoke.yaml", **change)
    assert run_of(load_experiment("smoke", configs)).id != run_of(before).id


def test_each_arm_and_seed_has_its_own_run() -> None:
    experiment = load_experiment("toy", CONFIGS)
    runs = {run_of(experiment, arm, seed).id for arm in ARMS for seed in (0, 1)}
    assert len(runs) == 2 * len(ARMS)


def test_eval_path_follows_evaluation_only(configs: Path) -> None:
    before = load_experiment("smoke", configs)
    run = run_of(before)
    edit(configs / "smoke.yaml", evaluation={"samples_per_problem": 9})
    after = load_experiment("smoke", configs)
    assert paths.eval_dir(after, run) != paths.eval_dir(before, run)
    assert paths.train_dir(after, run) == paths.train_dir(before, run)


@pytest.mark.parametrize(("devices", "expected"), [((1, 1), 96), ((1, 2), 48), ((2, 4), 12)])
def test_a_micro_batch_is_at_most_what_a_device_gets(devices: tuple[int, int], expected: int) -> None:
    toy = load_experiment("toy", CONFIGS)
    shape = {"nodes": devices[0], "gpus_per_node": devices[1], "agent_loop": "verl"}
    runtime = {**toy.runtime.model_dump(), **shape}
    changed = Experiment.model_validate({**toy.model_dump(), "runtime": runtime})
    assert changed.runtime.micro_batch(12 * 8) == expected


def test_sequences_that_devices_cannot_share_are_refused() -> None:
    toy = load_experiment("toy", CONFIGS)
    for shape in ({"gpus_per_node": 5, "agent_loop": "verl"}, {"micro_batch_sequences": 36}):
        with pytest.raises(ValueError, match=r"a mini-batch of 96 sequences on \d device"):
            Experiment.model_validate({**toy.model_dump(), "runtime": {**toy.runtime.model_dump(), **shape}})
