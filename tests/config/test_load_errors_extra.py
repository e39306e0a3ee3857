"""Files that YAML or the file system would let pass silently or with a traceback."""

import pytest

from quads.config import ConfigError, load_arm, load_experiment, resolve_run
from quads.config.load import load_experiment as load


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"name: x\ntitle: t\narms: [a]\ngrpo: {steps: 3, steps: 60}\n", "'steps' stands twice"),
        (b"name: x\nname: x\n", "'name' stands twice"),
        ("name: x\ntitle: caf\u00e9\n".encode("latin-1"), "not UTF-8"),
    ],
)
def test_duplicate_keys_and_encodings_are_named(tmp_path, content, words):
    (tmp_path / "x.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        load("x", tmp_path)


def test_cosmetic_fields_do_not_move_a_run_and_others_do():
    toy, arm = load_experiment("toy"), load_arm("quads")
    base = resolve_run(toy, arm, 0).id
    same = [
        resolve_run(toy, arm.model_copy(update={"title": "another"}), 0),
        resolve_run(toy.model_copy(update={"grpo": toy.grpo.model_copy(update={"save_every": 7})}), arm, 0),
        resolve_run(toy.model_copy(update={"runtime": toy.runtime.model_copy(update={"memory_gib": 9.0})}), arm, 0),
    ]
    assert {r.id for r in same} == {base}
    assert resolve_run(toy.model_copy(update={"grpo": toy.grpo.model_copy(update={"lr": 1e-4})}), arm, 0).id != base
