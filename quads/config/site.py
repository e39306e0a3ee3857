"""What a cluster needs to know and no experiment should: profiles/slurm/site.yaml, read by the rules.

    account: my_project
    cpu_partition: cpu
    gpu_partition: gpu
    gpu_model: h200            # optional: the gres type

Contract: the file may be missing (Slurm's own defaults then hold); an unknown key is an error. Differs from
`--default-resources` in that one file serves CPU and GPU jobs. Which GPU runs a job is no part of any hash: the
hardware is written into every result instead.
"""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import Field, ValidationError

from quads.config.arms import Frozen
from quads.config.errors import ConfigError, from_validation

SITE = Path("profiles/slurm/site.yaml")
NAME = r"^[\w.,-]+$"


class Site(Frozen):
    """Slurm names; None leaves the choice to the cluster."""

    account: str | None = Field(None, pattern=NAME)
    cpu_partition: str | None = Field(None, pattern=NAME)
    gpu_partition: str | None = Field(None, pattern=NAME)
    gpu_model: str | None = Field(None, pattern=NAME)

    def partition(self, gpu: bool) -> str:
        """Partition of a job, "" where the site names none."""
        return (self.gpu_partition if gpu else self.cpu_partition) or ""

    def gres(self, gpus: int) -> str:
        """Generic resource of one node of a job on several nodes, "" without GPUs."""
        if not gpus:
            return ""
        return f"gpu:{self.gpu_model}:{gpus}" if self.gpu_model else f"gpu:{gpus}"


def load_site(path: Path = SITE) -> Site:
    """The site's names; defaults where the file is missing. Raises ConfigError."""
    if not path.is_file():
        return Site()
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        return Site.model_validate(loaded)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    except ValidationError as error:
        raise from_validation(str(path), Site, error) from None
