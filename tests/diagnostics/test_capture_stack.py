"""Capture and decomposition through the real vLLM on two more MoE families (OLMoE, Mixtral), from a .jsonl of ids.

Guards, in every mode (bf16, w4a16, w4a4, w4a4+rac): the engine holds the trainer's weights bit for bit; in float32 the
two agree on the log-probs of the tokens that the engine sampled; routing is the trainer's up to near ties; the terms
add up; the engine's blocks are recorded where the trainer's are, and agree where nothing is quantized.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from other_moe import tiny_mixtral, tiny_olmoe
from tolerances import TOLERANCES

from quads.diagnostics.capture import load_dump, load_manifest

pytestmark = pytest.mark.stack
ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {"olmoe": (tiny_olmoe, 8), "mixtral": (tiny_mixtral, 4)}  # model, experts
ARMS = {"bf16": "bf16", "w4a16": "w4a16", "qat_only": "w4a4", "quads": "w4a4+rac-k0.5-block16-static-sumsq"}


def stage(*words: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quads.diagnose", *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]


@pytest.fixture(scope="module", params=FAMILIES)
def captured(request, tmp_path_factory) -> tuple[Path, int]:
    make, experts = FAMILIES[request.param]
    root = tmp_path_factory.mktemp(request.param)
    make(1).save_pretrained(root / "model")
    prompts = torch.randint(2, 43, (16, 9), generator=torch.Generator().manual_seed(0)).tolist()
    (root / "prompts.jsonl").write_text("\n".join(json.dumps({"input_ids": ids}) for ids in prompts))
    shutil.copytree(ROOT / "configs/arms", root / "configs/arms")
    sizes = {"prompts": 6, "samples_per_prompt": 2, "seeds": [0, 1], "single_sequences": 4, "layer_tokens": 64}
    experiment = {"name": "tiny", "title": request.param, "arms": list(ARMS), "diagnostics": sizes}
    (root / "configs/tiny.yaml").write_text(yaml.safe_dump(experiment))
    common = ("--experiment", root / "configs/tiny.yaml", "--model", root / "model")
    stage(
        "capture", *common, "--prompts", root / "prompts.jsonl", "--modes", *ARMS.values(), "--out", root / "captures"
    )
    for study in ("decomposition", "fig7"):
        stage(study, *common, "--captures", root / "captures", "--out", root / "study")
    return root, experts


def rows(root: Path, study: str) -> list[dict[str, str]]:
    return list(csv.DictReader((root / f"study/{study}.csv").read_text().splitlines()))


@pytest.mark.parametrize("mode", ARMS.values())
def test_engine_holds_the_trainers_weights(captured: tuple[Path, int], mode: str) -> None:
    weights = load_dump(captured[0] / "captures", mode).meta["weights"]
    assert weights["tensors"] == 12 and weights["different"] == 0


@pytest.mark.parametrize("mode", ARMS.values())
def test_every_log_prob_is_there_and_routing_where_asked(captured: tuple[Path, int], mode: str) -> None:
    root, experts = captured
    dump = load_dump(root / "captures", mode)
    mask = dump.tokens.mask
    for name in ("logp", "prefill", "repeat"):
        assert bool((torch.isfinite(dump.values[name]) == mask).all()), name
    known = torch.isfinite(dump.values["single"]).any(1)
    assert int(known.sum()) == 8
    routed = dump.routed
    assert routed is not None and routed.shape[2:] == (2, 2)
    inside = torch.arange(routed.shape[1])[None] < dump.tokens.length[:, None]
    assert bool(((routed >= 0).all(-1).all(-1) == (inside & known[:, None])).all()) and int(routed.max()) < experts


def test_manifest_says_weight_version_and_routing(captured: tuple[Path, int]) -> None:
    manifest = load_manifest(captured[0] / "captures")
    assert manifest["weight_version"] == {"checkpoint_sha256": manifest["checkpoint_sha256"], "step": 0}
    assert manifest["routed_experts"] == {mode: {"sequences": 24, "with_routing": 8} for mode in ARMS.values()}


@pytest.mark.parametrize("arm", ARMS)
def test_decomposition(captured: tuple[Path, int], arm: str) -> None:
    own = [r for r in rows(captured[0], "decomposition") if r["arm"] == arm]
    mean = {(r["seed"], r["term"]): float(r["mean_token"]) for r in own if r["mean_token"]}
    size = {(r["seed"], r["term"]): float(r["mean_token_abs"]) for r in own if r["mean_token_abs"]}
    peak = {(r["seed"], r["term"]): float(r["max_token_abs"]) for r in own if r["max_token_abs"]}
    for seed in ("0", "1"):
        terms = [mean[seed, f"delta_{t}"] for t in ("weight", "act", "num")]
        assert sum(terms) == pytest.approx(mean[seed, "total"], abs=1e-12)
        parts = [mean[seed, f"num_{t}"] for t in ("storage", "float32", "bf16", "decode")]
        assert sum(parts) == pytest.approx(mean[seed, "delta_num"], abs=1e-12)
        assert size[seed, "delta_weight"] == 0.0 and size[seed, "total"] > 1e-3
        # Engine and trainer in float32 on the same stored values: only rows on a rounding boundary differ.
        if arm in ("bf16", "w4a16"):
            assert size[seed, "delta_act"] == 0.0
            assert peak[seed, "num_float32"] <= TOLERANCES["diagnostics/num_float32_unrounded"].limit
        else:
            assert size[seed, "delta_act"] > 1e-3
            assert size[seed, "num_float32"] <= TOLERANCES["diagnostics/num_float32"].limit
    routing = {r["term"]: float(r["value"]) for r in own if r["level"] == "routing"}
    assert routing["share_token_layer_routing_differs"] <= TOLERANCES["diagnostics/routing_differs"].limit
    assert any(r["level"] == "not measured" and r["term"] == "of_kernel" for r in own)


def test_blocks_of_the_engine(captured: tuple[Path, int]) -> None:
    """Recorded at the trainer's places: without quantization they agree to bf16 rounding, with it they do not."""
    found = {
        (r["layer"], r["trainer"], r["rollout"]): float(r["mean"])
        for r in rows(captured[0], "fig7")
        if r["metric"] == "mean_token_rel_l2"
    }
    layers = [f"model.layers.{i}{part}" for i in (0, 1) for part in (".self_attn", ".mlp", "")]
    assert {key[0] for key in found} == set(layers) and len(found) == len(layers) * 4 * 3
    for layer in layers:
        assert 0 < found[layer, "bf16", "bf16"] <= TOLERANCES["diagnostics/blocks_bf16"].limit
        assert found[layer, "bf16", "w4a4"] > 3 * found[layer, "bf16", "bf16"]
