"""Comparison of two engines' answers: what is equal, where they part, and which limits that passes."""

import argparse
import json
import math
from pathlib import Path

import pytest

from quads import parity
from quads.config import ConfigError, load_arm, load_experiment

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
LIMITS = {"mean": 0.02, "margin": 1.0}


def answers(tokens, decode, prefill, top=None):
    steps = [
        [{t: lp, t + 100: lp - 0.25} for t, lp in zip(*row, strict=True)] for row in zip(tokens, decode, strict=True)
    ]
    return {"tokens": tokens, "decode": decode, "prefill": prefill, "top": top or steps}


REFERENCE = answers([[1, 2, 3], [4, 5, 6]], [[-1.0, -1.0, -1.0]] * 2, [[-1.5, -1.0, -1.0]] * 2)


def test_equal_engines():
    report = parity.compare(REFERENCE, REFERENCE)
    assert report["tokens"] == {
        "sequences": 2, "equal_sequences": 2, "share_equal": 1.0, "first_difference": None, "largest_margin": 0.0,
        "outside_best": 0,
    }  # fmt: skip
    assert report["log_probs"]["prefill"] == {"tokens": 6, "not_finite": 0, "mean": 0.0, "max": 0.0}
    assert report["own"]["reference"]["mean"] == pytest.approx(1 / 6)
    assert parity.failures(report, LIMITS) == []


def test_decoding_is_compared_up_to_the_first_difference():
    other = answers([[1, 102, 9], [4, 5, 6]], [[-1.03, -7.0, -7.0], [-1.0, -1.0, -1.0]], [[-1.5, -1.0, -1.0]] * 2)
    report = parity.compare(REFERENCE, other)
    assert report["tokens"]["share_equal"] == pytest.approx(4 / 6) and report["tokens"]["first_difference"] == 1
    assert report["tokens"]["largest_margin"] == pytest.approx(0.25)
    assert report["log_probs"]["decode"]["tokens"] == 4
    assert report["log_probs"]["decode"]["max"] == pytest.approx(0.03)
    assert report["own"]["backend"]["tokens"] == 4  # beyond the difference its own tokens were not scored
    assert parity.failures(report, LIMITS) == []
    assert "the reference was sure: 0.25" in parity.failures(report, LIMITS | {"margin": 0.1})[0]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (answers([[1, 2, 3], [4, 5, 6]], [[-1.0] * 3] * 2, [[-1.5, -1.0, -1.3], [-1.5, -1.0, -1.0]]), "prefill: mean"),
        (
            answers([[1, 2, 3], [4, 5, 6]], [[-1.0] * 3, [-1.0, -1.0, math.nan]], REFERENCE["prefill"]),
            "decode: 1 of 6 log-probs are not finite",
        ),
        (
            answers([[1, 2, 50], [4, 5, 6]], [[-1.0] * 3] * 2, REFERENCE["prefill"]),
            "not even among the reference's best",
        ),
        (answers([[101, 2, 3], [104, 5, 6]], [[-1.0] * 3] * 2, REFERENCE["prefill"]), "decode: no token to compare"),
    ],
)
def test_a_passed_limit_is_said(other, said):
    assert said in " ".join(parity.failures(parity.compare(REFERENCE, other), LIMITS))


def test_the_stage_takes_the_experiments_backend_unless_told():
    args = argparse.Namespace(backend=None, graphs=None)
    experiment, arm = load_experiment("gpu_medium", CONFIGS), load_arm("quads", CONFIGS)
    runtime = parity.chosen_runtime(experiment, arm, args)
    assert (runtime.rollout_backend, runtime.rollout_graphs) == ("triton", True)
    args = argparse.Namespace(backend="native", graphs=False)
    runtime = parity.chosen_runtime(experiment, arm, args)
    assert (runtime.rollout_backend, runtime.rollout_graphs) == ("native", False)
    assert not parity.chosen_runtime(experiment, load_arm("fp8", CONFIGS), args).rollout_graphs
    batch = arm.rollout.rac.model_copy(update={"mask": "batch"})
    arm = arm.model_copy(update={"rollout": arm.rollout.model_copy(update={"rac": batch})})
    for given, why in (({"graphs": True}, "a batch mask needs"), ({"backend": "marlin"}, "known: reference, triton")):
        bad = argparse.Namespace(**{"backend": "triton", "graphs": False} | given)
        with pytest.raises(ConfigError, match=why):
            parity.chosen_runtime(experiment, arm, bad)


def test_the_report_is_written_and_decides_the_exit_code(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"vocab_size": 43}')
    (tmp_path / "model.safetensors").touch()
    worse = REFERENCE | {"prefill": [[-2.0, -1.0, -1.0]] * 2}
    for other, code in ((REFERENCE, 0), (worse, 1)):
        extra = {"receipt": {}, "seconds": {}}
        found = {"reference": REFERENCE | extra, "backend": other | extra}
        monkeypatch.setattr(parity, "engines", lambda *args, found=found: found)
        monkeypatch.setattr(parity, "prepare_environment", lambda runtime: None)
        monkeypatch.setattr(parity, "watch_parents", lambda: None)
        out = tmp_path / "out.json"
        words = ["--experiment", f"{CONFIGS}/toy.yaml", "--arm", "quads", "--model", str(tmp_path), "--out", str(out)]
        assert parity.main(words) == code
        report = json.loads(out.read_text())
        assert bool(report["failed"]) == bool(code) and report["schema"] == parity.SCHEMA
        assert report["versions"].keys() >= {"vllm", "torch", "triton"} and report["capability"] is None


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--model", "{}/nowhere"], "Give the folder of a Hugging Face checkpoint"),
        (["--model", "{}/bare"], "holds no .safetensors file"),
        (["--prompts", "0"], "--prompts 0: at least one"),
        (["--prompt-tokens", "-3"], "--prompt-tokens -3: at least one"),
        (["--response-tokens", "0"], "--response-tokens 0: at least one"),
        (["--masks", "{}/none"], "leave it away for random ones"),
        (["--out", "{}"], "it is a folder"),
        (["--backend", "triton"], "backend triton cannot run here: its kernels need a CUDA device"),
        (["--graphs"], "no CUDA graphs with backend reference"),
        (["--experiment", f"{CONFIGS}/toy_gpu.yaml"], "torch sees no CUDA device"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(tmp_path, monkeypatch, caplog, words, why):
    """Without a GPU and outside Triton's interpreter."""
    for name in ("model", "bare"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"vocab_size": 43}')
    (tmp_path / "model" / "model.safetensors").touch()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("quads.kernels.encode.INTERPRETED", False)
    monkeypatch.setattr(parity, "engines", lambda *args: pytest.fail("an engine was started"))
    monkeypatch.setattr(parity, "prepare_environment", lambda runtime: None)
    monkeypatch.setattr(parity, "watch_parents", lambda: None)
    given = ["--experiment", f"{CONFIGS}/toy.yaml", "--arm", "quads", "--model", str(tmp_path / "model")]
    assert parity.main([*given, "--out", str(tmp_path / "o.json"), *(word.format(tmp_path) for word in words)]) == 1
    assert why in caplog.text and "Traceback" not in caplog.text and "snakemake" not in caplog.text
