"""One data set as data: sets/NAME.yaml next to this module (test sets) and in quads/data/training_sets (training sets).

    hub_id, revision      repository and full commit on the Hugging Face hub
    files                 path or pattern in that repository; sha256, bytes and rows of the file where they are known
    layout                math | livecodebench | deepcoder: how raw rows become normalised ones
    fields                layout math: where id, problem and answer stand (dots go into nested fields)
    rows                  rows in all files together, before a date window or dropped rows
    rows_sha256           hash over the normalised rows; null: recorded in a lock on the first fetch (see `store`)
    window                layout livecodebench: release and both dates, inclusive, as the official filter compares them

Contract: closed (an unknown key is an error naming the known ones). `pin_hash` covers exactly what decides the rows:
notes, licences and published numbers may be edited without refetching. No torch, no network.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from quads.config.errors import from_validation, unknown_name
from quads.data.benchmarks.errors import DataError

HERE = Path(__file__).resolve().parent
FOLDERS = (HERE / "sets", HERE.parent / "training_sets" / "sets")
SHA256 = r"^[0-9a-f]{64}$"


class _Closed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FilePin(_Closed):
    """One file of the repository. A path with `*` stands for shards, which are read in the order of their names."""

    path: str
    sha256: str | None = Field(default=None, pattern=SHA256)
    bytes: int | None = None
    rows: int | None = None

    @property
    def is_pattern(self) -> bool:
        return "*" in self.path


class Fields(_Closed):
    """Where a mathematical row keeps its parts. id None: the number of the row in its files."""

    problem: str
    answer: str
    id: str | None = None


class Window(_Closed):
    """Contest dates that count: both ends inclusive, naive date-times at midnight, as the official filter compares."""

    release: str
    start: datetime | None = None
    end: datetime | None = None
    published_rows: int | None = None  # as papers report it; compared and reported, never enforced

    def holds(self, date: datetime) -> bool:
        """Whether a contest date lies in the window."""
        return (self.start is None or self.start <= date) and (self.end is None or date <= self.end)


class Spec(_Closed):
    """A pinned data set."""

    name: str
    title: str
    role: Literal["test", "train"]
    kind: Literal["math", "code"]
    layout: Literal["math", "livecodebench", "deepcoder"]
    hub_id: str
    revision: str = Field(pattern=r"^[0-9a-f]{40}$")
    files: tuple[FilePin, ...] = Field(min_length=1)
    rows: int = Field(gt=0)
    rows_sha256: str | None = Field(default=None, pattern=SHA256)
    licence: str
    pinned_from: str
    notes: str = ""
    fields: Fields | None = None
    answer_type: Literal["int"] | None = None
    answer_range: tuple[int, int] | None = None
    window: Window | None = None
    is_livecodebench: bool = False  # every row comes from LiveCodeBench itself: see quads.data.training_sets

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.layout == "math") != (self.fields is not None) or (self.kind == "math") != (self.layout == "math"):
            raise ValueError(f"kind={self.kind}, layout={self.layout}: `fields` belongs to layout math and only there")
        if (self.layout == "livecodebench") != (self.window is not None):
            raise ValueError("`window` belongs to layout livecodebench and only there")
        known = [pin.rows for pin in self.files]
        if None not in known and sum(row for row in known if row is not None) != self.rows:
            raise ValueError(f"rows={self.rows}, but the files say {known}")
        return self

    @property
    def noncommercial(self) -> bool:
        """Rows of such a set are never committed, not even a few as a test."""
        return "-nc" in self.licence.lower()

    @property
    def pin_hash(self) -> str:
        """Ten hex digits over everything that decides the normalised rows."""
        keys = ("name", "role", "layout", "hub_id", "revision", "files", "rows", "fields", "answer_type")
        more = {"answer_range": self.answer_range, "livecodebench": self.is_livecodebench}
        window = self.window.model_dump(mode="json", exclude={"published_rows"}) if self.window else None
        body = {**self.model_dump(mode="json", include=set(keys)), **more, "window": window}
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:10]


def _files() -> dict[str, Path]:
    return {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.yaml"))}


def names(role: Literal["test", "train"] | None = None) -> list[str]:
    """Names of all pinned sets, test sets first; `role` keeps one kind."""
    return [name for name in _files() if role is None or load_spec(name).role == role]


def load_spec(name: str) -> Spec:
    """The pin of one set. Raises DataError naming the known sets, ConfigError on a file with wrong keys."""
    known = _files()
    if name not in known:
        raise DataError(unknown_name("data set", name, list(known)))
    path = known[name]
    try:
        spec = Spec.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise from_validation(str(path), Spec, error) from None
    if spec.name != name:
        raise DataError(f"{path}: name is {spec.name!r}; it must equal the file's stem {name!r}")
    return spec
