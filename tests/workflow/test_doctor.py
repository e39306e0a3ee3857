"""The doctor: exit code and lines follow what is there; parts are replaced, not the machine."""

import importlib.metadata
import json
from pathlib import Path

import pytest

from quads import doctor
from quads.doctor import Line


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow checks answer at once."""
    for name in ("machine", "plugin", "sandbox", "tracking"):
        monkeypatch.setattr(doctor, name, lambda name=name: Line(name, "ok", "there"))
    monkeypatch.setattr(doctor, "gpu", lambda purpose: [Line("GPU", "ok", "there")])
    monkeypatch.setattr(doctor, "slurm", lambda purpose: [Line("Slurm", "absent", "not here")])


def test_ready_exits_zero_and_writes_the_lines(
    healthy: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(["--json", str(tmp_path / "doctor.json")]) == 0
    out = capsys.readouterr().out
    assert out.endswith("ready for laptop\n") and "absent  Slurm" in out
    written = json.loads((tmp_path / "doctor.json").read_text())
    assert {line["what"] for line in written["lines"]} >= {"torch", "verl", "vllm", "GPU"}


def test_one_missing_line_exits_one_and_is_named(
    healthy: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "sandbox", lambda: Line("code sandbox", "MISSING", "install bubblewrap"))
    assert doctor.main([]) == 1
    assert "not ready for laptop: code sandbox" in capsys.readouterr().out


def test_a_check_that_fails_is_a_line(healthy: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Line:
        raise OSError("no disk")

    monkeypatch.setattr(doctor, "machine", broken)
    assert doctor.examine("laptop")[0] == Line("machine", "MISSING", "the check failed: OSError: no disk")


def test_a_package_that_is_absent_or_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "verl":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0" if name == "ray" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    lines = {line.what: line for line in doctor.packages("laptop")}
    assert lines["verl"].status == "MISSING" and "make env" in lines["verl"].detail
    assert "pinned: 2.60.0" in lines["ray"].detail


@pytest.mark.parametrize(("purpose", "status"), [("laptop", "absent"), ("gpu", "MISSING"), ("cluster", "MISSING")])
def test_no_gpu_matters_only_where_one_is_asked_for(monkeypatch: pytest.MonkeyPatch, purpose: str, status: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    lines = {line.what: line for line in doctor.gpu(purpose)}
    assert lines["GPU"].status == status and "emulated" in lines["NVFP4"].detail


def test_hopper_is_emulated_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    lines = {line.what: line for line in doctor.gpu("gpu")}
    for name in ("native", "cutlass"):
        line = lines[f"backend {name}"]
        assert line.status == "absent" and "compute capability 9.0 has no FP4 units" in line.detail
    assert "emulated" in lines["NVFP4"].detail and "no speed claim" in lines["NVFP4"].detail


def test_blackwell_is_native_and_says_that_nobody_ran_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (10, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA B200")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    lines = {line.what: line for line in doctor.gpu("gpu")}
    assert lines["NVFP4"].detail == "native"
    assert lines["backend cutlass"].status == "ok" and "nobody has run it" in lines["backend cutlass"].detail
    monkeypatch.setattr("triton.__version__", "3.6.0")
    lines = {line.what: line for line in doctor.gpu("gpu")}
    assert lines["backend native"].status == "absent" and "Triton 3.6.0" in lines["backend native"].detail
    assert lines["NVFP4"].detail == "native"


def test_without_slurm_the_clients_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert doctor.slurm("laptop")[0].status == "absent"
    found = doctor.slurm("cluster")
    assert found[0].status == "MISSING" and "sbatch" in found[0].detail


@pytest.mark.parametrize(("memory", "disk", "status"), [(12, 3, "ok"), (8, 3, "MISSING"), (12, 1, "MISSING")])
def test_memory_and_disk_are_judged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, memory: int, disk: int, status: str
) -> None:
    monkeypatch.setattr(doctor, "MEMORY", tmp_path / "meminfo")
    doctor.MEMORY.write_text(f"MemTotal: 1 kB\nMemAvailable: {memory * 2**20} kB\n")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": disk * 2**30}))
    assert doctor.machine().status == status


def test_a_cpu_build_does_not_serve_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu" if name == "torch" else "1.0")
    lines = {line.what: line for line in doctor.packages("gpu")}
    assert lines["torch"].status == "MISSING" and "GPU=1" in lines["torch"].detail
