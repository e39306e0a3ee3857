"""LiveCodeBench rows: their tests are JSON text, or base64(zlib(pickle(JSON text))), and a pickle can run code.

    normalise(raw, row) -> {id, question, starter_code, func_name, tests, date, platform, difficulty}

The payload is one str. So the pickle's opcodes are read first, without executing them, and anything but the opcodes of
one string is refused; then an Unpickler whose find_class always raises does the work: two locks, either is enough.
Tests are public ones first, then private ones, as the official grader takes them.
Contract: raises a RowError on every unusable row, never runs or imports anything that a row names, and stops unpacking
at MAX_DECODED bytes. Source: the row format of livecodebench/code_generation_lite. No torch.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import pickletools
import zlib
from datetime import datetime
from typing import Any, NoReturn

from quads.data.benchmarks.checks import CODE_CONTROLS, clean_text
from quads.data.benchmarks.errors import EmptyTestsError, SchemaError, UnsafePickleError

Row = dict[str, Any]
FIELDS = (
    "question_content platform question_id contest_date starter_code difficulty public_test_cases private_test_cases "
    "metadata"
).split()
KINDS = ("stdin", "functional")
MAX_DECODED = 2 << 30
MAX_MEMO = 16
_MEMO = frozenset(("BINPUT", "LONG_BINPUT", "PUT"))
_TEXT = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")
_PLAIN = _MEMO.union(_TEXT, ("PROTO", "FRAME", "MEMOIZE", "STOP"))


class TextUnpickler(pickle.Unpickler):
    """Reads text only: every class, function and persistent id is refused by name."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Called by pickle for every global; always raises UnsafePickleError."""
        raise UnsafePickleError(f"a pickle asks for {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Called by pickle for objects outside the stream; always raises UnsafePickleError."""
        raise UnsafePickleError(f"a pickle asks for the outside object {pid!r:.40}")


def unpickle_text(payload: bytes, row: str = "payload") -> str:
    """The one string in a pickle. Raises UnsafePickleError on anything else; executes nothing."""
    try:
        for opcode, argument, _ in pickletools.genops(payload):
            if opcode.name not in _PLAIN or (opcode.name in _MEMO and int(argument or 0) > MAX_MEMO):
                what = f" ({argument!r:.60})" if argument is not None and opcode.name not in _MEMO else ""
                raise UnsafePickleError(
                    f"{row}: the pickle holds the opcode {opcode.name}{what}; only one plain text is read, never an "
                    "object or a call. The file is not the published one: do not use it"
                )
        value = TextUnpickler(io.BytesIO(payload)).load()
    except UnsafePickleError:
        raise
    except Exception as error:  # untrusted bytes: damage raises almost anything; the row is refused
        raise UnsafePickleError(f"{row}: not a readable pickle ({type(error).__name__}: {error})") from error
    if not isinstance(value, str):
        raise UnsafePickleError(f"{row}: the pickle holds {type(value).__name__}, expected text")
    return value


def decode_tests(text: str, row: str) -> list[Row]:
    """Tests of one column, plain or packed. Raises SchemaError, UnsafePickleError."""
    try:
        decoded = json.loads(text)
    except json.JSONDecodeError:
        decoded = _json(unpickle_text(_unpack(text, row), row), "packed tests", row)
    if not isinstance(decoded, list):
        raise SchemaError(f"{row}: tests are {type(decoded).__name__}, expected a list")
    return [_test(test, row) for test in decoded]


def contest_date(raw: Row, row: str) -> datetime:
    """The contest date as a naive date-time. Raises SchemaError."""
    try:
        return datetime.fromisoformat(raw["contest_date"]).replace(tzinfo=None)
    except (KeyError, TypeError, ValueError) as error:
        raise SchemaError(f"{row}: contest_date is {raw.get('contest_date')!r}; expected an ISO date") from error


def normalise(raw: Row, row: str) -> Row:
    """One normalised row. Raises RowError."""
    absent = [field for field in FIELDS if field not in raw]
    if absent:
        raise SchemaError(f"{row}: lacks {', '.join(absent)}; it has {', '.join(sorted(raw))}")
    tests = decode_tests(raw["public_test_cases"], row) + decode_tests(raw["private_test_cases"], row)
    if not tests:
        raise EmptyTestsError(f"{row}: no tests after decoding; every program would pass")
    metadata = _json(raw["metadata"] or "{}", "metadata", row)
    function = metadata.get("func_name") if isinstance(metadata, dict) else None
    kinds = sorted({test["testtype"] for test in tests})
    if kinds != (["functional"] if function else ["stdin"]):
        raise SchemaError(
            f"{row}: tests of type {', '.join(kinds)} with func_name {function!r}; they do not belong together"
        )
    return {
        "id": str(raw["question_id"]),
        "question": clean_text(raw["question_content"], "question_content", row, CODE_CONTROLS),
        "starter_code": raw["starter_code"] or "",
        "func_name": function,
        "tests": tests,
        "date": contest_date(raw, row).isoformat(),
        "platform": raw["platform"],
        "difficulty": raw["difficulty"],
    }


def _unpack(text: str, row: str) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        payload = unpacker.decompress(base64.b64decode(text, validate=True), MAX_DECODED)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise SchemaError(f"{row}: tests are neither JSON nor base64 of zlib data ({error})") from error
    if not unpacker.eof:
        raise SchemaError(f"{row}: packed tests are cut off, or larger than {MAX_DECODED} bytes unpacked")
    return payload


def _json(text: str, what: str, row: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, json.JSONDecodeError) as error:
        raise SchemaError(f"{row}: {what} is not JSON ({error}): {text!r:.60}") from error


def _test(test: Any, row: str) -> Row:
    fields = ("input", "output", "testtype")
    if not isinstance(test, dict) or any(not isinstance(test.get(field), str) for field in fields):
        raise SchemaError(f"{row}: a test is {test!r:.80}; expected the texts {', '.join(fields)}")
    if test["testtype"] not in KINDS:
        raise SchemaError(f"{row}: a test has testtype {test['testtype']!r}; expected {' or '.join(KINDS)}")
    return {field: test[field] for field in fields}
