"""Takes the place of a stage in a box: same arguments, the declared outputs at once, one line in calls.txt per call.

Files that change its behaviour: `fail-<arm>` (training of that arm stops half-way with an error), `fail-once-<arm>`
(only in its first attempt), `slow` and `slow-<arm>` (training waits, with the real lifeline, until the file is gone).
On a Ray cluster (quads.cluster) the number of its nodes is written to `nodes`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from quads.files import append_jsonl, write_json_atomic
from quads.lifeline import watch_parents

STAGE = Path(__file__).stem
REPORT = (
    *("table.csv", "table.md", "curves.csv", "reward.svg", "gap.svg", "accuracy.svg", "reward.png", "gap.png"),
    *("index.html", "sources.json", "tables/claims.csv"),
    *(f"figures/{name}.svg" for name in ("ablation", "table3", "layers", "throughput")),
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    if STAGE == "track":
        parser.add_argument("action", choices=["init", "log"])
    for name in (
        *("experiment", "data", "benchmarks", "model", "train", "eval", "checkpoints", "cache", "results", "out"),
    ):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--arm")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--more-arms", action="store_true")
    parser.add_argument("--kernels", type=Path, nargs="*")
    return parser.parse_args()


def train(a: argparse.Namespace) -> None:
    a.checkpoints.mkdir(parents=True, exist_ok=True)
    append_jsonl(a.checkpoints / "attempts.jsonl", {"arm": a.arm})
    slow = [Path("slow"), Path(f"slow-{a.arm}")]
    if any(path.exists() for path in slow):
        watch_parents(poll_s=0.2)
        (a.checkpoints / "started").touch()
        end = time.monotonic() + 300
        while any(path.exists() for path in slow) and time.monotonic() < end:
            time.sleep(0.1)
    if "QUADS_RAY_ADDRESS" in os.environ:
        import ray

        ray.init(address=os.environ["QUADS_RAY_ADDRESS"], log_to_driver=False)
        Path("nodes").write_text(str(sum(node["Alive"] for node in ray.nodes())))
        ray.shutdown()
    attempts = (a.checkpoints / "attempts.jsonl").read_text().splitlines()
    if Path(f"fail-once-{a.arm}").exists() and len(attempts) == 1:
        sys.exit("stopped once")
    if Path(f"fail-{a.arm}").exists():
        (a.out / "history.jsonl").write_text("half\n")
        sys.exit("stopped half-way")


def main() -> None:
    a = arguments()
    with open("calls.txt", "a") as calls:
        calls.write(" ".join(str(w) for w in (STAGE, a.arm, a.seed) if w is not None) + "\n")
    if STAGE == "train":
        train(a)
    if STAGE == "track":
        write_json_atomic(a.out, {"action": a.action})
    elif STAGE == "report":
        for name in REPORT:
            (a.out / name).parent.mkdir(exist_ok=True)
            (a.out / name).write_text(f"stand-in {name}\n")
        write_json_atomic(a.out / "report.json", {})
    else:
        name = "manifest.json" if STAGE in ("prepare", "make_benchmarks", "warmup") else "result.json"
        write_json_atomic(a.out / name, {"stage": STAGE, "arm": a.arm, "seed": a.seed})


if __name__ == "__main__":
    main()
