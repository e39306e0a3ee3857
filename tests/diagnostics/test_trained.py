"""Diagnostics of finished runs on a stand-in engine: own masks reach the engine, rows of several runs, errors."""

from __future__ import annotations

import json

import pytest
import torch
from fake_engine import FakeEngine
from safetensors.torch import load_file, save_file
from tiny_moe import tiny_model

from quads.config import ConfigError, Diagnostics, Experiment, load_arm, resolve_run
from quads.diagnostics import capture, trained
from quads.diagnostics.context import Context
from quads.diagnostics.prompts import Prompt, calibration_ids
from quads.diagnostics.write import write_files, write_study
from quads.files import ResultFileError

SETTINGS = Diagnostics(prompts=6, trained_prompts=3, samples_per_prompt=2, seeds=(4, 5), single_sequences=2)
EXPERIMENT = Experiment(name="tiny", title="t", arms=("bf16", "quads"), diagnostics=SETTINGS)


def finished(root, arm: str, seed: int):
    """A folder of quads.train as far as this stage reads it; masks select the last half of the channels."""
    run = resolve_run(EXPERIMENT, load_arm(arm), seed)
    model, train = root / f"model-{arm}-{seed}", root / f"train-{arm}-{seed}"
    tiny_model(1 + seed).save_pretrained(model)
    train.mkdir()
    masks = None
    if run.arm.rollout.rac:
        masks = root / f"masks-{seed}.safetensors"
        sizes = {"self_attn.qkv_proj": 64, "self_attn.o_proj": 128, "mlp.experts.w13": 64, "mlp.experts.w2": 32}
        save_file({f"model.layers.{i}.{k}": torch.arange(n) >= n // 2 for i in (0, 1) for k, n in sizes.items()}, masks)
    result = {"run_id": run.id, "checkpoint": str(model), "rac_masks": str(masks) if masks else None, "steps": 60}
    (train / "result.json").write_text(json.dumps(result))
    return run, train


def diagnose(root, arm: str, seed: int):
    run, train = finished(root, arm, seed)
    found, sized, out = trained.TrainedRun.load(run, train), trained.small(EXPERIMENT), root / f"out-{arm}-{seed}"
    generator = torch.Generator().manual_seed(0)
    prompts = [Prompt(tuple(torch.randint(2, 43, (5,), generator=generator).tolist())) for _ in range(8)]
    calibration = calibration_ids(None, prompts)
    capture.capture_all(
        found.modes, prompts, calibration, found.checkpoint, sized, out / "captures", start=FakeEngine,
        versions={"fake": "1"}, own_masks=found.own_masks, origin=found.origin,
    )  # fmt: skip
    context = Context(sized, [run.arm], found.checkpoint, out / "captures", modes=found.modes)
    write_study(trained.run_layers(context, found, calibration), context, out, "run_layers")
    write_study(trained.run_study(context, found), context, out, "run")
    return run, out


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")
    cases = [("bf16", 0), ("nvfp4_naive", 0), ("quads", 0), ("quads", 1)]
    return root, {case: diagnose(root, *case) for case in cases}


def test_small_takes_one_seed_and_fewer_prompts() -> None:
    settings = trained.small(EXPERIMENT).diagnostics
    assert (settings.prompts, settings.seeds, settings.layer_tokens) == (3, (4,), 0)
    assert settings.k == SETTINGS.k


def test_the_runs_own_masks_are_used(runs) -> None:
    root, found = runs
    _, out = found["quads", 0]
    (path,) = (out / "captures").glob("masks-*.safetensors")
    own = load_file(root / "masks-0.safetensors")
    used = load_file(path)
    assert set(used) == set(own) and all(torch.equal(used[k], own[k]) for k in own)
    layers = trained.read_table(out / "run_layers.csv")
    assert {r["masks"] for r in layers} == {"own"} and any(r["mask_overlap_share"] < 1 for r in layers)
    assert {r["masks"] for r in trained.read_table(found["bf16", 0][1] / "run_layers.csv")} == {"calibrated now"}


def test_manifest_names_run_and_step(runs) -> None:
    run, out = runs[1]["quads", 1]
    version = capture.load_manifest(out / "captures")["weight_version"]
    assert version["run_id"] == run.id and version["step"] == 60


def test_rows_and_terms(runs) -> None:
    for (arm, seed), (run, out) in runs[1].items():
        rows = trained.read_table(out / "run.csv")
        assert {(r["arm"], r["seed"], r["run_id"]) for r in rows} == {(arm, seed, run.id)}
        engines = [(r["engine"], r["trainer"]) for r in rows]
        assert len(engines) == {"bf16": 2, "nvfp4_naive": 2, "quads": 3}[arm]
        (own,) = [r for r in rows if r["engine"] == "own"]
        assert own["mean_token_abs_total"] == pytest.approx(own["mean_token_abs_d"], rel=1e-6)
        assert (own["mean_token_abs_delta_weight"] == 0) == (arm != "nvfp4_naive")
        terms = ("delta_weight", "delta_act", "delta_num")
        assert own["largest_term"] == max(terms, key=lambda t: own[f"mean_token_abs_{t}"])
        assert all(r["weights_different"] == 0 and r["sequences"] == 6 for r in rows)


def test_side_by_side(runs, tmp_path) -> None:
    folders = [out for _, out in runs[1].values()]
    studies = trained.collect(folders, None)
    source = trained.sources(folders)
    assert len(source["runs"]) == 4 and len(source["checkpoint_sha256"]) == 64
    for name, study in studies.items():
        write_files(study, source, tmp_path, name)
    assert len(trained.read_table(tmp_path / "trained.csv")) == 10
    text = (tmp_path / "trained.md").read_text()
    quads = next(line for line in text.splitlines() if line.startswith("| own | quads"))
    assert "±" in quads and "quads seed 1:" in text


def test_errors_name_what_is_missing(tmp_path) -> None:
    run, train = finished(tmp_path, "quads", 0)
    with pytest.raises(ConfigError, match="this configuration is"):
        trained.TrainedRun.load(resolve_run(EXPERIMENT, load_arm("bf16"), 0), train)
    (tmp_path / "masks-0.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"names .*masks-0\.safetensors, which is gone"):
        trained.TrainedRun.load(run, train)
    with pytest.raises(ResultFileError, match=r"run\.csv: missing"):
        trained.collect([tmp_path], None)
