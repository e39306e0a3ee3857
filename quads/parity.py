"""Stage: does the rollout engine's backend say what the reference says, on this machine and this checkpoint?

    python -m quads.parity --experiment configs/NAME.yaml --arm ARM --model DIR --out FILE.json
        [--backend B] [--graphs|--no-graphs] [--masks FILE] [--prompts 32] [--prompt-tokens N] [--response-tokens N]
    exit 0: within the limits; 1: beyond one, or an error; FILE.json is written in the first two cases

Two engines one after the other, the reference (eager) first, then the experiment's backend and graphs; same weights,
masks (the file's, or random ones) and random prompts.
    prefill  |log-prob difference| on the reference's tokens, all of them, scored as prompts
    decode   the same while decoding, over each sequence's common beginning (afterwards contexts differ)
    margin   where a sequence first differs: by how much the reference preferred its own token, nats; a token outside
             its best 20 fails
Limits: means of prefill and decode, and the largest margin. A largest |difference| is reported, not limited: one
flipped FP4 code moves one token far, in any order of additions. `own` is the noise of each engine against itself,
decoding against prefill, which has no backend in it: a limit below the reference's own noise means nothing.
Differs from the check at every engine's start (quads.integrations.vllm.guard) in that whole engines are compared.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from quads import provenance
from quads.config import Arm, ConfigError, Experiment, Runtime, load_arm, load_experiment
from quads.config.run import not_capturable
from quads.files import ResultFileError, read_checkpoint_config, require_writable, write_json_atomic
from quads.integrations.vllm.execution import serving_backend
from quads.integrations.vllm.generate import EngineError, prepare_environment
from quads.lifeline import watch_parents

log = logging.getLogger("quads.parity")

SCHEMA = "quads.parity/1"
MEAN_LIMIT = 0.02  # nats; triton in the interpreter differs by 0 (tests/tolerances.py, triton_engine_logprob_mean)
MARGIN_LIMIT = 1.0  # nats: beyond it the token was not a close call
PACKAGES = ("vllm", "torch", "triton", "transformers")


def main(argv: list[str] | None = None) -> int:
    """Parse, compare, write; 1 beyond a limit or after an error that the message explains."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    watch_parents()
    configs = args.experiment.parent
    try:
        experiment = load_experiment(args.experiment.stem, configs=configs)
        report = run(experiment, load_arm(args.arm, configs=configs), args)
    except (ConfigError, ResultFileError, EngineError) as error:
        log.error("%s", error)
        return 1
    except (RuntimeError, ValueError, OSError):  # the start-up check and vLLM's own errors, among them
        log.exception("an engine failed")
        return 1
    write_json_atomic(args.out, report)
    for line in report["failed"]:
        log.error("%s", line)
    log.info("%s %s", "beyond a limit:" if report["failed"] else "within the limits:", report["log_probs"])
    return 1 if report["failed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m quads.parity", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--experiment", type=Path, required=True, help="configs/NAME.yaml")
    parser.add_argument("--arm", required=True, help="file stem under configs/arms")
    parser.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face checkpoint")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument("--backend", help="in place of the experiment's runtime.rollout_backend")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, help="in place of runtime.rollout_graphs")
    parser.add_argument("--masks", type=Path, help="RAC masks (safetensors, by engine key); default: random ones")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, help="default: grpo.max_prompt_tokens")
    parser.add_argument("--response-tokens", type=int, help="default: grpo.max_response_tokens")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--mean-limit", type=float, default=MEAN_LIMIT, metavar="NATS")
    parser.add_argument("--margin-limit", type=float, default=MARGIN_LIMIT, metavar="NATS")
    return parser


def run(experiment: Experiment, arm: Arm, args: argparse.Namespace) -> dict[str, Any]:
    """The report. Raises ConfigError, ResultFileError, EngineError, and RuntimeError of the engine's own checks."""
    config = read_checkpoint_config(args.model, ("vocab_size",))
    runtime = chosen_runtime(experiment, arm, args)
    sizes = chosen_sizes(experiment, args)
    if not any(args.model.glob("*.safetensors")):
        raise ConfigError(f"{args.model} holds no .safetensors file: give the folder of a Hugging Face checkpoint")
    if args.masks is not None and not args.masks.is_file():
        raise ConfigError(f"--masks {args.masks}: no such file; leave it away for random ones")
    require_writable(args.out)
    prepare_environment(runtime)
    check_backend(runtime, arm)
    found = engines(arm, runtime, args, sizes, config["vocab_size"])
    report = compare(found["reference"], found["backend"])
    limits = {"mean": args.mean_limit, "margin": args.margin_limit}
    return {
        "schema": SCHEMA,
        "experiment": experiment.name,
        "arm": arm.name,
        "mode": arm.rollout.mode,
        "model": str(args.model),
        "backend": serving_backend(arm.rollout.mode, runtime.rollout_backend),
        "graphs": runtime.rollout_graphs,
        "sizes": sizes,
        "engines": {name: {k: said[k] for k in ("receipt", "seconds")} for name, said in found.items()},
        **report,
        "limits": limits,
        "failed": failures(report, limits),
        "device": runtime.device,
        "hardware": provenance.hardware(),
        "capability": _capability(runtime.device),
        "versions": provenance.versions(*PACKAGES),
        "commit": provenance.commit(),
    }


def chosen_sizes(experiment: Experiment, args: argparse.Namespace) -> dict[str, int]:
    """How many prompts and tokens of each, and their seed. Raises ConfigError."""
    given = {"prompt_tokens": args.prompt_tokens, "response_tokens": args.response_tokens}
    sizes = {
        "prompts": args.prompts,
        **{k: getattr(experiment.grpo, f"max_{k}") if v is None else v for k, v in given.items()},
    }
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: at least one is needed")
    return sizes | {"seed": args.seed}


def check_backend(runtime: Runtime, arm: Arm) -> None:
    """ConfigError with the reason for which the engine would be refused; here it costs no start of the reference."""
    import torch

    from quads.kernels.backend import graph_safe, unavailable
    from quads.rollout.mode import RolloutMode

    if runtime.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("runtime.device=cuda, but torch sees no CUDA device here")
    mode = RolloutMode.from_arm(arm.model_dump(mode="json"))
    backend = serving_backend(mode.name, runtime.rollout_backend)
    reason = unavailable(backend, getattr(torch, runtime.engine_dtype), "cpu" if runtime.device == "cpu" else "cuda")
    if reason:
        raise ConfigError(f"backend {backend} cannot run here: {reason}; choose another with --backend")
    safe, reason = graph_safe(backend, mode.activation, mode.rac)
    if runtime.rollout_graphs and not safe:
        raise ConfigError(f"no CUDA graphs with backend {backend}: {reason}; compare it with --no-graphs")


def chosen_runtime(experiment: Experiment, arm: Arm, args: argparse.Namespace) -> Runtime:
    """The experiment's runtime with --backend and --graphs; `check_backend` refuses what cannot run. ConfigError."""
    known = get_args(Runtime.model_fields["rollout_backend"].annotation)
    if args.backend is not None and args.backend not in known:
        raise ConfigError(f"--backend {args.backend}: unknown; known: {', '.join(known)}")
    given = {"rollout_backend": args.backend, "rollout_graphs": args.graphs}
    runtime = experiment.runtime.model_copy(update={k: v for k, v in given.items() if v is not None})
    if runtime.rollout_graphs and (reason := not_capturable(arm.rollout)):
        raise ConfigError(f"arm {arm.name} cannot be captured: {reason}; compare it with --no-graphs")
    return runtime


def engines(
    arm: Arm, runtime: Runtime, args: argparse.Namespace, sizes: dict[str, int], vocabulary: int
) -> dict[str, dict[str, Any]]:
    """What the reference and the backend say (quads.integrations.vllm.parity.observe), by name."""
    # Only after prepare_environment: these import torch.
    from quads.integrations.vllm.parity import ParityEngine, observe
    from quads.rollout.mode import RolloutMode

    mode = RolloutMode.from_arm(arm.model_dump(mode="json"))
    draw = random.Random(sizes["seed"])
    prompts = [draw.choices(range(vocabulary), k=sizes["prompt_tokens"]) for _ in range(sizes["prompts"])]
    plain = runtime.model_copy(update={"rollout_backend": "reference", "rollout_graphs": False})
    with tempfile.TemporaryDirectory(prefix="quads-parity-") as folder:

        def start(own: Runtime) -> ParityEngine:
            return ParityEngine(
                args.model, mode, own, skip=arm.keep_high_precision, receipt=Path(folder) / "receipt.json",
                prompt=sizes["prompt_tokens"], response=sizes["response_tokens"],
            )  # fmt: skip

        reference = observe(lambda: start(plain), prompts, args.masks)
        other = observe(lambda: start(runtime), prompts, args.masks, reference["tokens"])
    return {"reference": reference, "backend": other}


def compare(reference: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """{"tokens", "log_probs", "own"} of two engines' answers, `other["prefill"]` being on the reference's tokens."""
    pairs = list(zip(reference["tokens"], other["tokens"], strict=True))
    common = [next((i for i, (a, b) in enumerate(zip(*p, strict=True)) if a != b), len(p[0])) for p in pairs]
    first = [(row, i) for row, i in enumerate(common) if i < len(pairs[row][0])]
    margins = [_margin(reference["top"][row][i], pairs[row][0][i], pairs[row][1][i]) for row, i in first]
    equal = sum(a == b for p in pairs for a, b in zip(*p, strict=True))
    total = sum(len(p[0]) for p in pairs)
    decoded = [abs(a - b) for row, n in enumerate(common) for a, b in _upto(n, reference, other, row)]
    own = {"reference": _spread(_own(reference, [None] * len(pairs))), "backend": _spread(_own(other, common))}
    return {
        "tokens": {
            "sequences": len(pairs),
            "equal_sequences": len(pairs) - len(first),
            "share_equal": equal / total,
            "first_difference": min((i for _, i in first), default=None),
            "largest_margin": max((m for m in margins if m is not None), default=0.0),
            "outside_best": margins.count(None),
        },
        "log_probs": {
            "prefill": _spread(
                abs(a - b)
                for one, two in zip(reference["prefill"], other["prefill"], strict=True)
                for a, b in zip(one, two, strict=True)
            ),
            "decode": _spread(decoded),
        },
        "own": own,
    }


def _upto(n: int, reference: dict[str, Any], other: dict[str, Any], row: int) -> list[tuple[float, float]]:
    return list(zip(reference["decode"][row][:n], other["decode"][row][:n], strict=True))


def _own(said: dict[str, Any], upto: Sequence[int | None]) -> list[float]:
    """|decode - prefill| of one engine, over the tokens that it both decoded and scored."""
    rows = zip(said["decode"], said["prefill"], upto, strict=True)
    return [abs(a - b) for one, two, n in rows for a, b in zip(one[:n], two[:n], strict=True)]


def _margin(step: dict[int, float], own: int, theirs: int) -> float | None:
    """Nats by which the reference preferred its own token; None when the other one is not among its best."""
    return step[own] - step[theirs] if theirs in step else None


def _spread(differences: Any) -> dict[str, Any]:
    """{"tokens", "not_finite", "mean", "max"}; null where there is no token, or one that is not finite."""
    values = list(differences)
    bad = sum(not math.isfinite(v) for v in values)
    known = bool(values) and not bad
    return {
        "tokens": len(values),
        "not_finite": bad,
        "mean": sum(values) / len(values) if known else None,
        "max": max(values) if known else None,
    }


def failures(report: dict[str, Any], limits: dict[str, float]) -> list[str]:
    """A sentence for everything that is beyond a limit, or cannot be said to be within."""
    said = []
    for name, row in report["log_probs"].items():
        if row["not_finite"]:
            said.append(f"{name}: {row['not_finite']} of {row['tokens']} log-probs are not finite")
        elif row["mean"] is None:
            said.append(f"{name}: no token to compare: the first tokens differ already")
        elif not row["mean"] <= limits["mean"]:  # a limit that is not a number lets nothing pass
            said.append(f"{name}: mean |log-prob difference| {row['mean']:.4g} nats, limit {limits['mean']:g}")
    margin, outside = report["tokens"]["largest_margin"], report["tokens"]["outside_best"]
    if outside:
        said.append(f"{outside} sequences part at a token that is not even among the reference's best")
    if not margin <= limits["margin"]:
        said.append(f"greedy tokens differ where the reference was sure: {margin:.4g} nats, limit {limits['margin']:g}")
    return said


def _capability(device: str) -> str | None:
    if device == "cpu":
        return None
    import torch

    return ".".join(map(str, torch.cuda.get_device_capability()))


if __name__ == "__main__":
    sys.exit(main())
