"""YAML files to validated models. No other module reads configs/.

Contract: a file is named by its stem, and the stem must equal the `name` inside; every problem of a file is reported
at once, as a ConfigError that names the file and the known keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from quads.config.arms import Arm
from quads.config.errors import ConfigError, from_validation, unknown_name
from quads.config.experiment import Experiment

M = TypeVar("M", Arm, Experiment)

CONFIGS = Path("configs")


class _NoDuplicates(yaml.SafeLoader):
    """YAML lets a second key of the same name win silently; here it is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As in SafeLoader, after a look at the keys."""
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.YAMLError(f"key {key!r} stands twice{node.start_mark}; keep one of them")
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=_NoDuplicates)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text ({error}); save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: expected a mapping of keys, got {type(loaded).__name__}")
    return loaded


def _load(path: Path, model: type[M]) -> M:
    try:
        parsed = model.model_validate(_read(path))
    except ValidationError as error:
        bad: type[BaseModel] = model
        raise from_validation(str(path), bad, error) from None
    if parsed.name != path.stem:
        raise ConfigError(f"{path}: name is {parsed.name!r}; it must equal the file's stem {path.stem!r}")
    return parsed


def load_arm(name: str, configs: Path = CONFIGS) -> Arm:
    """The arm in configs/arms/NAME.yaml. Raises ConfigError naming the known arms."""
    path = configs / "arms" / f"{name}.yaml"
    if not path.is_file():
        known = [p.stem for p in (configs / "arms").glob("*.yaml")]
        raise ConfigError(f"{configs / 'arms'}: " + unknown_name("arm", name, known))
    return _load(path, Arm)


def load_arms(experiment: Experiment, configs: Path = CONFIGS, *, more: bool = False) -> list[Arm]:
    """The arms of an experiment in its order; `more` adds more_arms."""
    names = experiment.arms + (experiment.more_arms if more else ())
    return [load_arm(n, configs) for n in names]


def load_experiment(name: str, configs: Path = CONFIGS) -> Experiment:
    """The experiment in configs/NAME.yaml. Raises ConfigError naming the known experiments."""
    path = configs / f"{name}.yaml"
    if not path.is_file():
        known = [p.stem for p in configs.glob("*.yaml")]
        raise ConfigError(f"{configs}: " + unknown_name("experiment", name, known))
    return _load(path, Experiment)


def load_experiments(configs: Path = CONFIGS) -> dict[str, Experiment]:
    """All experiments under configs/, by name."""
    return {p.stem: load_experiment(p.stem, configs) for p in sorted(configs.glob("*.yaml"))}
