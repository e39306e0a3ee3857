"""The hub is asked for the pinned files at the pinned revision and nothing else; offline is one clear message.

The hub here is a fake: no test of this repository reaches huggingface.co. Only the offline refusal runs the client.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RevisionNotFoundError
from made_up_sets import RAW, lcb_rows, lcb_spec, made_up, write_raw

from quads.data.benchmarks import build, hub
from quads.data.benchmarks.errors import NotAvailableError, PinError
from quads.fetch import main


class FakeHub:
    """Serves a folder and remembers what was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, []  # type: ignore[var-annotated]

    def file(self, **asked: Any) -> str:
        self.calls.append(asked)
        return str(self.folder / asked["filename"])

    def snapshot(self, **asked: Any) -> str:
        self.calls.append(asked)
        return str(self.folder)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    served = FakeHub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", served.file)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", served.snapshot)
    return served


def refuse(error: Exception) -> Any:
    def call(**asked: Any) -> str:
        raise error

    return call


def test_livecodebench_is_downloaded_file_by_file_at_the_pin(tmp_path: Path, fake: FakeHub) -> None:
    write_raw(fake.folder, lcb_spec(), lcb_rows())
    manifest = build(lcb_spec(), tmp_path / "out", locks=tmp_path / "locks")
    assert fake.calls == [
        {
            "repo_id": "livecodebench/code_generation_lite",
            "filename": "test6.jsonl",
            "revision": "0fe84c3912ea0c4d4a78037083943e8f0c4dd505",
            "repo_type": "dataset",
        }
    ]
    assert manifest["rows"] == 8
    assert "the hub" in (tmp_path / "locks" / "livecodebench_v6.json").read_text()


def test_shards_come_in_the_order_of_their_names(tmp_path: Path, fake: FakeHub) -> None:
    spec = made_up("deepmath_103k")
    write_raw(fake.folder, spec, RAW["deepmath_103k"])
    paths = [path.name for _, path in hub.locate(spec)]
    assert paths == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    assert fake.calls[0]["allow_patterns"] == ["data/train-*.parquet"]


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("no net"), ConnectionError("no net"), TimeoutError()])
def test_offline_names_both_ways_out(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse(error))
    with pytest.raises(NotAvailableError, match=r"`snakemake fetch_data`.*--set aime25 .*--local PATH"):
        hub.locate(made_up("aime25"))


def test_wrong_pin_is_not_called_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeHub) -> None:
    import httpx

    response = httpx.Response(404, request=httpx.Request("GET", "https://hub.invalid"))
    error = RevisionNotFoundError("no such revision", response=response)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse(error))
    with pytest.raises(PinError, match=r"check the pin in aime25\.yaml"):
        hub.locate(made_up("aime25"))
    fake.folder.mkdir()
    with pytest.raises(PinError, match="no file matches"):
        hub.locate(made_up("deepmath_103k"))


def test_real_client_offline_is_one_message_and_status_1(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    words = ["-m", "quads.fetch", "--set", "hmmt_feb25", "--out", str(tmp_path / "out"), "--locks", str(tmp_path)]
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "NotAvailableError: hmmt_feb25: MathArena/hmmt_feb_2025 at revision 6fdc427712" in done.stderr


def test_local_copy_lacks_the_file(tmp_path: Path) -> None:
    with pytest.raises(
        NotAvailableError, match=r"no data/train-00000-of-00001.parquet \(nor train.*jsonl\) in the local"
    ):
        hub.locate(made_up("aime25"), tmp_path)


def test_several_sets_need_a_folder_each(tmp_path: Path) -> None:
    """aime25 and hmmt_feb25 name their file alike: from one flat folder one would be read as the other."""
    out = ["--out", str(tmp_path / "out"), "--locks", str(tmp_path / "locks")]
    assert main(["--set", "aime25", "hmmt_feb25", "--local", str(tmp_path), *out]) == 1


def test_unknown_set_names_the_known_ones(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    assert main(["--set", "hmmt_feb2", "--out", str(tmp_path)]) == 1
    assert "Did you mean 'hmmt_feb25'?" in caplog.text
