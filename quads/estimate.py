"""Stage: what an experiment would cost in GPU-hours, per rule, from the rates that its file states.

    python -m quads.estimate --experiment configs/paper.yaml [--more-arms]        (`snakemake -n paper` prints the same)

    train     hours = start + steps * prompts * samples * response / decode rate / decode factor of the mode
                            + steps * prompts * samples * (prompt + response) / training rate * QAT overhead
    evaluate  hours = start + problems * samples * response / decode rate, once per engine

All in GPU-hours: rates are per GPU and assumed to add up over GPUs; waiting for the longest response is not in them.
Contract: an estimate and nothing else; never in a table of results. Differs from a benchmark in that nothing runs: it
needs neither GPU nor data. No torch.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from quads.config import Arm, ConfigError, Experiment, load_arms, load_experiment
from quads.config.rates import Rates
from quads.data.benchmarks import load_spec
from quads.data.toy_benchmarks import is_toy
from quads.evaluation.problems import PINNED_SAMPLES


@dataclass(frozen=True)
class Row:
    """One rule of one arm: how many jobs (seeds), GPU-hours and tokens of all of them."""

    rule: str
    arm: str
    jobs: int
    gpu_hours: float
    tokens: float


def train_row(experiment: Experiment, arm: Arm) -> Row:
    """GPU-hours of all seeds of one arm. Raises ConfigError without rates."""
    rates, grpo, gpus = _rates(experiment), experiment.grpo, _gpus(experiment)
    samples = grpo.steps * grpo.prompts_per_step * grpo.samples_per_prompt
    decode = rates.decode_tokens_per_s * rates.decode_factor.get(arm.rollout.mode, 1.0)
    overhead = rates.qat_overhead if arm.trainer.weight == "nvfp4" else 1.0
    # Prompts count in full: their own lengths are not known before the data is made.
    trained = samples * (rates.response_tokens + grpo.max_prompt_tokens)
    seconds = samples * rates.response_tokens / decode + trained / rates.train_tokens_per_s * overhead
    hours = rates.start_minutes / 60 * gpus + seconds / 3600
    seeds = len(experiment.seeds)
    return Row("train", arm.name, seeds, seeds * hours, seeds * samples * rates.response_tokens)


def evaluate_row(experiment: Experiment, arm: Arm) -> Row:
    """GPU-hours of all seeds of one arm on every benchmark, in each of `evaluation.engines`."""
    rates, evaluation = _rates(experiment), experiment.evaluation
    asked = evaluation.samples_per_problem * experiment.data.eval_prompts
    for name in evaluation.benchmarks.names:
        if not is_toy(name):
            spec = load_spec(name)
            asked += spec.rows * evaluation.samples.get(name, PINNED_SAMPLES[spec.kind])
    hours = 0.0
    for engine in evaluation.engines:
        mode = arm.rollout.mode if engine == "own" else "bf16"
        rate = rates.decode_tokens_per_s * rates.decode_factor.get(mode, 1.0)
        hours += rates.start_minutes / 60 + asked * rates.response_tokens / rate / 3600
    seeds = len(experiment.seeds)
    tokens = seeds * asked * rates.response_tokens * len(evaluation.engines)
    return Row("evaluate", arm.name, seeds, seeds * hours, tokens)


def estimate(experiment: Experiment, arms: list[Arm]) -> list[Row]:
    """Rows for every arm, training first. Raises ConfigError without rates."""
    return [train_row(experiment, arm) for arm in arms] + [evaluate_row(experiment, arm) for arm in arms]


def table(experiment: Experiment, rows: list[Row]) -> str:
    """The rows as text, with their sum, GPUs a job and the source of the rates."""
    lines = [
        f"Estimate for {experiment.name}: {_gpus(experiment)} GPUs a training job "
        f"({experiment.runtime.nodes} nodes x {experiment.runtime.gpus_per_node})",
        f"  {'rule':10s} {'arm':18s} {'jobs':>5s} {'GPU-hours':>10s} {'tokens':>10s}",
    ]
    lines += [f"  {r.rule:10s} {r.arm:18s} {r.jobs:5d} {r.gpu_hours:10.1f} {r.tokens:10.2e}" for r in rows]
    total = sum(r.gpu_hours for r in rows)
    lines.append(f"  {'all':10s} {'':18s} {sum(r.jobs for r in rows):5d} {total:10.1f}")
    lines.append(f"  Rates: {_rates(experiment).source}")
    return "\n".join(lines)


def _gpus(experiment: Experiment) -> int:
    return experiment.runtime.nodes * experiment.runtime.gpus_per_node


def _rates(experiment: Experiment) -> Rates:
    if experiment.rates is None:
        raise ConfigError(f"configs/{experiment.name}.yaml states no `rates`, so there is nothing to estimate with")
    return experiment.rates


def main(argv: list[str] | None = None) -> int:
    """Print the table; 1 with a message where the experiment states no rates."""
    parser = argparse.ArgumentParser(prog="python -m quads.estimate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--experiment", type=Path, required=True, help="NAME or configs/NAME.yaml")
    parser.add_argument("--more-arms", action="store_true", help="with more_arms")
    args = parser.parse_args(argv)
    try:
        if not args.experiment.suffix:
            args.experiment = Path("configs") / f"{args.experiment}.yaml"
        experiment = load_experiment(args.experiment.stem, args.experiment.parent)
        arms = load_arms(experiment, args.experiment.parent, more=args.more_arms)
        sys.stdout.write(table(experiment, estimate(experiment, arms)) + "\n")
    except ConfigError as error:
        sys.stderr.write(f"quads.estimate: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
