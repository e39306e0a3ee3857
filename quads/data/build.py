"""The toy's data set: train, eval and calibration rows, their parquet files and a manifest.

    eval, calibration, train are drawn in this order, each from its own stream SeedSequence(seed, spawn_key=(split,)),
    and each rejects every prompt drawn before it: no prompt is in two splits or twice in one, and a longer train
    split changes no eval prompt and begins with the shorter one's rows.

Rows of train and eval (the format verl reads; one dict per row):
    data_source "chain", prompt [{"role": "user", "content": "^3+5*2-7="}], ability "arithmetic",
    reward_model {"style": "rule", "ground_truth": "869"}, extra_info {"split": "train", "index": 0, "operations": 3}
Rows of calibration: prompt "^3+5*2-7=", answer "869;", input_ids of both together (int64, N+3 + N+1).

The content hash is over the rows as sorted JSON, not over the parquet bytes, which also hold the writer's version.
Differs from hashing the files: the hash says whether the DATA changed. No torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from quads.config import Data, config_hash
from quads.data import chain

Row = dict[str, Any]
SPLITS = ("eval", "calibration", "train")
ABILITY = "arithmetic"


def draw_splits(data: Data) -> dict[str, chain.Problems]:
    """Distinct problems per split. Raises ValueError if too few prompts exist for the configured counts."""
    counts = {"eval": data.eval_prompts, "calibration": data.calibration_prompts, "train": data.train_prompts}
    seen = np.empty(0, dtype=np.int64)
    problems: dict[str, chain.Problems] = {}
    for stream, split in enumerate(SPLITS):
        rng = np.random.default_rng(np.random.SeedSequence(data.seed, spawn_key=(stream,)))
        problems[split] = chain.draw_new(counts[split], data.operations, data.operators, rng, seen)
        seen = np.concatenate([seen, chain.keys(problems[split])])
    return problems


def message(prompt: str) -> list[dict[str, str]]:
    """The chat message that holds a prompt; the chat template adds nothing to it."""
    return [{"role": "user", "content": prompt}]


def rl_rows(problems: chain.Problems, split: str) -> list[Row]:
    """Rows for verl; ground_truth is the whole right chain, so that a grader knows its length."""
    ids_BT, digits_BN = chain.prompt_ids(problems), chain.answer_digits(problems)
    return [
        {
            "data_source": chain.NAME,
            "prompt": message(chain.text_of(ids)),
            "ability": ABILITY,
            "reward_model": {"style": "rule", "ground_truth": chain.text_of(digits)},
            "extra_info": {"split": split, "index": i, "operations": problems.operations},
        }
        for i, (ids, digits) in enumerate(zip(ids_BT, digits_BN, strict=True))
    ]


def calibration_rows(problems: chain.Problems) -> list[Row]:
    """Prompts with their right answers and the token ids of both."""
    prompts, answers = chain.prompt_ids(problems), chain.answer_ids(chain.answer_digits(problems))
    return [
        {"prompt": chain.text_of(p), "answer": chain.text_of(a), "input_ids": [*map(int, p), *map(int, a)]}
        for p, a in zip(prompts, answers, strict=True)
    ]


def content_hash(rows: Iterable[Row]) -> str:
    """sha256 hex digest of the rows, one line of sorted JSON each."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def build(data: Data) -> dict[str, list[Row]]:
    """All rows of the data set by split. Raises ValueError if an answer fails the independent checker."""
    problems = draw_splits(data)
    rows = {
        "train": rl_rows(problems["train"], "train"),
        "eval": rl_rows(problems["eval"], "eval"),
        "calibration": calibration_rows(problems["calibration"]),
    }
    for split in ("train", "eval"):
        for row in rows[split]:
            prompt, truth = row["prompt"][0]["content"], row["reward_model"]["ground_truth"]
            if not chain.check(prompt, truth + chain.END):
                raise ValueError(f"{split} row {row['extra_info']['index']}: {truth!r} is not the answer of {prompt!r}")
    return rows


def write(rows: dict[str, list[Row]], out: Path) -> None:
    """DIR/{train,eval,calibration}.parquet, each complete or absent."""
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    out.mkdir(parents=True, exist_ok=True)
    for split, split_rows in rows.items():
        target = out / f"{split}.parquet"
        part = target.with_suffix(".parquet.part")
        Dataset.from_list(split_rows).to_parquet(str(part))
        os.replace(part, target)


def manifest(data: Data, rows: dict[str, list[Row]], sources: dict[str, str] | None = None) -> dict[str, Any]:
    """What DIR/manifest.json says: counts, content hashes, seed, configuration; `sources`: hash by pinned set."""
    return {
        "rows": {split: len(split_rows) for split, split_rows in rows.items()},
        "sha256": {split: content_hash(split_rows) for split, split_rows in rows.items()},
        "seed": data.seed,
        "config": data.model_dump(mode="json"),
        "config_hash": config_hash(data),
        **({"sources": sources} if sources else {"vocabulary": list(chain.SYMBOLS)}),
    }


def read(path: Path) -> list[Row]:
    """Rows of one parquet file of this data set. Raises ValueError naming the file if it is missing or damaged."""
    import pyarrow.parquet

    if not path.is_file():
        raise ValueError(f"{path}: missing; make it with `python -m quads.prepare --out {path.parent}`")
    try:
        rows: list[Row] = pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: not a complete parquet file ({error}); delete {path.parent} and run quads.prepare again"
        ) from error
    return rows


def eval_keys(directory: Path) -> chain.Ints:
    """Keys of the prompts in eval.parquet, int64: what a warm-up must not train on."""
    prompts = [row["prompt"][0]["content"] for row in read(directory / "eval.parquet")]
    ids_BT = np.array([chain.ids_of(p) for p in prompts], dtype=np.int64)
    return chain.keys(problems_of(ids_BT))


def problems_of(ids_BT: chain.Ints) -> chain.Problems:
    """The problems behind prompt token ids [B,N+3]."""
    pairs_BN = ids_BT[:, 2:-1] - 10
    return chain.Problems(ids_BT[:, 1], pairs_BN // 10, pairs_BN % 10)
