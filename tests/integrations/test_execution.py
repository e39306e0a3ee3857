"""How an engine executes: capture sizes, arguments, and what its receipt must say."""

import pytest

from quads.config import Evaluation, Runtime
from quads.integrations.vllm.bench import BenchEngine
from quads.integrations.vllm.execution import capture_sizes, execution_arguments, mismatch, serving_backend
from quads.integrations.vllm.generate import Engine

TRITON = {"device": "cuda", "rollout_backend": "triton"}


@pytest.mark.parametrize("most", [1, 2, 3, 10, 96, 512, 1000])
def test_every_decode_batch_has_a_graph_of_less_than_twice_its_size(most):
    sizes = capture_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[-1] == most
    for batch in range(1, most + 1):
        padded = min(s for s in sizes if s >= batch)
        assert padded < 2 * batch or padded == batch
    assert len(sizes) <= 2 * most.bit_length()


def test_eager_names_no_compilation():
    assert execution_arguments(False, [1, 2]) == {"enforce_eager": True}
    config = execution_arguments(True, [8, 1, 8])["compilation_config"]
    assert config == {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8]}


def engine(tmp_path, runtime):
    return Engine(tmp_path, {"weight": "bf16"}, mode="bf16", receipt=tmp_path / "r.json", runtime=runtime,
                  sampling=Evaluation(), max_tokens=8, max_model_len=24)  # fmt: skip


def test_evaluation_takes_backend_and_graphs_from_the_experiment(tmp_path):
    arguments = engine(tmp_path, Runtime(**TRITON, rollout_graphs=True, max_sequences=10))._arguments()
    assert arguments["hf_overrides"]["quantization_config"]["backend"] == "triton"
    assert not arguments["enforce_eager"]
    assert arguments["compilation_config"]["cudagraph_capture_sizes"] == [1, 2, 4, 8, 10]
    assert engine(tmp_path, Runtime())._arguments()["enforce_eager"]


def bench_engine(tmp_path, stock=False, **runtime):
    return BenchEngine(
        {"model": str(tmp_path), "quantization": {}, "mode": "bf16", "stock": stock, "overrides": {}, "max_tokens": 4,
         "receipt": str(tmp_path / "r.json"), "max_model_len": 16, "batches": [16, 4],
         "runtime": Runtime(device="cuda", **runtime).model_dump(mode="json")}
    )  # fmt: skip


def test_benchmark_engines_use_the_same_arguments(tmp_path):
    arguments = bench_engine(tmp_path, rollout_backend="triton", rollout_graphs=True)._arguments()
    assert arguments["compilation_config"] == execution_arguments(True, [4, 16])["compilation_config"]
    assert arguments["hf_overrides"]["quantization_config"]["backend"] == "triton"
    eager = bench_engine(tmp_path, rollout_backend="triton")._arguments()
    assert eager["enforce_eager"] and "compilation_config" not in eager
    fp4 = bench_engine(tmp_path, rollout_backend="native")._arguments()  # mode bf16: triton by rule
    assert fp4["hf_overrides"]["quantization_config"]["backend"] == "triton"


def test_a_benchmark_engine_says_what_its_receipt_says(tmp_path):
    engine = bench_engine(tmp_path, rollout_backend="native", rollout_graphs=True)
    engine.receipt = {"execution": {"backend": "triton", "engine_mode": "compilation NONE, CUDA graphs FULL"}}
    assert engine.execution() == {"rollout_backend": "triton", "rollout_graphs": True}
    engine.receipt["execution"]["engine_mode"] = "eager"
    assert engine.execution()["rollout_graphs"] is False
    stock = bench_engine(tmp_path, stock=True, rollout_backend="triton", rollout_graphs=True)
    assert stock.execution() == {"rollout_backend": "vllm", "rollout_graphs": True}


@pytest.mark.parametrize(
    ("execution", "said"),
    [
        ({"backend": "triton", "engine_mode": "eager"}, None),
        ({"backend": "reference", "engine_mode": "eager"}, "backend 'reference', asked for 'triton'"),
        (
            {"backend": "triton", "engine_mode": "compilation NONE, CUDA graphs FULL_DECODE_ONLY"},
            "rollout_graphs=False",
        ),
    ],
)
def test_a_receipt_of_another_execution_is_named(execution, said):
    found = mismatch({"execution": execution}, Runtime(**TRITON))
    assert found is None if said is None else said in found


def test_an_old_receipt_is_of_the_reference():
    assert mismatch({}, Runtime()) is None and mismatch({}, Runtime(**TRITON)) is not None


@pytest.mark.parametrize("wanted", ["native", "cutlass"])
def test_fp4_units_serve_w4a4_and_the_rest_is_triton_by_rule(wanted):
    assert [serving_backend(mode, wanted) for mode in ("w4a4", "w4a4+rac")] == [wanted] * 2
    assert [serving_backend(mode, wanted) for mode in ("bf16", "fp8", "w4a16")] == ["triton"] * 3
    assert [serving_backend("bf16", other) for other in ("reference", "triton")] == ["reference", "triton"]
    runtime = Runtime(device="cuda", rollout_backend=wanted)
    assert mismatch({"mode": "bf16", "execution": {"backend": "triton"}}, runtime) is None
    assert "asked for" in mismatch({"mode": "w4a4", "execution": {"backend": "triton"}}, runtime)


def test_an_eager_engine_where_graphs_were_asked_for_is_named():
    eager = {"execution": {"backend": "triton", "engine_mode": "eager"}}
    assert "asked for rollout_graphs=True" in mismatch(eager, Runtime(**TRITON, rollout_graphs=True))
