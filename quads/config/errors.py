"""Errors of bad input, worded for the person who wrote the YAML.

Contract: one message names the file, the key, what was given, what is known or expected, and what to do.
Differs from pydantic's own text, which says "Extra inputs are not permitted" and leaves the reader to guess the names.
"""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError


class ConfigError(ValueError):
    """A configuration cannot be used; the message says what, got, expected and what to do."""


def unknown_name(what: str, got: str, known: list[str]) -> str:
    """Message for a name outside a closed set, with the closest known one."""
    close = difflib.get_close_matches(got, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown {what} {got!r}; known: {', '.join(sorted(known))}.{hint}"


def _model_at(model: type[BaseModel], path: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The model class that owns the last key of `path`, or None where the path leaves the models."""
    here: type[BaseModel] | None = model
    for key in path[:-1]:
        if here is None or not isinstance(key, str) or key not in here.model_fields:
            return None
        args = [
            here.model_fields[key].annotation,
            *getattr(here.model_fields[key].annotation, "__args__", ()),
        ]
        here = next((a for a in args if isinstance(a, type) and issubclass(a, BaseModel)), None)
    return here


def _line(model: type[BaseModel], error: Any) -> str:
    path = tuple(error["loc"])
    dotted = ".".join(str(p) for p in path) or "(top level)"
    if error["type"] == "extra_forbidden":
        owner = _model_at(model, path)
        if owner is not None:
            return f"{dotted}: {unknown_name('key', str(path[-1]), list(owner.model_fields))}"
    if error["type"] == "missing":
        return f"{dotted}: required and missing; add it."
    if error["type"] == "value_error":
        return f"{dotted}: {error['ctx']['error']}"
    return f"{dotted}: {error['msg']} (got {error['input']!r})"


def from_validation(source: str, model: type[BaseModel], error: ValidationError) -> ConfigError:
    """All findings of one validation as a single ConfigError that names the file."""
    lines = [_line(model, e) for e in error.errors()]
    return ConfigError(f"{source}: {len(lines)} problem(s)\n  " + "\n  ".join(lines))
