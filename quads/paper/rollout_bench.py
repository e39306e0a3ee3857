"""Rollout benchmarks (quads.bench.rollout) and kernel benchmarks (quads.bench.kernels) as a report reads them.

    quads.rollout_bench/1   one file per machine: rows of (mode, backend, phase, batch, prompt and response tokens)
                            with tokens_per_s (prefill, decode) or seconds (sync), bytes, memory_bytes, and what served
                            them: rollout_backend (vllm: without the plugin), rollout_graphs; both null in a model's
                            rows and in files of before they were kept. left_out: mode -> why it has no row
    ratio of two modes      tokens_per_s of one over the other within one file at equal backend, CUDA graphs, phase,
                            batch and lengths; over files, shapes and repetitions: geometric mean, Student's interval on
                            logarithms. What served a mode may differ: QUADS on FP4 units over vLLM's FP8 is the claim

Contract: only `native` rows say anything about speed. `emulated` rows time the emulation, `roofline` rows are a model;
both are shown under their name and never beside a claim. Files are closed: an unknown key is an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from quads.config.arms import Frozen
from quads.evaluation.stats import Interval
from quads.files import ResultFileError, read_result
from quads.paper.ledger import Entry, Ledger, describe_hardware, key_of
from quads.paper.study_files import over_seeds

Backend = Literal["native", "emulated", "roofline"]
Phase = Literal["prefill", "decode", "sync"]


class BenchRow(Frozen):
    """One measurement."""

    mode: str
    backend: Backend
    rollout_backend: Literal["reference", "triton", "native", "cutlass", "vllm"] | None = None
    rollout_graphs: bool | None = None
    phase: Phase
    batch: int = Field(gt=0)
    prompt_tokens: int = Field(ge=0)
    response_tokens: int = Field(ge=0)
    tokens_per_s: float | None = Field(None, gt=0)
    seconds: float | None = Field(None, gt=0)
    bytes: int | None = Field(None, ge=0)
    memory_bytes: int | None = Field(None, ge=0)

    @model_validator(mode="after")
    def _measured(self) -> Self:
        if self._stated is None:
            wanted = "seconds" if self.phase == "sync" else "tokens_per_s"
            raise ValueError(f"row of mode {self.mode}, phase {self.phase}: {wanted} is missing")
        return self

    @property
    def _stated(self) -> float | None:
        return self.seconds if self.phase == "sync" else self.tokens_per_s

    @property
    def value(self) -> float:
        """Seconds of a sync, else tokens/s."""
        assert self._stated is not None  # a row without is refused
        return self._stated

    @property
    def shape(self) -> tuple[str, bool | None, str, int, int, int]:
        """What must be equal for two modes to be compared."""
        graphs = self.rollout_graphs
        return self.backend, graphs, self.phase, self.batch, self.prompt_tokens, self.response_tokens


class BenchFile(Frozen):
    """The whole file."""

    schema_name: Literal["quads.rollout_bench/1"] = Field(alias="schema")
    hardware: dict[str, Any]
    versions: dict[str, Any]
    commit: str
    code_hash: str = ""
    rows: tuple[BenchRow, ...]
    left_out: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """A file with its source key and its machine in words."""

    key: str
    hardware: str
    rows: tuple[BenchRow, ...]


@dataclass(frozen=True)
class KernelBar:
    """One ratio of the kernel benchmark with the bound that the project set for itself."""

    key: str
    hardware: str
    what: str
    value: float
    required: float
    better: str
    verdict: str


def read_benches(folder: Path, ledger: Ledger) -> list[Bench]:
    """Every FOLDER/*.json, in order of names; [] without the folder. Raises ResultFileError for a file not as above."""
    return [_bench(path, ledger) for path in sorted(folder.glob("*.json"))]


def _bench(path: Path, ledger: Ledger) -> Bench:
    said = read_result(path, "rollout benchmark", ("schema", "rows"))
    try:
        file = BenchFile.model_validate(said)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ResultFileError(
            f"{path}: not a quads.rollout_bench/1 file at {where or 'the top'}: {first['msg']}; measure it again with "
            "python -m quads.bench.rollout"
        ) from None
    entry = Entry(
        key=f"bench-{key_of(path.stem)}",
        kind="bench",
        title=f"rollout benchmark {path.stem}",
        link=ledger.relative(path),
        files=ledger.files([path]),
        code_hash=file.code_hash,
        commit=file.commit,
        hardware=describe_hardware(file.hardware),
        versions=file.versions,
    )
    return Bench(ledger.add(entry), entry.hardware, file.rows)


def read_kernel_bars(path: Path, ledger: Ledger) -> list[KernelBar]:
    """The `bars` of a kernel benchmark. Raises ResultFileError for a damaged file."""
    said = read_result(path, "kernel benchmark", ("bars", "hardware", "versions", "commit", "code_hash"))
    entry = Entry(
        key=f"kernels-{key_of(path.stem)}",
        kind="kernels",
        title=f"kernel benchmark {path.stem}",
        link=ledger.relative(path),
        files=ledger.files([path]),
        code_hash=str(said["code_hash"]),
        commit=str(said["commit"]),
        hardware=describe_hardware(said["hardware"]),
        versions=said["versions"],
    )
    key = ledger.add(entry)
    keep = [b for b in said["bars"] if b["value"] is not None]
    try:
        return [
            KernelBar(
                key, entry.hardware, str(b["what"]), float(b["value"]), float(b["required"]), b["better"], b["verdict"]
            )
            for b in keep
        ]
    except (KeyError, TypeError) as error:
        raise ResultFileError(
            f"{path}: a bar lacks {error}; measure it again with python -m quads.bench.kernels"
        ) from None


def ratio(
    files: Sequence[Sequence[BenchRow]], over: str, under: str, phase: Phase, confidence: float
) -> Interval | None:
    """Native speed of mode `over` divided by that of `under`, all shapes of all files together; None where no shape of
    a file has both. Files are never mixed: they are other runs, maybe on other machines.
    """
    speeds: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for number, rows in enumerate(files):
        for row in rows:
            if row.backend == "native" and row.phase == phase and row.tokens_per_s is not None:
                speeds.setdefault((number, row.shape), {}).setdefault(row.mode, []).append(row.tokens_per_s)
    logs = [value for modes in speeds.values() for value in _log_ratios(modes, over, under)]
    found = over_seeds(logs, confidence)
    if found is None:
        return None
    return Interval(math.exp(found.estimate), math.exp(found.low), _exp(found.high))


def _log_ratios(modes: Mapping[str, Sequence[float]], over: str, under: str) -> list[float]:
    pairs = zip(modes.get(over, ()), modes.get(under, ()), strict=False)
    return [math.log(a / b) for a, b in pairs]


def _exp(value: float) -> float:
    return math.inf if math.isinf(value) else math.exp(value)
