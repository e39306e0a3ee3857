"""Takes the place of a stage in a box: same arguments, the declared outputs at once, one line in calls.txt per call.

Files that change its behaviour: `fail-<arm>` (training of that arm stops half-way with an error), `slow` (training
waits until it is killed, with the real lifeline).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from quads.files import append_jsonl, write_json_atomic
from quads.lifeline import watch_parents

STAGE = Path(__file__).stem
REPORT = ("table.csv", "table.md", "curves.csv", "reward.svg", "gap.svg", "reward.png", "gap.png")


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
    return parser.parse_args()


def train(a: argparse.Namespace) -> None:
    a.checkpoints.mkdir(parents=True, exist_ok=True)
    append_jsonl(a.checkpoints / "attempts.jsonl", {"arm": a.arm})
    if Path("slow").exists():
        watch_parents(poll_s=0.2)
        (a.checkpoints / "started").touch()
        time.sleep(300)
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
            (a.out / name).write_text(f"stand-in {name}\n")
        write_json_atomic(a.out / "report.json", {})
    else:
        name = "manifest.json" if STAGE in ("prepare", "make_benchmarks", "warmup") else "result.json"
        write_json_atomic(a.out / name, {"stage": STAGE, "arm": a.arm, "seed": a.seed})


if __name__ == "__main__":
    main()
