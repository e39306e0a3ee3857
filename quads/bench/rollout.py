# SPDX-License-Identifier: Apache-2.0
"""Rollout throughput of each arm's engine mode through real vLLM, side by side in one run.

    python -m quads.bench.rollout --experiment configs/toy.yaml --model DIR --out FILE.json
        [--modes bf16,fp8,w4a16,w4a4,w4a4+rac] [--masks FILE] [--stock bf16,fp8]
        [--backend reference|triton|native|cutlass] [--graphs|--no-graphs]
        [--batch 16,64 --prompt-tokens 512 --response-tokens 128] [--rounds 5] [--limit-s S] [--together]
        [--roofline B200]
    -> FILE.md (medians, spreads, ratios to FP8 and BF16), FILE.details.jsonl (settings, engine starts, the same
       figures), then FILE.json (quads.rollout_bench/1: one row per round, what the report reads)

Defaults: what training of the experiment uses: the modes of all its arms, runtime.rollout_backend and rollout_graphs,
shapes of runtime.max_sequences, grpo.max_prompt_tokens and grpo.max_response_tokens. As in training, native and cutlass
serve W4A4 modes and triton the others, and what an experiment would be refused for is refused here; a mode that cannot
be captured in CUDA graphs is left out with the reason.
Every row says native, emulated or roofline, and the first two with which `rollout_backend` (vllm: stock) and
`rollout_graphs`, all by the engine's own receipt. Reference and triton emulate every mode, BF16 and FP8 too, so their
ratios say what the emulation costs; only native or cutlass (W4A4 modes) and `--stock` (vLLM's own BF16 and FP8, without
the plugin) are speeds of an engine.
Exit code 1 when a mode was left out or an engine failed; what the others did is written all the same, and so are whole
rounds at SIGTERM. Engines lie in memory side by side.
"""

from __future__ import annotations

import argparse
import logging
import math
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quads import provenance
from quads.bench import rollout_model, rollout_rows
from quads.bench.fleet import COMMAND, Fleet, StoppedError, stop
from quads.bench.rollout_plan import Engine, Shape, chosen_runtime, engines, refused, shape, shapes
from quads.config import Arm, ConfigError, Experiment, Runtime, load_arms, load_experiment
from quads.files import ResultFileError, append_jsonl, require_writable, write_json_atomic, write_text_atomic
from quads.lifeline import watch_parents
from quads.paper.rollout_bench import BenchFile
from quads.rollout.mode import BACKENDS

log = logging.getLogger("quads.bench.rollout")
PACKAGES = ("vllm", "torch", "triton", "transformers")
CODE = ("quads.bench.rollout", "quads.integrations.vllm", "quads.rollout")


def main(argv: list[str] | None = None) -> int:
    """Parse, measure, write, print the tables."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    watch_parents()
    signal.signal(signal.SIGTERM, stop)
    try:
        experiment = load_experiment(args.experiment.stem, configs=args.experiment.parent)
        arms = load_arms(experiment, args.experiment.parent, more=True)
        return run(experiment, arms, args)
    except (ConfigError, ResultFileError, rollout_rows.TooShortError, StoppedError) as error:
        log.error("%s", error)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m quads.bench.rollout", description=__doc__.split("\n\n")[0] if __doc__ else None
    )
    parser.add_argument("--experiment", type=Path, required=True, help="configs/NAME.yaml")
    parser.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument(
        "--modes", type=_words, default=(), help="default: those of the experiment's arms; none: stock alone"
    )
    parser.add_argument("--masks", type=Path, help="RAC masks (safetensors, by engine key); default: random ones")
    parser.add_argument("--stock", type=_words, default=(), help="bf16, fp8: vLLM's own as well, without the plugin")
    parser.add_argument("--backend", choices=BACKENDS, help="in place of the experiment's runtime.rollout_backend")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, help="in place of runtime.rollout_graphs")
    parser.add_argument("--batch", type=_numbers, default=(), help="requests at once; list")
    parser.add_argument("--prompt-tokens", type=_numbers, default=(), help="per request; list")
    parser.add_argument("--response-tokens", type=_numbers, default=(), help="per request; list")
    parser.add_argument("--shapes", type=_words, default=(), help="BATCHxPROMPTxRESPONSE list instead of those three")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of every engine, interleaved")
    parser.add_argument(
        "--limit-s", type=_seconds, help="no round but the first begins later than this after the start"
    )
    parser.add_argument("--together", action="store_true", help="start all engines at once: start times mean less")
    parser.add_argument("--answer-s", type=_seconds, default=600.0, help="an engine that is silent longer has failed")
    parser.add_argument("--roofline", choices=tuple(rollout_model.CHIPS), help="add rows of the model for this chip")
    return parser


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:  # an empty list would mean the default
        raise argparse.ArgumentTypeError(f"{text!r} names nothing; leave the option away for its default")
    return words


def _numbers(text: str) -> tuple[int, ...]:
    words = _words(text)
    if wrong := [word for word in words if not re.fullmatch("[0-9]{1,9}", word)]:
        raise argparse.ArgumentTypeError(
            f"{wrong[0]!r} is no whole number of up to nine digits; give a list such as 16,64"
        )
    return tuple(map(int, words))


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def run(experiment: Experiment, arms: Sequence[Arm], args: argparse.Namespace, command: Sequence[str] = COMMAND) -> int:
    """The benchmark; `command` starts one engine's process. Raises ConfigError, ResultFileError."""
    start = time.monotonic()
    if args.rounds < 1 or args.out.suffix != ".json":
        raise ConfigError(f"--rounds {args.rounds} --out {args.out}: need at least one round and a file named *.json")
    wanted = [shape(word) for word in args.shapes] or shapes(
        args.batch or (experiment.runtime.max_sequences,),
        args.prompt_tokens or (experiment.grpo.max_prompt_tokens,),
        args.response_tokens or (experiment.grpo.max_response_tokens,),
    )
    modes = args.modes or tuple(dict.fromkeys(arm.rollout.mode for arm in arms))
    if modes == ("none",) and args.stock:
        modes = ()
    runtime = chosen_runtime(experiment, args.backend, args.graphs, plugin=bool(modes))
    require_writable(args.out)
    most = runtime.max_batched_tokens
    modelled = rollout_model.rows(args.model, args.roofline, modes, wanted, most, arms) if args.roofline else []
    left_out = refused(modes, arms, runtime)
    for name, reason in left_out.items():
        log.error("%s is left out: %s", name, reason)
    with tempfile.TemporaryDirectory(prefix="quads-bench-") as receipts, Fleet(command, args.answer_s) as fleet:
        planned = engines(
            runtime, arms, [m for m in modes if m not in left_out], wanted, model=args.model, masks=args.masks,
            stock=args.stock, receipts=Path(receipts),
        )  # fmt: skip
        log.info("%d engines, %d shapes, %d rounds", len(planned), len(wanted), args.rounds)
        fleet.start(planned, together=args.together)
        fleet.warm_up(wanted)
        until = start + args.limit_s if args.limit_s else None
        rounds = fleet.rounds(wanted, args.rounds, until=until)
    rows = _rows(fleet, planned)
    left_out |= fleet.failed
    if not rows:
        log.error("no engine could be measured: %s", "; ".join(f"{n}: {why}" for n, why in left_out.items()))
        return 1
    rows += modelled
    settings = _settings(args, experiment.name, runtime, wanted, rounds, time.monotonic() - start)
    _write(args.out, fleet, planned, rows, settings, left_out)
    return 1 if left_out else 0


def _rows(fleet: Fleet, planned: Sequence[Engine]) -> list[dict[str, Any]]:
    alive = [e for e in planned if e.name in fleet.started and e.name not in fleet.failed]
    return rollout_rows.rows(
        fleet.measured,
        fleet.syncs,
        {e.name: rollout_rows.served(e.name.removeprefix("stock "), fleet.started[e.name]) for e in alive},
    )


def _settings(
    args: argparse.Namespace, name: str, runtime: Runtime, wanted: Sequence[Shape], rounds: int, seconds: float
) -> dict[str, Any]:
    return {
        "kind": "settings",
        "experiment": name,
        "model": str(args.model),
        "masks": str(args.masks) if args.masks else "random",
        "backend": runtime.rollout_backend,
        "execution": "CUDA graphs" if runtime.rollout_graphs else "eager",
        "started": "together" if args.together else "one by one",
        "rounds": rounds,
        "shapes": [[s.batch, s.prompt, s.response] for s in wanted],
        "device": runtime.device,
        "seconds": round(seconds, 1),
    }


def _write(
    out: Path,
    fleet: Fleet,
    planned: Sequence[Engine],
    rows: list[dict[str, Any]],
    settings: dict[str, Any],
    left_out: dict[str, str],
) -> None:
    summary = rollout_rows.summarize(rows)
    said = {
        "schema": "quads.rollout_bench/1",
        "hardware": provenance.hardware(),
        "versions": provenance.versions(*PACKAGES),
        "commit": provenance.commit(),
        "code_hash": provenance.code_hash(*CODE),
        "rows": rows,
        "left_out": left_out,
    }
    BenchFile.model_validate(said)  # the report's own schema: what it would refuse must not be written
    text = "\n\n".join(
        [
            ", ".join(f"{k}: {v}" for k, v in settings.items() if k != "kind"),
            rollout_rows.engine_table(fleet.started, left_out),
            rollout_rows.table(summary),
            rollout_rows.LEGEND,
        ]
    )
    details = out.with_suffix(".details.jsonl")
    details.unlink(missing_ok=True)
    append_jsonl(details, settings)
    for engine in planned:
        fate = {"failed": fleet.failed[engine.name]} if engine.name in fleet.failed else {}
        append_jsonl(details, {"kind": "engine", **engine.to_dict(), "ready": fleet.started.get(engine.name), **fate})
    for name, reason in left_out.items():
        append_jsonl(details, {"kind": "left out", "engine": name, "reason": reason})
    for line in rollout_rows.as_lines(summary):
        append_jsonl(details, line)
    write_text_atomic(out.with_suffix(".md"), text + "\n")
    write_json_atomic(out, said)
    print(text)


if __name__ == "__main__":
    sys.exit(main())
