"""The rollout benchmark: pairing, phases, ratios and failures with stand-in engines; one run with real vLLM on CPU."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench_inputs import CONFIG, ROOT, toy

from quads.bench import rollout, rollout_model, rollout_plan, rollout_rows
from quads.bench.fleet import Fleet, Measurement, Sync, stop
from quads.bench.rollout_plan import Shape, engines
from quads.bench.roofline import layer_gemms
from quads.config import Runtime, load_arms, load_experiment
from quads.paper.ledger import Ledger
from quads.paper.rollout_bench import read_benches

FAKE = Path(__file__).with_name("fake_bench_engine.py")


def bench(tmp_path: Path, model: Path, *words: str, name: str = "toy") -> tuple[int, Path, list[dict]]:
    """Exit code, the file, and what the stand-ins were asked."""
    out, log = tmp_path / "throughput" / "rollout.json", tmp_path / "asked.jsonl"
    given = ["--experiment", str(ROOT / f"configs/{name}.yaml"), "--model", str(model), "--out", str(out), *words]
    args = rollout._parser().parse_args(given)
    experiment = load_experiment(name, ROOT / "configs")
    arms = load_arms(experiment, ROOT / "configs", more=True)
    code = rollout.run(experiment, arms, args, (sys.executable, str(FAKE), str(log)))
    return code, out, [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def made(out: Path, key: str) -> dict[str, set]:
    """mode -> what its rows say under `key`."""
    found: dict[str, set] = {}
    for row in json.loads(out.read_text())["rows"]:
        found.setdefault(row["mode"], set()).add(row.get(key))
    return found


SMALL = ("--batch", "4", "--prompt-tokens", "10", "--response-tokens", "6", "--rounds", "3")


def test_phases_are_separated_and_the_report_reads_the_file(tmp_path: Path, model: Path) -> None:
    code, out, _ = bench(tmp_path, model, "--modes", "fp8,w4a4+rac", *SMALL)
    assert code == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 * 3 * 3  # modes, rounds, phases
    fp8 = [r for r in rows if r["mode"] == "fp8"]
    # drift 1, 2, 3: prefill 1000 tokens/s, decode 100 tokens/s in the first round
    assert [r["tokens_per_s"] for r in fp8 if r["phase"] == "prefill"] == pytest.approx([1000, 500, 1000 / 3])
    assert [r["tokens_per_s"] for r in fp8 if r["phase"] == "decode"] == pytest.approx([100, 50, 100 / 3])
    assert [(r["seconds"], r["bytes"]) for r in fp8 if r["phase"] == "sync"] == [(0.010, 1000)] * 3
    assert {r["backend"] for r in rows} == {"emulated"}
    benches = read_benches(out.parent, Ledger(tmp_path))
    assert len(benches) == 1 and len(benches[0].rows) == len(rows)


def test_ratios_are_of_the_same_round(tmp_path: Path, model: Path) -> None:
    _, out, _ = bench(tmp_path, model, "--modes", "fp8,w4a4+rac,bf16", *SMALL)
    lines = [json.loads(line) for line in out.with_suffix(".details.jsonl").read_text().splitlines()]
    decode = {s["mode"]: s for s in lines if s["kind"] == "summary" and s["phase"] == "decode"}
    assert decode["w4a4+rac"]["over_fp8"] == pytest.approx(10 / 8)
    assert decode["w4a4+rac"]["over_bf16"] == pytest.approx(20 / 8)
    assert decode["fp8"]["median"] == pytest.approx(50)
    # quartiles of 33.3, 50, 100 are 41.7 and 75
    assert decode["fp8"]["spread"] == pytest.approx((75 - 125 / 3) / 50)
    assert [s["ready"]["seconds"] for s in lines if s["kind"] == "engine"] == [1.5] * 3
    assert "1.250" in out.with_suffix(".md").read_text()


def test_rounds_are_interleaved_and_alike(tmp_path: Path, model: Path) -> None:
    _, _, asked = bench(tmp_path, model, "--modes", "fp8,bf16,w4a4+rac", *SMALL)
    per_round = 3 * 3  # engines x (prefill, whole, sync)
    measured = asked[3:]  # one warm-up each
    assert len(measured) == 3 * per_round
    for i in range(3):
        turn = measured[i * per_round : (i + 1) * per_round]
        assert len({a["mode"] for a in turn}) == 3
        assert {a["seed"] for a in turn if a["do"] == "generate"} == {1 + 1000 * i}
        assert [a["mode"] for a in turn[::3]] == [a["mode"] for a in turn[2::3]]  # one engine's turn is not broken up
    assert [a.get("response") for a in measured[:3]] == [1, 6, None]


def test_failed_engines_are_left_out_with_all_their_numbers(tmp_path: Path, model: Path) -> None:
    code, out, _ = bench(tmp_path, model, "--modes", "fp8,w4a16,w4a4", *SMALL)
    assert code == 1
    assert {r["mode"] for r in json.loads(out.read_text())["rows"]} == {"fp8"}
    text = out.with_suffix(".md").read_text()
    assert "w4a16 is left out: RuntimeError: no such kernel" in text
    assert "w4a4 is left out: its process ended with code 3" in text


def test_nothing_is_written_when_no_engine_works(tmp_path: Path, model: Path) -> None:
    code, out, _ = bench(tmp_path, model, "--modes", "w4a16", *SMALL)
    assert code == 1 and not out.exists()


def test_a_silent_engine_is_given_up(tmp_path: Path, model: Path) -> None:
    words = ("--batch", "1", "--prompt-tokens", "99", "--response-tokens", "2", "--rounds", "1", "--answer-s", "1")
    began = time.monotonic()
    code, out, _ = bench(tmp_path, model, "--modes", "fp8,bf16", *words)
    assert code == 1 and time.monotonic() - began < 40
    assert "bf16 is left out: no answer within 1 s" in out.with_suffix(".md").read_text()


def test_time_limit_keeps_one_whole_round(tmp_path: Path, model: Path) -> None:
    code, out, _ = bench(tmp_path, model, "--modes", "fp8,bf16", *SMALL, "--limit-s", "0.001")
    rows = json.loads(out.read_text())["rows"]
    assert code == 0 and len(rows) == 2 * 3


def test_a_signal_keeps_whole_rounds(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turn, turns = Fleet._turn, []

    def stopping(*args) -> None:
        turns.append(args)
        if len(turns) == 4:  # the second engine of the second round
            signal.raise_signal(signal.SIGTERM)
        turn(*args)

    monkeypatch.setattr(Fleet, "_turn", stopping)
    before = signal.signal(signal.SIGTERM, stop)
    try:
        code, out, _ = bench(tmp_path, model, "--modes", "fp8,bf16", *SMALL)
    finally:
        signal.signal(signal.SIGTERM, before)
    rows = json.loads(out.read_text())["rows"]
    assert code == 0 and [r["phase"] for r in rows] == ["prefill", "decode", "sync"] * 2
    assert json.loads(out.with_suffix(".details.jsonl").read_text().splitlines()[0])["rounds"] == 1


def test_stock_engines_are_native_and_never_meet_the_emulation(tmp_path: Path, model: Path) -> None:
    _, out, _ = bench(tmp_path, model, "--modes", "w4a4+rac", "--stock", "bf16,fp8", "--together", *SMALL)
    rows = json.loads(out.read_text())["rows"]
    assert {(r["mode"], r["backend"]) for r in rows} == {
        ("w4a4+rac", "emulated"),
        ("bf16", "native"),
        ("fp8", "native"),
    }
    assert not [r for r in rows if r["backend"] == "native" and r["phase"] == "sync"]
    entries = rollout_rows.summarize(rows)
    assert all(s.over_fp8 is None and s.over_bf16 is None for s in entries if s.mode == "w4a4+rac")
    assert [s.over_bf16 for s in entries if s.mode == "fp8" and s.phase == "decode"] == [pytest.approx(2.0)]


def test_defaults_are_the_experiments_modes_and_shape(tmp_path: Path, model: Path) -> None:
    code, out, _ = bench(tmp_path, model, "--rounds", "1")
    experiment = load_experiment("toy", ROOT / "configs")
    settings, *lines = [json.loads(line) for line in out.with_suffix(".details.jsonl").read_text().splitlines()]
    grpo = experiment.grpo
    assert settings["shapes"] == [[experiment.runtime.max_sequences, grpo.max_prompt_tokens, grpo.max_response_tokens]]
    modes = {line["mode"] for line in lines if line["kind"] == "engine"}
    assert modes == {"bf16", "fp8", "w4a16", "w4a4", "w4a4+rac"} and code == 1  # the stand-in of w4a16 fails


def test_backend_and_graphs_are_the_experiments_and_every_row_says_them(tmp_path: Path, model: Path) -> None:
    runtime = load_experiment("gpu_medium", ROOT / "configs").runtime
    assert (runtime.rollout_backend, runtime.rollout_graphs) == ("triton", True)  # what this test is about
    words = ("--modes", "bf16,w4a4+rac", "--stock", "fp8", *SMALL)
    code, out, _ = bench(tmp_path, model, *words, name="gpu_medium")
    assert code == 0
    assert made(out, "rollout_backend") == {"bf16": {"triton"}, "w4a4+rac": {"triton"}, "fp8": {"vllm"}}
    assert set.union(*made(out, "rollout_graphs").values()) == {True}
    (read,) = read_benches(out.parent, Ledger(tmp_path))
    assert {(r.mode, r.rollout_backend, r.rollout_graphs) for r in read.rows} == {
        ("bf16", "triton", True), ("w4a4+rac", "triton", True), ("fp8", "vllm", True),
    }  # fmt: skip
    bench(tmp_path, model, *words, "--backend", "reference", "--no-graphs", name="gpu_medium")
    assert made(out, "rollout_backend")["bf16"] == {"reference"}
    assert set.union(*made(out, "rollout_graphs").values()) == {False}


@pytest.mark.parametrize("wanted", ["native", "cutlass"])
def test_fp4_units_serve_w4a4_and_triton_the_rest_as_in_training(tmp_path: Path, model: Path, wanted: str) -> None:
    words = ("--modes", "bf16,fp8,w4a4+rac", "--backend", wanted, "--no-graphs", *SMALL)
    code, out, _ = bench(tmp_path, model, *words, name="gpu_medium")
    assert code == 0
    assert made(out, "rollout_backend") == {"bf16": {"triton"}, "fp8": {"triton"}, "w4a4+rac": {wanted}}
    assert made(out, "backend") == {"bf16": {"emulated"}, "fp8": {"emulated"}, "w4a4+rac": {"native"}}


def test_modes_that_cannot_be_captured_are_left_out_with_the_reason(tmp_path: Path, model: Path, monkeypatch) -> None:
    # No arm's mode is one of them; what has none is stood in for.
    reason = "no kernel quantizes fp8"
    monkeypatch.setattr(rollout_plan, "not_capturable", lambda r: reason if r.activation == "fp8" else None)
    code, out, asked = bench(tmp_path, model, "--modes", "fp8,bf16", *SMALL, name="gpu_medium")
    assert code == 1 and {line["mode"] for line in asked} == {"bf16"}  # no engine was started for fp8
    said = json.loads(out.read_text())
    assert {row["mode"] for row in said["rows"]} == {"bf16"}
    assert list(said["left_out"]) == ["fp8"] and "no kernel quantizes fp8" in said["left_out"]["fp8"]
    assert "fp8 is left out: cannot be captured" in out.with_suffix(".md").read_text()
    assert read_benches(out.parent, Ledger(tmp_path))[0].rows
    lines = [json.loads(line) for line in out.with_suffix(".details.jsonl").read_text().splitlines()]
    assert [line["engine"] for line in lines if line["kind"] == "left out"] == ["fp8"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--shapes", "1x2"], "shape '1x2'"),
        (["--backend", "native"], "needs runtime.device=cuda"),
        (["--out", "{}/file/x.json"], "cannot be written"),
        (["--out", "{}/folder.json"], "it is a folder"),
        (["--model", "{}/nowhere"], "Give the folder of a Hugging Face checkpoint"),
        (["--model", "{}/folder.json"], "lacks the key(s) num_attention_heads"),
        (["--roofline", "B200"], "lacks a size that the roofline needs ('intermediate_size')"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    words: list,
    why: str,
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.json").mkdir()
    few = {key: CONFIG[key] for key in ("num_hidden_layers", "vocab_size")}
    (tmp_path / "folder.json" / "config.json").write_text(json.dumps(few))
    sizes = {key: value for key, value in CONFIG.items() if key != "moe_intermediate_size"}
    (model / "config.json").write_text(json.dumps(sizes))
    monkeypatch.setattr(rollout, "watch_parents", lambda: None)
    monkeypatch.setattr(rollout.signal, "signal", lambda *_: None)
    monkeypatch.setattr(Fleet, "start", lambda *_, **__: pytest.fail("an engine was started"))
    given = {"--experiment": str(ROOT / "configs/toy.yaml"), "--model": str(model), "--out": str(tmp_path / "o.json")}
    given |= {words[0]: words[1].format(tmp_path)}
    assert rollout.main([word for pair in given.items() for word in pair]) == 1
    assert why in caplog.text and "Traceback" not in caplog.text and "snakemake" not in caplog.text


@pytest.mark.parametrize(
    "words",
    [["--batch", "\u00b2"], ["--batch", "9" * 10], ["--shapes", ","], ["--modes", ""], ["--limit-s", "nan"],
     ["--answer-s", "inf"], ["--answer-s", "0"], ["--backend", "marlin"]],
)  # fmt: skip
def test_options_that_say_nothing_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        rollout._parser().parse_args(["--experiment", "x", "--model", "x", "--out", "x", *words])
    assert caught.value.code == 2


def test_roofline_rows_carry_their_name(tmp_path: Path, model: Path) -> None:
    _, out, _ = bench(tmp_path, model, "--modes", "fp8,w4a4+rac", "--roofline", "H200", *SMALL)
    model_rows = [r for r in json.loads(out.read_text())["rows"] if r["backend"] == "roofline"]
    assert {(r["mode"], r["phase"]) for r in model_rows} == {("fp8", "prefill"), ("fp8", "decode")}  # no FP4 units


def test_roofline_products_of_the_30b_model_are_those_of_the_kernel_model() -> None:
    config = {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
    assert rollout_model.gemms(config, 64) == list(layer_gemms(64).values())


def test_rounds_that_say_nothing_about_decoding_are_left_out_for_all() -> None:
    shape = Shape(2, 4, 3)
    measured = [Measurement("a", 0, shape, 1.0, 0.9, 1, 1), Measurement("b", 0, shape, 1.0, 2.0, 1, 1)]
    later = [Measurement(name, 1, shape, 1.0, 2.0, 1, 1) for name in "ab"]
    names = {name: {"mode": mode, "backend": "emulated"} for name, mode in (("a", "fp8"), ("b", "bf16"))}
    syncs = [Sync("a", 0, 1.0, 1, 1), Sync("a", 1, 2.0, 1, 1)]
    rows = rollout_rows.rows(measured + later, syncs, names)
    assert [(r["mode"], r["phase"]) for r in rows] == [
        ("fp8", "prefill"), ("fp8", "decode"), ("fp8", "sync"), ("bf16", "prefill"), ("bf16", "decode"),
    ]  # fmt: skip
    assert rows[1]["tokens_per_s"] == pytest.approx(4.0) and rows[2]["seconds"] == 2.0
    with pytest.raises(rollout_rows.TooShortError, match="response-tokens"):
        rollout_rows.rows(measured, [], names)


def test_a_fleet_leaves_no_process_behind(model: Path, tmp_path: Path) -> None:
    shapes_ = [Shape(1, 4, 2)]
    planned = engines(
        Runtime(), toy()[1], ["fp8", "bf16"], shapes_, model=model, masks=None, stock=(), receipts=tmp_path
    )  # fmt: skip
    with Fleet((sys.executable, str(FAKE), str(tmp_path / "log"))) as fleet:
        fleet.start(planned)
        processes = [worker._process for worker in fleet.workers]
        assert len(processes) == 2 and all(p.poll() is None for p in processes)
    assert [p.returncode for p in processes] == [0, 0]


SCRIPT = """
import sys
from pathlib import Path
from quads.config import Model
from quads.toy.model import make_model
make_model(Model(), seed=0).save_pretrained(sys.argv[1])
"""


@pytest.mark.stack
def test_real_engines(tmp_path: Path) -> None:
    """Two modes through vLLM on CPU: lengths beyond the checkpoint's positions, masks with every sync, receipts."""
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path / "model")], check=True, cwd=ROOT)
    out = tmp_path / "throughput" / "rollout.json"
    command = [
        *(sys.executable, "-m", "quads.bench.rollout", "--experiment", "configs/toy.yaml", "--model"),
        *(str(tmp_path / "model"), "--modes", "bf16,w4a4+rac", "--batch", "3", "--prompt-tokens", "60"),
        # Enough that decoding outlasts the prefill on a busy machine too: a round where it does not is left out.
        *("--response-tokens", "96", "--rounds", "2", "--out", str(out)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    (read,) = read_benches(out.parent, Ledger(tmp_path))
    assert [(r.mode, r.backend, r.rollout_backend, r.rollout_graphs, r.phase) for r in read.rows[::2]] == [
        (mode, "emulated", "reference", False, phase)
        for mode in ("bf16", "w4a4+rac")
        for phase in ("prefill", "decode", "sync")
    ]
    sizes = {r.mode: r.bytes for r in read.rows if r.phase == "sync"}
    # both send the same bf16 weights, RAC one byte more per channel of each of the four products of two layers
    assert sizes["w4a4+rac"] - sizes["bf16"] == 2 * (64 + 128 + 64 + 32)
    assert "emulated (torch)" in done.stdout
