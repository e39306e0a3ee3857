"""What MLflow is told, without MLflow: synthetic results in, payload out."""

import json

import pytest
from made_up_results import PROBLEMS, STEPS, made_up_arms, made_up_experiment, write_run

from quads import track
from quads.comparison.differences import flatten
from quads.config import ConfigError, resolve_run
from quads.files import ResultFileError
from quads.integrations.mlflow import content_hash


@pytest.fixture
def written(tmp_path):
    experiment, arm = made_up_experiment(), made_up_arms()[3]
    train, evaluation = write_run(tmp_path, experiment, arm, 0)
    for engine in ("own", "bf16"):
        (evaluation / f"{engine}.jsonl").write_text('{"header": {}}\n')
    return experiment, resolve_run(experiment, arm, 0), train, evaluation


def test_payload_says_what_the_files_say(written):
    experiment, run, train, _evaluation = written
    payload = track.build_payload(*written)
    assert payload.key == "made_up/quads/seed0" and payload.name == run.id
    assert payload.params["arm.rollout.rac.k"] == "0.5" and payload.params["grpo.dual_clip"] == "null"
    assert payload.params["evaluation.samples_per_problem"] == str(experiment.evaluation.samples_per_problem)
    assert [step for step, _, _ in payload.steps] == list(range(STEPS + 1))
    assert payload.steps[0][2] == {"eval_accuracy": 0.50}
    assert [s for _, s, _ in payload.steps] == [2.0 * step for step in range(STEPS + 1)]
    assert payload.finals["eval.own.pass_at_1"] == pytest.approx(85.5 / PROBLEMS)
    assert payload.finals["eval.own.chain_code"] == payload.finals["eval.own.macro_average"] == 85.5 / PROBLEMS
    assert payload.finals["delta_weight.different"] == 0.0
    assert train / "history.jsonl" in payload.artifacts["train"]


def test_both_files_of_the_decomposition_are_artifacts(written):
    _experiment, _run, train, _evaluation = written
    result, names = json.loads((train / "result.json").read_text()), ("decomposition", "decomposition_layers")
    for name in names:
        (train / f"{name}.jsonl").write_text("")
    (train / "result.json").write_text(json.dumps(result | {name: f"{name}.jsonl" for name in names}))
    assert {train / f"{name}.jsonl" for name in names} <= set(track.build_payload(*written).artifacts["train"])


def test_content_follows_every_source_file(written):
    _experiment, _run, train, evaluation = written
    seen = {track.build_payload(*written).content}
    for path in (train / "history.jsonl", train / "result.json", evaluation / "result.json", evaluation / "own.jsonl"):
        before = path.read_text()
        path.write_text(before + "\n" if path.suffix == ".json" else before + '{"step": 13}\n')
        seen.add(track.build_payload(*written).content)
        path.write_text(before)
    assert len(seen) == 5


def test_results_of_another_run_or_without_records_are_refused(written):
    experiment, run, train, evaluation = written
    with pytest.raises(ConfigError, match="is of run 'quads-seed0"):
        track.build_payload(experiment, run.model_copy(update={"seed": 1}), train, evaluation)
    (evaluation / "own.jsonl").unlink()
    with pytest.raises(ResultFileError, match=r"own\.jsonl: missing\. Rebuild them with"):
        track.build_payload(*written)


def test_flatten_keeps_every_leaf():
    assert flatten({"a": {"b": None, "c": [1, 2]}, "d": True}) == {"a.b": "null", "a.c": "[1, 2]", "d": "True"}


def test_content_hash_depends_on_names_and_bytes(tmp_path):
    for name, text in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / name).write_text(text)
    assert len({content_hash([tmp_path / n]) for n in "abc"}) == 3


def test_tracking_switched_off_says_so_and_touches_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "without.yaml").write_text("name: without\ntitle: Without\narms: [bf16]\ntracking: {enabled: false}\n")
    for command in (["init"], ["log", "--arm", "bf16", "--seed", "0", "--train", "x", "--eval", "y"]):
        assert track.main([*command, "--experiment", "without.yaml", "--out", "marker.json"]) == 0
        said = json.loads((tmp_path / "marker.json").read_text())
        assert said == {"tracking": False, "why": "tracking.enabled is false in without.yaml"}
    assert not (tmp_path / "results").exists()
