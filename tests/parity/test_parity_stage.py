"""`python -m quads.parity` end to end: two real engines, backend triton (interpreter) against the reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_moe import tiny_model
from tolerances import TOLERANCES

pytestmark = [pytest.mark.stack, pytest.mark.long]
ROOT = Path(__file__).resolve().parents[2]


def test_backend_triton_against_the_reference(tmp_path):
    tiny_model(1).save_pretrained(tmp_path / "model")
    out = tmp_path / "parity.json"
    sizes = ["--prompts", "4", "--prompt-tokens", "6", "--response-tokens", "3"]
    child = subprocess.run(
        [sys.executable, "-m", "quads.parity", "--experiment", str(ROOT / "configs/toy.yaml"), "--arm", "quads",
         "--model", str(tmp_path / "model"), "--backend", "triton", *sizes, "--out", str(out)],
        env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert child.returncode == 0, child.stdout[-3000:] + child.stderr[-6000:]
    report = json.loads(out.read_text())
    engines = report["engines"]
    assert {n: e["receipt"]["execution"]["backend"] for n, e in engines.items()} == {
        "reference": "reference",
        "backend": "triton",
    }
    checked = engines["backend"]["receipt"]["backend_check"]
    assert [row["module"].rpartition(".")[2] for row in checked["layers"]] == ["qkv_proj", "o_proj", "experts"]
    assert engines["reference"]["receipt"]["backend_check"] is None
    assert report["log_probs"]["prefill"]["tokens"] == 12 and report["log_probs"]["decode"]["tokens"] > 0
    assert report["log_probs"]["prefill"]["mean"] <= TOLERANCES["triton_engine_logprob_mean"].limit
    assert report["failed"] == [] and report["device"] == "cpu"
