"""The plan of the rollout benchmark: shapes, modes, and that its engines are those of training."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_inputs import CONFIG, ROOT, toy

from quads.bench.rollout_plan import Shape, cache_mib, chosen_runtime, engines, mode_of, refused, shape, shapes
from quads.config import ConfigError, Rac, Runtime, load_arms, load_experiment, resolve_run
from quads.integrations.verl.overrides import quantization_config


@pytest.mark.parametrize("backend", ["reference", "triton", "native", "cutlass"])
def test_every_engine_is_the_one_of_training(tmp_path: Path, model: Path, backend: str) -> None:
    experiment, arms = toy(device="cuda", rollout_backend=backend)
    first = {arm.rollout.mode: arm for arm in reversed(arms)}
    planned = engines(
        experiment.runtime, arms, tuple(first), [Shape(1, 4, 2)], model=model, masks=None, stock=(), receipts=tmp_path
    )
    assert len(planned) == len(first) == 5
    for engine in planned:
        assert engine.quantization == quantization_config(resolve_run(experiment, first[engine.mode], 0), None)


def test_what_is_left_out_is_what_training_refuses() -> None:
    experiment, arms = toy(device="cuda", rollout_backend="triton", rollout_graphs=True)
    quads = next(arm for arm in arms if arm.name == "quads")
    batch = quads.rollout.model_copy(update={"rac": Rac(mask="batch")})
    for arm in (*(a for a in arms if a.name != "quads"), quads, quads.model_copy(update={"rollout": batch})):
        try:
            resolve_run(experiment, arm, 0)
            trains = True
        except ConfigError:
            trains = False
        assert bool(refused([arm.rollout.mode], [arm], experiment.runtime)) != trains, arm.name
    eager = experiment.runtime.model_copy(update={"rollout_graphs": False})
    assert refused(["fp8", "bf16"], arms, eager) == {}


@pytest.mark.parametrize(
    ("runtime", "backend", "graphs", "why"),
    [
        ({"device": "cpu"}, "triton", None, "needs runtime.device=cuda"),
        ({"device": "cuda"}, None, True, "another rollout_backend than reference"),
        ({"device": "cuda", "rollout_backend": "triton", "rollout_graphs": True}, "reference", None, "--no-graphs"),
        ({"device": "cuda", "engine_dtype": "float32"}, "native", None, "engine_dtype is float32"),
    ],
)
def test_what_training_refuses_is_refused(runtime: dict, backend: str | None, graphs: bool | None, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        chosen_runtime(toy(**runtime)[0], backend, graphs)


def test_no_backend_is_asked_of_stock_engines_alone() -> None:
    chosen = chosen_runtime(toy(device="cuda")[0], None, True, plugin=False)
    assert chosen.rollout_graphs and chosen.device == "cuda"


def test_modes_come_from_arms_and_unknown_ones_are_refused() -> None:
    arms = load_arms(load_experiment("toy", ROOT / "configs"), ROOT / "configs", more=True)
    quads = next(arm for arm in arms if arm.name == "quads")
    mode, skip = mode_of("w4a4+rac", arms)
    assert mode.rac is not None and mode.rac.k == quads.rollout.rac.k and skip == quads.keep_high_precision
    assert mode_of("fp8", [a for a in arms if a.name == "bf16"])[0].name == "fp8"
    with pytest.raises(ConfigError, match="known: bf16, fp8, w4a16, w4a4, w4a4\\+rac"):
        mode_of("w8a8", arms)


@pytest.mark.parametrize(
    "word", ["\u00b2x1x2", "1x\u0663x2", "1x2", "1x2x3x4", "x1x2", "-1x2x3", "1x2x3\n", "9" * 5000 + "x1x2"]
)
def test_a_malformed_shape_is_one_error(word: str) -> None:
    with pytest.raises(ConfigError, match="BATCHxPROMPTxRESPONSE"):
        shape(word)


def test_shapes_are_checked_and_combined() -> None:
    assert shape("64x512x128") == Shape(64, 512, 128)
    assert shapes([1, 2], [8], [4, 5]) == [Shape(1, 8, 4), Shape(1, 8, 5), Shape(2, 8, 4), Shape(2, 8, 5)]
    with pytest.raises(ConfigError, match="response >= 2"):
        shapes([1], [8], [1])


def test_engines_get_room_for_the_largest_shape(model: Path, tmp_path: Path) -> None:
    # K and V, 2 layers, 2 heads of 32, 2 bytes: 512 bytes a token; 64 sequences of 6 blocks of 128; a quarter more
    assert cache_mib(CONFIG, [Shape(64, 512, 128), Shape(1, 8, 4)], 2) == 30
    runtime, arms = Runtime(device="cuda", rollout_backend="triton"), toy()[1]
    wanted = [Shape(64, 512, 128)]
    (engine,) = engines(
        runtime, arms, ["w4a4+rac"], wanted, model=model, masks=None, stock=(), receipts=tmp_path
    )  # fmt: skip
    assert engine.runtime["max_sequences"] == 64 and engine.max_model_len == 640
    assert engine.overrides == {"max_position_embeddings": 640}  # the checkpoint has 64
    assert engine.quantization["rac_masks"] == "sync" and engine.quantization["backend"] == "triton"
    with pytest.raises(ConfigError, match="no such file of masks"):
        engines(
            runtime, arms, ["bf16"], wanted, model=model, masks=tmp_path / "none", stock=(), receipts=tmp_path
        )  # fmt: skip
