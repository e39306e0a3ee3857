"""Packed tests: what is read, and that nothing in a hostile payload runs."""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_sets import lcb_rows, lcb_spec, packed, write_raw

from quads.data.benchmarks import build, livecodebench
from quads.data.benchmarks.errors import EmptyTestsError, SchemaError, UnsafePickleError
from quads.data.benchmarks.livecodebench import TextUnpickler, decode_tests, normalise, unpickle_text


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def wrapped(payload: bytes) -> str:
    return base64.b64encode(zlib.compress(payload)).decode()


@pytest.mark.parametrize("protocol", range(6))
def test_malicious_pickle_is_refused_and_never_runs(tmp_path: Path, protocol: int) -> None:
    target = tmp_path / "pwned"
    payload = pickle.dumps(Evil(target), protocol=protocol)
    pickle.loads(payload)
    assert target.exists(), "the payload is not hostile, so this test would prove nothing"
    target.unlink()
    row = {**lcb_rows()[0], "private_test_cases": wrapped(payload)}
    raw = write_raw(tmp_path / "raw", lcb_spec(), [row, *lcb_rows()[1:]])
    with pytest.raises(UnsafePickleError, match=r"toy_001: the pickle holds the opcode .*do not use it"):
        build(lcb_spec(), tmp_path / "out", local=raw, locks=tmp_path / "locks")
    assert not target.exists()


@pytest.mark.parametrize("value", [print, OrderedDict(a=1), Path("x"), {"a": 1}, ["text"], b"bytes", 7, object])
def test_everything_but_text_is_refused(value: object) -> None:
    with pytest.raises(UnsafePickleError):
        unpickle_text(pickle.dumps(value))


def test_second_lock_refuses_classes_by_itself() -> None:
    with pytest.raises(UnsafePickleError, match=r"asks for builtins\.print"):
        TextUnpickler(io.BytesIO(pickle.dumps(print))).load()
    stream = io.BytesIO()

    class Persistent(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return "outside"

    Persistent(stream).dump("x")
    with pytest.raises(UnsafePickleError, match="outside object"):
        TextUnpickler(io.BytesIO(stream.getvalue())).load()


def test_memo_bomb_and_damage() -> None:
    with pytest.raises(UnsafePickleError, match="LONG_BINPUT"):
        unpickle_text(b"\x80\x02X\x01\x00\x00\x00ar\xff\xff\xff\x7f.")
    with pytest.raises(UnsafePickleError, match="not a readable pickle"):
        unpickle_text(pickle.dumps("text")[:-3])


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 5))
def test_any_text_comes_back(text: str, protocol: int) -> None:
    assert unpickle_text(pickle.dumps(text, protocol=protocol)) == text


def test_plain_and_packed_tests_are_the_same() -> None:
    tests = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
    assert decode_tests(json.dumps(tests), "r") == decode_tests(packed(tests), "r") == tests


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"public_test_cases": "[]", "private_test_cases": packed([])}, EmptyTestsError, "every program would pass"),
        ({"private_test_cases": "%%%"}, SchemaError, "neither JSON nor base64"),
        ({"private_test_cases": wrapped(b"x" * 500)[:-8]}, SchemaError, "cut off|neither"),
        ({"private_test_cases": packed({"input": 1})}, SchemaError, "expected a list"),
        ({"private_test_cases": packed([{"input": "1", "output": 2, "testtype": "stdin"}])}, SchemaError, "a test is"),
        ({"private_test_cases": packed([{"input": "", "output": "", "testtype": "f"}])}, SchemaError, "testtype 'f'"),
        ({"metadata": '{"func_name": "f"}'}, SchemaError, "do not belong together"),
        ({"metadata": "{"}, SchemaError, "metadata is not JSON"),
        ({"contest_date": "soon"}, SchemaError, "expected an ISO date"),
    ],
)
def test_unusable_rows(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        normalise({**lcb_rows()[0], **change}, "r")


def test_missing_field_is_named() -> None:
    row = {k: v for k, v in lcb_rows()[0].items() if k != "platform"}
    with pytest.raises(SchemaError, match="r: lacks platform; it has contest_date"):
        normalise(row, "r")


def test_unpacking_stops_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(livecodebench, "MAX_DECODED", 1000)
    with pytest.raises(SchemaError, match="larger than 1000 bytes"):
        decode_tests(wrapped(b"0" * 1_000_000), "r")
