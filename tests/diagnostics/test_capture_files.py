"""Capture with a stand-in engine (the trainer's own model): files, resume, identity, and every study on top of them."""

from __future__ import annotations

import csv
import json
import math

import pytest
import torch
from fake_engine import FakeEngine
from tiny_moe import tiny_model

from quads.config import Arm, ConfigError, Diagnostics, Experiment, load_arm
from quads.diagnostics import capture
from quads.diagnostics.context import Context
from quads.diagnostics.prompts import Prompt, calibration_ids, load_prompts
from quads.diagnostics.studies import STUDIES
from quads.diagnostics.write import spread, write_study
from quads.files import ResultFileError

SETTINGS = Diagnostics(prompts=4, samples_per_prompt=2, seeds=(0, 1), single_sequences=3, k=(0.0, 0.5, 1.0))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("capture")
    tiny_model(1).save_pretrained(root / "model")
    experiment = Experiment(name="tiny", title="t", arms=("bf16", "quads"), diagnostics=SETTINGS)
    arms = [load_arm(name) for name in ("bf16", "nvfp4_naive", "qat_only", "quads", "qat_symmetric")]
    generator = torch.Generator().manual_seed(0)
    prompts = [Prompt(tuple(torch.randint(2, 43, (5,), generator=generator).tolist())) for _ in range(12)]
    modes = capture.engine_modes(arms, SETTINGS)
    run(root, experiment, modes, prompts)
    return root, experiment, arms, modes, prompts


def run(root, experiment, modes, prompts):
    FakeEngine.starts = []
    ids = calibration_ids(None, prompts)
    out = root / "captures"
    capture.capture_all(modes, prompts, ids, root / "model", experiment, out, start=FakeEngine, versions={"fake": "1"})
    return list(FakeEngine.starts)


def test_modes_cover_arms_sweep_and_masks() -> None:
    arms = [load_arm("quads"), load_arm("fp8")]
    modes = capture.engine_modes(arms, Diagnostics(k=(0.0, 0.5)))
    rac = [f"w4a4+rac-k0.5-{g}-{m}-sumsq" for g in ("block16", "channel") for m in ("static", "batch", "token")]
    assert set(modes) == {"fp8", "w4a4", *rac}
    assert modes[rac[0]].arm_mode and not modes["w4a4"].arm_mode
    other = arms[0].model_copy(update={"keep_high_precision": ("lm_head", "self_attn")})
    assert capture.arm_engine(other).id != capture.arm_engine(arms[0]).id


def test_finished_captures_start_no_engine_and_a_change_does(world) -> None:
    root, experiment, _, modes, prompts = world
    assert run(root, experiment, modes, prompts) == []
    changed = [Prompt((*prompts[0].token_ids[:-1], 7)), *prompts[1:]]
    name = next(iter(modes))
    assert len(run(root, experiment, {name: modes[name]}, changed)) == 2  # its bf16 and its float32 engine
    run(root, experiment, modes, prompts)


def test_seeds_draw_disjoint_prompts() -> None:
    drawn = capture.draw(12, SETTINGS)
    by_seed = [{p for seed, p, _ in drawn if seed == s} for s in (0, 1)]
    assert len(drawn) == 16 and not by_seed[0] & by_seed[1] and [len(s) for s in by_seed] == [4, 4]
    with pytest.raises(ConfigError, match=r"diagnostics\.prompts=4 but there are 3"):
        capture.draw(3, SETTINGS)


def test_float32_engine_gets_the_bf16_values(world, tmp_path) -> None:
    from safetensors.torch import load_file

    root = world[0]
    copy = capture.bf16_copy(root / "model", tmp_path / "copy")
    a, b = load_file(root / "model/model.safetensors"), load_file(copy / "model.safetensors")
    assert all(torch.equal(b[k], a[k].to(torch.bfloat16)) for k in a) and (copy / "config.json").is_file()
    assert capture.bf16_copy(copy, tmp_path / "again") == copy


@pytest.mark.parametrize("name", [n for n in STUDIES if n != "outliers"])
def test_every_study_writes_its_files(world, tmp_path, name: str) -> None:
    root, experiment, arms, _, _ = world
    context = Context(experiment, arms, root / "model", root / "captures")
    write_study(STUDIES[name](context), context, tmp_path, name)
    rows = list(csv.DictReader((tmp_path / f"{name}.csv").read_text().splitlines()))
    meta = json.loads((tmp_path / f"{name}.json").read_text())
    assert rows and meta["rows"] == len(rows) and meta["checkpoint_sha256"] == context.checkpoint_sha256
    assert (tmp_path / f"{name}.svg").stat().st_size > 5000 and "|" in (tmp_path / f"{name}.md").read_text()


def test_decomposition_of_a_known_engine(world) -> None:
    """The stand-in is T2 with bf16 storage: storage is all of delta_num, every other part vanishes."""
    root, experiment, arms, _, _ = world
    rows = STUDIES["decomposition"](Context(experiment, arms, root / "model", root / "captures")).rows
    size = {(r["arm"], r["term"]): r["max_token_abs"] for r in rows if r.get("seed") == 0 and "max_token_abs" in r}
    for arm in ("qat_only", "quads", "qat_symmetric"):
        assert size[arm, "delta_weight"] == 0.0
    assert size["nvfp4_naive", "delta_weight"] > 1e-3 and size["qat_symmetric", "delta_act"] == 0.0
    assert size["quads", "num_storage"] > 0
    for term in ("num_decode", "of_repeat"):
        assert size["quads", term] == 0.0
    assert max(size["quads", t] for t in ("num_float32", "of_batch", "of_routing")) < 1e-4


def test_wrong_checkpoint_and_missing_mode_are_named(world, tmp_path) -> None:
    root, experiment, arms, _, _ = world
    tiny_model(2).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="was captured from checkpoint"):
        Context(experiment, arms, tmp_path / "other", root / "captures")
    with pytest.raises(ResultFileError, match=r"nowhere\.safetensors: missing"):
        capture.load_dump(root / "captures", "nowhere")
    context = Context(experiment, arms, root / "model", root / "captures")
    with pytest.raises(ConfigError, match=r"no manifest of quads\.warmup"):
        STUDIES["outliers"](context)


def test_prompt_files(tmp_path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"input_ids": [3, 4]}\n\n{"input_ids": [5]}\n')
    assert [p.token_ids for p in load_prompts(path, tmp_path, 4)] == [(3, 4), (5,)]
    with pytest.raises(ConfigError, match="row 0: 2 prompt tokens"):
        load_prompts(path, tmp_path, 1)
    path.write_text('{"prompt": "text"}\n')
    with pytest.raises(ConfigError, match="row 0: needs input_ids"):
        load_prompts(path, tmp_path, 4)


def test_spread() -> None:
    assert spread([1.0, 2.0, 3.0]) == "2 ± 1" and spread([0.5]) == "0.5" and spread([]) == "-"
    assert "nan" in spread([math.nan])


def test_run_hash_does_not_know_diagnostics() -> None:
    from quads.config import resolve_run
    from quads.paths import diagnose_hash

    arm = Arm(name="bf16", title="t")
    a = Experiment(name="x", title="t", arms=("bf16",))
    b = a.model_copy(update={"diagnostics": Diagnostics(prompts=5)})
    assert resolve_run(a, arm, 0).id == resolve_run(b, arm, 0).id
    assert diagnose_hash(a) != diagnose_hash(b)
