"""Stage: pass@1 of one trained run through real vLLM, in its own rollout mode and in BF16.

    python -m quads.evaluate --experiment configs/toy.yaml --arm quads --seed 0 --data DIR --train DIR --out DIR
    -> DIR/{own,bf16}.jsonl (one line per sample), DIR/receipt_{own,bf16}.json, then DIR/result.json

Both engines run one after the other in this process: importing vLLM costs more than evaluating. `own` is what the arm
deploys; `bf16` holds the same master weights rounded to BF16 and says whether training damaged the weights or only
their quantized copy. A killed evaluation resumes at the first unfinished sample.
Differs from the accuracy that training logs: more samples per problem, one seed per (problem, sample), an interval.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quads import paths
from quads.config import Arm, ConfigError, Experiment, RolloutPrecision, load_arm, load_experiment, resolve_run
from quads.data.build import read
from quads.evaluation.records import Records, RecordsError
from quads.evaluation.sampling import Problem, collect, summarise
from quads.files import ResultFileError, read_result, write_json_atomic
from quads.integrations.vllm.generate import Engine, EngineError, prepare_environment
from quads.lifeline import watch_parents
from quads.rewards.registry import grader

log = logging.getLogger("quads.evaluate")

CHUNKS_PER_ENGINE = 8  # progress lines and, at most, the share of samples that a kill can cost


def main(argv: list[str] | None = None) -> int:
    """Parse, evaluate, write; 1 after an error that the message explains."""
    parser = argparse.ArgumentParser(prog="quads.evaluate", description="pass@1 through the arm's engine and BF16.")
    parser.add_argument("--experiment", type=Path, required=True, help="configs/NAME.yaml")
    parser.add_argument("--arm", required=True, help="file stem under configs/arms")
    parser.add_argument("--seed", type=int, required=True, help="training seed")
    parser.add_argument("--data", type=Path, required=True, help="folder of quads.prepare")
    parser.add_argument("--train", type=Path, required=True, help="folder of quads.train")
    parser.add_argument("--out", type=Path, required=True, help="folder for records and result.json")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    watch_parents()
    configs = args.experiment.parent
    try:
        experiment = load_experiment(args.experiment.stem, configs=configs)
        arm = load_arm(args.arm, configs=configs)
        with locked(args.out):
            result = evaluate(experiment, arm, args.seed, data=args.data, train=args.train, out=args.out)
        write_json_atomic(args.out / "result.json", result)
    except (ConfigError, ResultFileError, RecordsError, EngineError) as error:
        log.error("%s", error)
        return 1
    return 0


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold the folder: a second evaluation (an orphan, a double submission) must not append to the same records."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecordsError(
                f"{out} is in use by another evaluation; wait for it or stop it, then run again"
            ) from None
        yield


def evaluate(experiment: Experiment, arm: Arm, seed: int, *, data: Path, train: Path, out: Path) -> dict[str, Any]:
    """What result.json says. Raises ConfigError or ResultFileError when the inputs do not belong together."""
    start = time.monotonic()
    prepare_environment(experiment.runtime)
    run = resolve_run(experiment, arm, seed)
    trained = read_result(train / "result.json", "training result", ("run_id", "checkpoint", "rac_masks"))
    if trained["run_id"] != run.id:
        raise ConfigError(f"{train / 'result.json'} is of run {trained['run_id']!r}, this configuration is {run.id!r}")
    manifest = read_result(data / "manifest.json", "data manifest", ("sha256",))
    checkpoint = Path(trained["checkpoint"])
    masks = Path(trained["rac_masks"]) if trained["rac_masks"] else None
    eval_hash = paths.eval_hash(experiment)
    identity = {
        "run_id": run.id,
        "checkpoint": checkpoint_hash(checkpoint, masks),
        "data": manifest["sha256"]["eval"],
        "eval_hash": eval_hash,
        "sampling": experiment.evaluation.model_dump(mode="json", exclude={"engines", "bootstrap", "confidence"}),
        "max_tokens": run.grpo.max_response_tokens,
        "runtime": {"device": run.runtime.device, "dtype": run.runtime.engine_dtype},
    }
    problems, decode = load_problems(data / "eval.parquet", checkpoint, run.grpo.max_prompt_tokens)
    engines = {
        name: run_engine(name, experiment, arm, checkpoint, masks, identity, problems, decode, out)
        for name in experiment.evaluation.engines
    }
    return {
        "run_id": run.id,
        "arm": arm.name,
        "seed": seed,
        "eval_hash": eval_hash,
        "evaluation": experiment.evaluation.model_dump(mode="json"),
        "checkpoint_sha256": identity["checkpoint"],
        "data_sha256": identity["data"],
        "engines": engines,
        "versions": {name: version(name) for name in ("vllm", "torch", "transformers")},
        "seconds": round(time.monotonic() - start, 3),
    }


def run_engine(
    name: str,
    experiment: Experiment,
    arm: Arm,
    checkpoint: Path,
    masks: Path | None,
    identity: dict[str, Any],
    problems: list[Problem],
    decode: Any,
    out: Path,
) -> dict[str, Any]:
    """Complete one engine's records and sum them up; a complete file starts no engine."""
    quantization, mode = engine_mode(name, arm, masks)
    evaluation, runtime = experiment.evaluation, experiment.runtime
    # the masks' bytes are in the checkpoint hash; their path may change with the folder
    stated = {k: v for k, v in quantization.items() if k != "rac_masks"}
    records = Records.open(out / f"{name}.jsonl", {**identity, "engine": name, "mode": mode, "quantization": stated})
    start = time.monotonic()
    receipt_path = out / f"receipt_{name}.json"
    if records.missing(len(problems), evaluation.samples_per_problem):
        engine = Engine(
            checkpoint,
            quantization,
            mode=mode,
            receipt=receipt_path,
            runtime=runtime,
            sampling=evaluation,
            max_tokens=experiment.grpo.max_response_tokens,
            max_model_len=experiment.grpo.max_prompt_tokens + experiment.grpo.max_response_tokens,
        )
        total = len(problems) * evaluation.samples_per_problem
        with engine:
            log.info("%s (%s): engine ready after %.1f s", name, mode, time.monotonic() - start)
            collect(
                engine,
                problems,
                records,
                evaluation,
                grade=lambda p, text, finished: grader(p.data_source)(text, p.ground_truth, finished),
                decode=decode,
                chunk=max(runtime.max_sequences, -(-total // CHUNKS_PER_ENGINE)),
                label=f"{arm.name} {name} ({mode})",
            )
    summary = summarise(records, len(problems), evaluation, mode=mode)
    log.info("%s: pass@1 %.4f [%.4f, %.4f]", name, *(summary[k] for k in ("pass_at_1", "ci_low", "ci_high")))
    return {**summary, "receipt": receipt_path.name, "seconds": round(time.monotonic() - start, 3)}


def engine_mode(name: str, arm: Arm, masks: Path | None) -> tuple[dict[str, Any], str]:
    """quantization_config (without receipt) and mode of the engine `name` (own or bf16) for this arm."""
    from quads.rollout.mode import RolloutMode  # imports torch: only after prepare_environment

    if name == "bf16":
        arm = arm.model_copy(update={"rollout": RolloutPrecision()})
    mode = RolloutMode.from_arm(arm.model_dump(mode="json"))
    if mode.needs_masks and (masks is None or not masks.is_file()):
        raise ConfigError(
            f"arm {arm.name} needs static RAC masks, but its training result names {masks}: train it again"
        )
    chosen = str(masks) if mode.needs_masks else None
    return mode.to_quantization_config(rac_masks=chosen, skip=arm.keep_high_precision), mode.name


def load_problems(path: Path, checkpoint: Path, max_prompt_tokens: int) -> tuple[list[Problem], Any]:
    """The evaluation problems, tokenized with the checkpoint's own chat template, and the decoder of responses."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    problems = []
    for index, row in enumerate(read(path)):
        text = str(tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True))
        ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) > max_prompt_tokens:
            raise ConfigError(
                f"{path}, problem {index}: {len(ids)} prompt tokens, grpo.max_prompt_tokens is {max_prompt_tokens}"
            )
        problems.append(Problem(text, ids, row["reward_model"]["ground_truth"], row["data_source"]))

    def decode(ids: list[int]) -> str:
        # without the end mark only: dropping every special token would turn a wrong answer that contains one into
        # a right one
        body = ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids
        return str(tokenizer.decode(body, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return problems, decode


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
