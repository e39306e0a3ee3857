"""Rows of an experiment that trains on pinned sets: decontaminated problems, drawn once, in verl's format.

    order = permutation of all kept rows of `data.sets` (set after set), seeded by data.seed
    eval = the first eval_prompts, calibration = the next calibration_prompts, train = the next train_prompts

Read from FETCHED/decontaminated/<set>/{rows.jsonl, report.json} (quads.decontaminate), whose hash is checked; a set
that was not compared with test sets cannot be trained on. Rows of train and eval:
    data_source "math" or "code" (the grader), prompt messages (quads.rewards.prompts), ability the same word,
    reward_model {"style": "rule", "ground_truth": answer, or JSON tests}, extra_info {"split", "index", "set", "id"}
Rows of calibration: {"prompt": messages, "set", "id"}; the trainer tokenizes them with its own chat template, because
no tokenizer is at hand here.

Contract: a longer train split changes no held-out row, and no problem is drawn twice: of rows whose text is the same
but for case and spacing, within a set or across sets, only the first counts. Two passes, so that only chosen rows and
a bounded number of tests a program stand in memory. Differs from shuffling in the data loader: what is held out is
decided here, once.
No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quads.config import Data
from quads.data.benchmarks import names
from quads.files import read_result
from quads.rewards.prompts import CODE_SYSTEM, code_prompt, math_prompt

Row = dict[str, Any]


def report_file(name: str, fetched: Path) -> Path:
    """What quads.decontaminate writes last for a set."""
    return fetched / "decontaminated" / name / "report.json"


def kept_rows(name: str, fetched: Path) -> Iterator[Row]:
    """Rows of one decontaminated set, in file order. Raises ValueError at the end on bytes of another report."""
    path = report_file(name, fetched)
    want = read_result(path, "decontamination report", ("kept_sha256", "kept"))["kept_sha256"]
    rows, digest = path.with_name("rows.jsonl"), hashlib.sha256()
    if not rows.is_file():
        raise ValueError(f"{rows}: missing beside its report; run `snakemake -f {path}`")
    with rows.open("rb") as file:
        for line in file:
            digest.update(line)
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{rows}: a damaged line ({error.msg}); run `snakemake -f {path}`") from None
    if digest.hexdigest() != want:
        raise ValueError(f"{rows}: its hash is not the report's; run `snakemake -f {path}`")


def distinct(data: Data, fetched: Path) -> list[list[int]]:
    """By set, the numbers of its rows whose problem occurs nowhere before. Raises ValueError for an unknown set."""
    seen: set[bytes] = set()
    out: list[list[int]] = []
    for name in data.sets:
        if name not in names("train"):
            raise ValueError(f"data.sets: no training set {name!r}; known: {', '.join(names('train'))}")
        own = []
        for i, row in enumerate(kept_rows(name, fetched)):
            text = " ".join((row["question"] if "tests" in row else row["problem"]).casefold().split())
            key = hashlib.sha256(text.encode()).digest()
            if key not in seen:
                seen.add(key)
                own.append(i)
        out.append(own)
    return out


def draw(data: Data, fetched: Path) -> dict[str, list[tuple[int, int]]]:
    """(set, row) numbers by split, in their order. Raises ValueError when the sets hold too few distinct problems."""
    counts = {"eval": data.eval_prompts, "calibration": data.calibration_prompts, "train": data.train_prompts}
    rows = distinct(data, fetched)
    every = [(s, i) for s, own in enumerate(rows) for i in own]
    if sum(counts.values()) > len(every):
        have = ", ".join(f"{name} {len(own)}" for name, own in zip(data.sets, rows, strict=True))
        raise ValueError(
            f"data asks for {sum(counts.values())} prompts ({counts}), its sets hold {len(every)} ({have}); "
            "lower data.train_prompts or add a set"
        )
    order = np.random.default_rng(data.seed).permutation(len(every))
    splits, start = {}, 0
    for split, count in counts.items():
        splits[split] = [every[n] for n in order[start : start + count]]
        start += count
    return splits


def asked(row: Row, tests: int) -> tuple[str, list[dict[str, str]], str]:
    """Grader, messages and ground truth of a kept row; a program keeps at most `tests` of its tests."""
    if "tests" not in row:
        return "math", [{"role": "user", "content": math_prompt(row["problem"])}], row["answer"]
    # Imported here: experiments on mathematics do not depend on the code grader.
    from quads.rewards.code.task import Task

    task = Task.parse(json.dumps({"tests": row["tests"], "fn_name": row["func_name"]})).bounded(tests)
    truth = {"tests": [{"input": t.input, "output": t.output} for t in task.tests], "fn_name": task.function}
    text = code_prompt(row["question"], row["starter_code"])
    return (
        "code",
        [{"role": "system", "content": CODE_SYSTEM}, {"role": "user", "content": text}],
        json.dumps(truth),
    )


def build(data: Data, fetched: Path) -> dict[str, list[Row]]:
    """Rows by split. Raises ValueError or ResultFileError naming the set."""
    drawn = draw(data, fetched)
    place = {key: (split, index) for split, keys in drawn.items() for index, key in enumerate(keys)}
    rows: dict[str, list[Row]] = {split: [{}] * len(keys) for split, keys in drawn.items()}
    for s, name in enumerate(data.sets):
        for i, row in enumerate(kept_rows(name, fetched)):
            if (s, i) not in place:
                continue
            split, index = place[s, i]
            grader, messages, truth = asked(row, data.tests_per_program)
            origin = {"set": name, "id": str(row["id"])}
            if split == "calibration":
                rows[split][index] = {"prompt": messages, **origin}
                continue
            rows[split][index] = {
                "data_source": grader,
                "prompt": messages,
                "ability": grader,
                "reward_model": {"style": "rule", "ground_truth": truth},
                "extra_info": {"split": split, "index": index, **origin},
            }
    return rows


def sources(data: Data, fetched: Path) -> dict[str, str]:
    """Hash of the kept rows by set, for the manifest."""
    found = {}
    for name in data.sets:
        report = read_result(report_file(name, fetched), "decontamination report", ("kept_sha256",))
        found[name] = str(report["kept_sha256"])
    return found
