"""Stage: accuracy of one trained run through real vLLM, in its own rollout mode and in BF16.

    python -m quads.evaluate --experiment configs/toy.yaml --arm quads --seed 0 --data DIR --benchmarks DIR --train DIR
                             --cache DIR --out DIR [--shard i/n]
    -> samples in the cache; DIR/{generation.json, receipt_{own,bf16}.json, {own,bf16}.jsonl}, then DIR/result.json

Both engines run one after the other in this process: importing vLLM costs more than evaluating. `own` is what the arm
deploys; `bf16` holds the same master weights rounded to BF16 and says whether training damaged the weights or only
their quantized copy. Samples come from the cache where it has them (quads.evaluation.generations): a killed evaluation
goes on at the first unfinished sample, and a complete cache starts no engine. With --shard only this shard's samples
are drawn and DIR/shard-i-of-n.json is written last; quads.regrade then merges.
Differs from the accuracy that training logs: more samples per problem, one seed per (problem, sample), intervals,
several benchmarks.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import shutil
import sys
import time
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quads import paths
from quads.config import Arm, ConfigError, Experiment, RolloutPrecision, load_arm, load_experiment, resolve_run
from quads.evaluation.finish import all_wanted, finish, questions_hash
from quads.evaluation.generations import RecordsError, Shard, Store
from quads.evaluation.grading import Grading
from quads.evaluation.lock import locked_folder
from quads.evaluation.problems import prompts, questions
from quads.evaluation.sampling import Prompt, Wanted, collect, missing
from quads.files import ResultFileError, read_result, write_json_atomic
from quads.integrations.vllm.generate import Engine, EngineError, prepare_environment
from quads.lifeline import watch_parents
from quads.provenance import code_hash
from quads.rewards.code import SandboxUnavailableError

log = logging.getLogger("quads.evaluate")

CHUNKS_PER_ENGINE = 8  # progress lines and, at most, the share of samples that a kill can cost
PACKAGES = ("vllm", "torch", "transformers")


def main(argv: list[str] | None = None) -> int:
    """Parse, evaluate, write; 1 after an error that the message explains."""
    parser = argparse.ArgumentParser(prog="quads.evaluate", description="Accuracy through the arm's engine and BF16.")
    parser.add_argument("--experiment", type=Path, required=True, help="configs/NAME.yaml")
    parser.add_argument("--arm", required=True, help="file stem under configs/arms")
    parser.add_argument("--seed", type=int, required=True, help="training seed")
    parser.add_argument("--data", type=Path, required=True, help="folder of quads.prepare")
    parser.add_argument("--benchmarks", type=Path, required=True, help="folder of quads.make_benchmarks")
    parser.add_argument("--fetched", type=Path, default=Path("results/data"), help="folder of pinned sets")
    parser.add_argument("--train", type=Path, required=True, help="folder of quads.train")
    parser.add_argument("--cache", type=Path, help="generation cache (default: OUT/samples)")
    parser.add_argument("--out", type=Path, required=True, help="folder for records and result.json")
    parser.add_argument(
        "--shard", type=Shard.parse, help="i/n: draw this part only, e.g. 0/4; merge with quads.regrade"
    )
    args = parser.parse_args(argv)
    if args.cache is not None and args.cache.resolve() == args.out.resolve():
        parser.error(f"--cache {args.cache} is --out itself; give another folder, or leave it away for OUT/samples")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    watch_parents()
    configs = args.experiment.parent
    try:
        experiment = load_experiment(args.experiment.stem, configs=configs)
        job = Job(experiment, load_arm(args.arm, configs=configs), args.seed, args)
        with locked_folder(args.out, job.part), locked_folder(job.cache, job.part), closing(job.grading):
            job.run()
    except (ConfigError, ResultFileError, RecordsError, EngineError, SandboxUnavailableError) as error:
        log.error("%s", error)
        return 1
    return 0


class Job:
    """One evaluation: arm and seed under an experiment. `places` holds data, benchmarks, fetched, train, cache, out."""

    def __init__(self, experiment: Experiment, arm: Arm, seed: int, places: argparse.Namespace) -> None:
        self.experiment, self.arm, self.places = experiment, arm, places
        self.config = resolve_run(experiment, arm, seed)
        self.out: Path = places.out
        self.cache: Path = places.cache or places.out / "samples"
        self.shard: Shard | None = places.shard
        evaluation, grpo = experiment.evaluation, experiment.grpo
        self.grading = Grading(evaluation.sandbox, self.cache / "verdicts")
        self.max_tokens = evaluation.max_response_tokens or grpo.max_response_tokens
        self.max_prompt = evaluation.max_prompt_tokens or grpo.max_prompt_tokens

    @property
    def part(self) -> str:
        """Name of this job's share, "" for the whole."""
        return self.shard.name if self.shard else ""

    def run(self) -> None:
        """Draw, then grade and write result.json, or for a shard its marker."""
        start = time.monotonic()
        prepare_environment(self.experiment.runtime)
        checkpoint, masks = self._trained()
        evaluation = self.experiment.evaluation
        asked = questions(self.experiment, self.places.data, self.places.benchmarks, self.places.fetched)
        # before the engine starts: a machine without a sandbox should say so at once
        self.grading.check(asked)
        ready, decode = prompts(asked, checkpoint, self.max_prompt)
        todo = all_wanted({i: p.request for i, p in ready.items()}, asked)
        weights = checkpoint_hash(checkpoint, masks)
        engines = {
            name: self._engine(name, checkpoint, masks, weights, todo, ready, decode) for name in evaluation.engines
        }
        generation = {
            "run_id": self.config.id,
            "arm": self.arm.name,
            "seed": self.config.seed,
            "eval_hash": paths.eval_hash(self.experiment),
            "evaluation": evaluation.model_dump(mode="json"),
            "checkpoint_sha256": weights,
            "train_result_sha256": file_sha256(self.places.train / "result.json"),
            "data_sha256": read_result(self.places.data / "manifest.json", "data manifest", ("sha256",))["sha256"][
                "eval"
            ],
            "questions": questions_hash(asked),
            "requests": {i: p.request for i, p in ready.items()},
            "engines": engines,
            "versions": {name: version(name) for name in PACKAGES},
        }
        write_json_atomic(self.out / "generation.json", generation)
        drawn = time.monotonic() - start
        if self.shard:
            write_json_atomic(self.out / f"{self.part}.json", {"run_id": self.config.id, "seconds": round(drawn, 3)})
            log.info("%s is complete; when all are: python -m quads.regrade", self.part)
            return
        result = finish(generation, asked, evaluation, cache=self.cache, grading=self.grading, out=self.out)
        for name, entry in result["engines"].items():
            average = entry["macro"]["average"] if entry["macro"] else None
            macro = "-" if average is None else f"{average:.4f}"
            log.info("%s %s: pass@1 %.4f, macro average %s", self.config.id, name, entry["pass_at_1"], macro)
        seconds = {"seconds": round(time.monotonic() - start, 3), "seconds_drawing": round(drawn, 3)}
        write_json_atomic(self.out / "result.json", {**result, **seconds})

    def _trained(self) -> tuple[Path, Path | None]:
        path = self.places.train / "result.json"
        trained = read_result(path, "training result", ("run_id", "checkpoint", "rac_masks"))
        if trained["run_id"] != self.config.id:
            raise ConfigError(f"{path} is of run {trained['run_id']!r}, this configuration is {self.config.id!r}")
        return Path(trained["checkpoint"]), Path(trained["rac_masks"]) if trained["rac_masks"] else None

    def _engine(
        self,
        name: str,
        checkpoint: Path,
        masks: Path | None,
        weights: str,
        todo: list[Wanted],
        ready: dict[str, Prompt],
        decode: Any,
    ) -> dict[str, Any]:
        """Complete one engine's samples; what generation.json says of it."""
        evaluation, runtime = self.experiment.evaluation, self.experiment.runtime
        quantization, mode = engine_mode(name, self.arm, masks, runtime.rollout_backend)
        conditions = {
            "model": weights,
            "mode": mode,
            # the masks' bytes are in the model hash; their path may change with the folder
            "quantization": {k: v for k, v in quantization.items() if k != "rac_masks"},
            "sampling": {k: getattr(evaluation, k) for k in ("temperature", "top_p", "seed")},
            "max_tokens": self.max_tokens,
            "runtime": {"device": runtime.device, "dtype": runtime.engine_dtype, "graphs": runtime.rollout_graphs},
            "versions": {name: version(name) for name in PACKAGES},
            # an edit to the plugin or its numerics makes other samples under the same settings
            "code": code_hash("quads.integrations.vllm", "quads.rollout"),
        }
        store = Store.open(self.cache, mode, conditions, self.shard)
        label, left = f"{self.arm.name} {name} ({mode})", missing(store, todo, self.shard)
        if left:
            start = time.monotonic()
            with Engine(
                checkpoint,
                quantization,
                mode=mode,
                receipt=store.receipt,
                runtime=runtime,
                sampling=evaluation,
                max_tokens=self.max_tokens,
                max_model_len=self.max_prompt + self.max_tokens,
            ) as engine:
                log.info("%s: engine ready after %.1f s", label, time.monotonic() - start)
                chunk = max(runtime.max_sequences, -(-len(left) // CHUNKS_PER_ENGINE))
                collect(engine, left, ready, store, seed=evaluation.seed, decode=decode, chunk=chunk, label=label)
        else:
            log.info("%s: every sample is in the cache, no engine starts", label)
        return {"mode": mode, "conditions": store.conditions, "receipt": self._receipt(name, store)}

    def _receipt(self, name: str, store: Store) -> str | None:
        """Copy the drawing engine's receipt beside the result; None for a shard that had no problem to draw."""
        receipts = store.receipts()
        if not receipts:
            if self.shard:
                return None
            raise RecordsError(
                f"{store.folder}: samples of {store.stem} without a receipt prove no engine mode; delete them "
                f"(rm {store.folder}/{store.stem}*) and run the evaluation again"
            )
        target = self.out / f"receipt_{name}.json"
        shutil.copyfile(receipts[0], target)
        return target.name


def engine_mode(name: str, arm: Arm, masks: Path | None, backend: str = "reference") -> tuple[dict[str, Any], str]:
    """quantization_config (without receipt) and mode of the engine `name` (own or bf16) for this arm."""
    from quads.integrations.vllm.execution import serving_backend
    from quads.rollout.mode import RolloutMode  # imports torch: only after prepare_environment

    if name == "bf16":
        arm = arm.model_copy(update={"rollout": RolloutPrecision()})
    mode = RolloutMode.from_arm(arm.model_dump(mode="json"))
    if mode.needs_masks and (masks is None or not masks.is_file()):
        raise ConfigError(
            f"arm {arm.name} needs static RAC masks, but its training result names {masks}: train it again"
        )
    chosen = str(masks) if mode.needs_masks else None
    serves = serving_backend(mode.name, backend)
    return mode.to_quantization_config(chosen, arm.keep_high_precision, backend=serves), mode.name


def file_sha256(path: Path) -> str:
    """sha256 of a small file: says which training result was evaluated."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def checkpoint_hash(checkpoint: Path, masks: Path | None) -> str:
    """sha256 over names and bytes of weights, configuration and tokenizer, and of the RAC masks."""
    files = sorted(p for p in checkpoint.glob("*") if p.suffix in {".safetensors", ".json", ".jinja"})
    if not any(p.suffix == ".safetensors" for p in files):
        raise ConfigError(f"{checkpoint} holds no .safetensors file: not a checkpoint; train the arm again")
    digest = hashlib.sha256()
    for path in [*files, *([masks] if masks else [])]:
        with path.open("rb") as file:
            digest.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
