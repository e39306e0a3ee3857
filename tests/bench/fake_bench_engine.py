"""Stand-in for one engine's process of the rollout benchmark: same lines in and out, times from a table.

    python fake_bench_engine.py LOG      one JSON line per request is appended to LOG

One request takes 1 ms per prompt token of the batch and then, per response token of the batch, what the table says.
Mode w4a16 cannot start, w4a4 dies in its second round, bf16 with 99 prompt tokens does not answer.
"""

import json
import sys
import time

PER_TOKEN = {"fp8": 0.010, "w4a4+rac": 0.008, "bf16": 0.020, "w4a4": 0.005}


def answer(said, what):
    if what["do"] == "sync":
        return {"seconds": PER_TOKEN[said["mode"]], "bytes": 1000, "memory_bytes": 7}
    if what["prompt"] == 99 and said["mode"] == "bf16":
        time.sleep(60)
    if said["mode"] == "w4a4" and what["seed"] > 1000:
        sys.exit(3)
    decoded = what["batch"] * (what["response"] - 1)
    drift = 1.0 + (what["seed"] // 1000)  # the machine gets slower from round to round
    seconds = drift * (0.001 * what["batch"] * what["prompt"] + PER_TOKEN[said["mode"]] * decoded)
    return {"seconds": seconds, "memory_bytes": 5 + what["response"]}


def say(what):
    print(json.dumps(what), flush=True)


def main():
    said = json.loads(sys.stdin.readline())
    if said["mode"] == "w4a16":
        return say({"error": "RuntimeError: no such kernel"})
    backend = "vllm" if said["stock"] else said["quantization"]["backend"]
    graphs = said["runtime"]["rollout_graphs"]
    words = f"{'native' if backend in ('vllm', 'native', 'cutlass') else 'emulated'} (fake {backend})"
    ready = {"seconds": 1.5, "memory_bytes": 3, "backend": words}
    say({**ready, "rollout_backend": backend, "rollout_graphs": graphs})
    for line in sys.stdin:
        what = json.loads(line)
        with open(sys.argv[1], "a") as log:
            log.write(json.dumps({"mode": said["mode"], "stock": said["stock"], **what}) + "\n")
        say(answer(said, what))


if __name__ == "__main__":
    main()
