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
from pathlib import Path

PACKED = ("run.json", "result.json", "history.jsonl", "receipt.json", "surgery.json", "delta_weight.json")
LOG_TAIL = 30_000  # bytes
SMALL = 2_000_000


def progress(root: Path) -> str:
    """Steps of the runs that train, newest machine line."""
    steps = []
    for history in sorted(root.glob("results/*/train/*/history.jsonl")):
        if not history.with_name("result.json").exists():
            lines = history.read_text().splitlines()
            steps.append(f"{history.parent.name.rsplit('-', 1)[0]}:{max(len(lines) - 1, 0)}")
    machine = root / "log" / "machine.csv"
    last = machine.read_text().splitlines()[-1] if machine.exists() else ""
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
    """One line per run: accuracy before and after, pass@1 in both engines, gap, step time."""
    row = "{:48} {:>5} {:>5} {:>5} {:>5} {:>5} {:>7} {:>6} {:>4}".format
    lines = [row("run", "steps", "acc0", "accN", "own", "bf16", "gap", "s/step", "dW")]
    for folder in sorted(root.glob("results/*/train/*")):
        history = folder / "history.jsonl"
        rows = [json.loads(line) for line in history.read_text().splitlines()] if history.exists() else []
        trained = [r for r in rows if "reward" in r]
        accuracy = [r["eval_accuracy"] for r in rows if "eval_accuracy" in r]
        engines: dict = {}
        for result in folder.parents[1].glob(f"eval/{folder.name}-*/result.json"):
            engines = json.loads(result.read_text())["engines"]
        result = folder / "result.json"
        different = json.loads(result.read_text())["delta_weight"]["different"] if result.exists() else "-"
        passed = [f"{engines[e]['pass_at_1']:.3f}" if e in engines else "-" for e in ("own", "bf16")]
        gap = f"{sum(r['gap_mean'] for r in trained[-10:]) / len(trained[-10:]):.4f}" if trained else "-"
        pace = f"{sorted(r['seconds'] for r in trained)[len(trained) // 2]:.2f}" if trained else "-"
        ends = [f"{accuracy[i]:.3f}" if len(accuracy) > j else "-" for i, j in ((0, 0), (-1, 1))]
        name = f"{folder.parents[1].name}/{folder.name}"
        lines.append(row(name, len(trained), *ends, *passed, gap, pace, different))
    return "\n".join(lines)
