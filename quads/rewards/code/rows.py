"""A LiveCodeBench row as a Task: public and private tests together, decoded without running anything.

    public_test_cases    JSON text of [{"input", "output", "testtype"}...]
    private_test_cases   the same, or base64(zlib(pickle(that JSON text)))
    metadata             JSON text; "func_name" is set for functional problems

The pickle holds one string, so an unpickler that refuses every class reads it, and downloaded data cannot execute code.
Decompression is bounded. Differs from the official loader, which calls pickle.loads.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Mapping
from typing import Any, NoReturn

from quads.rewards.code.task import Task

# The largest known payload of release v6 decodes to some hundred megabytes; a bomb would be a thousand times its size.
LARGEST = 1 << 30


class UnsafePickleError(ValueError):
    """A test payload asked for a class or function: it is not data."""


class _DataOnly(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise UnsafePickleError(f"a test payload asks for {module_name}.{global_name}; only text is accepted")


def task_from_row(row: Mapping[str, Any]) -> Task:
    """All tests of one row. Raises ValueError naming the row, UnsafePickleError on a payload with code."""
    name = row.get("question_id", "?")
    try:
        tests = [*json.loads(row["public_test_cases"]), *decode_tests(row["private_test_cases"])]
        return Task.parse(tests, json.loads(row.get("metadata") or "{}").get("func_name"))
    except UnsafePickleError:
        raise
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"LiveCodeBench row {name}: {error}") from error


def decode_tests(text: str) -> list[Any]:
    """The list behind `private_test_cases`. Raises ValueError if it is neither form, UnsafePickleError."""
    if text.lstrip().startswith("["):
        return list(json.loads(text))
    try:
        decompressor = zlib.decompressobj()
        data = decompressor.decompress(base64.b64decode(text, validate=True), LARGEST)
        if decompressor.unconsumed_tail:
            raise ValueError(f"a test payload is larger than {LARGEST} bytes")
        payload = _DataOnly(io.BytesIO(data)).load()
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"private_test_cases is neither JSON nor base64 of zlib of pickle: {error}") from error
    if not isinstance(payload, str):
        raise ValueError(f"private_test_cases unpickles to {type(payload).__name__}, expected text")
    return list(json.loads(payload))
