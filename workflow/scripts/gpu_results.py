"""What workflow/scripts/gpu_jobs.py shows and sends back of ROOT/results: progress line, table, two archives.

    results.tar.gz   settings, histories, receipts, evaluation tables, what lies in results/*/bench, ends of logs
    records.tar.xz   evaluation samples

Contract: reads files that jobs may be writing; what is unfinished is shown as such or left out. Standard library only.
"""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PACKED = ("run.json", "result.json", "history.jsonl", "receipt.json", "surgery.json", "delta_weight.json")
LOG_TAIL = 30_000  # bytes
SMALL = 2_000_000


def lines(path: Path) -> list[str]:
    """Whole lines: a writer may be in the middle of the last one. [] without the file."""
    return path.read_text(errors="replace").split("\n")[:-1] if path.is_file() else []


def objects(texts: Iterable[str]) -> list[dict[str, Any]]:
    """Those texts that are JSON objects."""
    found = []
    for text in texts:
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return [one for one in found if isinstance(one, dict)]


def progress(root: Path) -> str:
    """Steps of the runs that train, newest machine line."""
    steps = []
    for history in sorted(root.glob("results/*/train/*/history.jsonl")):
        if not history.with_name("result.json").exists():
            steps.append(f"{history.parent.name.rsplit('-', 1)[0]}:{max(len(lines(history)) - 1, 0)}")
    last = (lines(root / "log" / "machine.csv") or [""])[-1]
    return f"{time.strftime('%H:%M:%S')} steps {' '.join(steps) or '-'} | s,jobs,gpu%,gpuMiB,hostMiB,load {last}"


def pack(root: Path, out: Path) -> None:
    """The two archives, each written whole."""
    out.mkdir(parents=True, exist_ok=True)
    results = root / "results"
    small = [p for name in PACKED for p in results.glob(f"*/train/*/{name}")]
    small += results.glob("shared/*/manifest.json")
    small += [p for p in results.glob("*/eval/*/*") if p.suffix in {".json", ".md", ".csv"}]
    small += [p for p in results.glob("*/bench/**/*") if p.is_file() and p.stat().st_size < SMALL]
    with tarfile.open(out / "results.tar.gz", "w:gz") as archive:
        for path in sorted(set(small)):
            archive.add(path, path.relative_to(root))
        for path in sorted([*(root / "log").iterdir(), *results.glob("*/train/*/train.log")]):
            tail = path.read_bytes()[-LOG_TAIL:] if path.is_file() else b""
            info = tarfile.TarInfo(str(path.relative_to(root)))
            info.size = len(tail)
            archive.addfile(info, io.BytesIO(tail))
    with tarfile.open(out / "records.tar.xz", "w:xz") as archive:
        for path in sorted(results.glob("*/eval/*/*.jsonl")):
            archive.add(path, path.relative_to(root))
    for path in sorted(out.iterdir()):
        print(f"{path.stat().st_size / 2**20:6.2f} MiB {path.name}")


def table(root: Path) -> str:
    """One line per run: accuracy before and after, pass@1 in both engines, gap, step time; - where it is not known."""
    row = "{:48} {:>5} {:>5} {:>5} {:>5} {:>5} {:>7} {:>6} {:>4}".format
    head = row("run", "steps", "acc0", "accN", "own", "bf16", "gap", "s/step", "dW")
    return "\n".join([head, *(row(*cells(folder)) for folder in sorted(root.glob("results/*/train/*")))])


def cells(folder: Path) -> list[str]:
    """The line of one training folder."""
    rows = objects(lines(folder / "history.jsonl"))
    trained = [r for r in rows if "reward" in r]
    accuracy = numbers(rows, "eval_accuracy")
    results = sorted(folder.parents[1].glob(f"eval/{folder.name}-*/result.json"))
    evaluated = [said["engines"] for said in map(result, results) if isinstance(said.get("engines"), dict)]
    engines = evaluated[-1] if evaluated else {}
    passed = [cell((engines.get(engine) or {}).get("pass_at_1"), ".3f") for engine in ("own", "bf16")]
    gaps, pace = numbers(trained[-10:], "gap_mean"), sorted(s for s in numbers(trained, "seconds") if s is not None)
    ends = [cell(accuracy[i], ".3f") if len(accuracy) > j else "-" for i, j in ((0, 0), (-1, 1))]
    return [
        f"{folder.parents[1].name}/{folder.name}",
        str(len(trained)),
        *ends,
        *passed,
        cell(sum(gaps) / len(gaps) if gaps and None not in gaps else None, ".4f"),
        cell(pace[len(pace) // 2] if pace else None, ".2f"),
        cell((result(folder / "result.json").get("delta_weight") or {}).get("different"), ""),
    ]


def result(path: Path) -> dict[str, Any]:
    """The JSON object of a result file, {} where there is none that is whole."""
    return next(iter(objects([path.read_text(errors="replace")] if path.is_file() else [])), {})


def numbers(rows: Iterable[dict[str, Any]], key: str) -> list[float | None]:
    """The values of the rows that have the key; None, in its place, of a step that went wrong."""
    return [r[key] for r in rows if key in r]


def cell(value: float | None, form: str) -> str:
    """A number, or -."""
    return "-" if value is None else format(value, form)
