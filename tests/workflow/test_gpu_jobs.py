"""The scheduler for one GPU machine: order, retries, limits, what it does when everything fails, what it packs."""

import json
import sys
import tarfile
import time
from pathlib import Path

import pytest

from quads import paths
from quads.config import load_arms, load_experiment

sys.path.insert(0, str(Path(__file__).parents[2] / "workflow" / "scripts"))

import gpu_jobs
import gpu_plan
import gpu_results

Job = gpu_jobs.Job


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(gpu_jobs, "POLL_S", 0.02)
    monkeypatch.setattr(gpu_jobs, "SPACING_S", 0.0)


def job(root: Path, name: str, code: str = "", needs: tuple[Path, ...] = (), **more) -> Job:
    """A process that notes its name in order.txt, runs `code` and, unless that fails, writes its target."""
    target = root / f"{name}.target"
    text = f"from pathlib import Path; open({str(root / 'order.txt')!r}, 'a').write({name!r} + ' '); {code or '0'}; "
    return Job(name, [sys.executable, "-c", text + f"Path({str(target)!r}).write_text('x')"], target, needs, **more)


def schedule(root: Path, jobs: list[Job], slots: int = 1, seconds: float = 60.0) -> list[str]:
    (root / "log").mkdir(exist_ok=True)
    gpu_jobs.Scheduler(root, jobs, slots, seconds).run()
    order = root / "order.txt"
    return order.read_text().split() if order.exists() else []


def test_needs_come_first_and_finished_jobs_are_skipped(tmp_path):
    first = job(tmp_path, "first")
    second, third = job(tmp_path, "second", needs=(first.target,)), job(tmp_path, "third")
    third.target.write_text("from an earlier call")
    assert schedule(tmp_path, [second, third, first]) == ["first", "second"]
    state = json.loads((tmp_path / "log" / "state.json").read_text())
    assert [j["status"] for j in state["jobs"]] == ["done", "done", "done"]


def test_a_failed_job_is_tried_once_more_and_others_go_on(tmp_path):
    once = f"(Path({str(tmp_path / 'tried')!r}).exists() or (Path({str(tmp_path / 'tried')!r}).touch(), 1 / 0))"
    flaky, broken, fine = job(tmp_path, "flaky", once), job(tmp_path, "broken", "1 / 0"), job(tmp_path, "fine")
    after = job(tmp_path, "after", needs=(broken.target,))
    fine.trains = True
    order = schedule(tmp_path, [fine, flaky, broken, after])
    assert sorted(order) == ["broken", "broken", "fine", "flaky", "flaky"]
    assert [j.status for j in (flaky, broken, fine, after)] == ["done", "failed", "done", "left out"]


def test_four_failures_without_a_success_stop_everything(tmp_path):
    jobs = [job(tmp_path, f"run{i}", "1 / 0", trains=True) for i in range(8)]
    assert len(schedule(tmp_path, [job(tmp_path, "warmup", "1 / 0"), *jobs])) == 2 + 4


def test_a_job_over_its_limit_is_ended(tmp_path):
    slow = job(tmp_path, "slow", "__import__('time').sleep(60)", limit=0.3)
    start = time.monotonic()
    schedule(tmp_path, [slow])
    assert time.monotonic() - start < 20 and slow.status == "failed"


def test_late_trainings_do_not_start_but_evaluations_do(tmp_path):
    train, evaluate = job(tmp_path, "train", trains=True), job(tmp_path, "evaluate")
    assert schedule(tmp_path, [train, evaluate], seconds=-1.0) == ["evaluate"]
    assert train.status == "left out"


def test_never_more_than_the_slots(tmp_path):
    count = f"p = Path({str(tmp_path)!r}); assert len(list(p.glob('*.on'))) < 2"
    body = "{count}; (p / '{n}.on').touch(); __import__('time').sleep(0.2); (p / '{n}.on').unlink()"
    jobs = [job(tmp_path, f"j{n}", body.format(count=count, n=n)) for n in range(5)]
    schedule(tmp_path, jobs, slots=2)
    assert [j.status for j in jobs] == ["done"] * 5 and all(j.tries == 1 for j in jobs)


def test_plan_keeps_the_order_of_preference(tmp_path):
    jobs = gpu_jobs.plan(["toy_gpu:bf16,quads:0", "gpu_medium:quads", "toy_gpu:fp8,quads:0,1"], True, tmp_path)
    trains = [j.name for j in jobs if j.trains]
    assert trains == [
        "train toy_gpu bf16 0", "train toy_gpu quads 0", "train gpu_medium quads 0", "train toy_gpu fp8 0",
        "train toy_gpu fp8 1", "train toy_gpu quads 1",
    ]  # fmt: skip
    assert len({j.target for j in jobs}) == len(jobs) == 3 + 3 + 1 + 2 * 6
    by_name = {j.name: j for j in jobs}
    assert by_name["evaluate toy_gpu fp8 1"].needs[0] == by_name["train toy_gpu fp8 1"].target
    model = paths.model_dir(load_experiment("toy_gpu"), tmp_path / "results") / "manifest.json"
    assert by_name["train toy_gpu bf16 0"].needs == (model,) == (by_name["warmup toy_gpu"].target,)


def test_unknown_words_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="toy_gpu has no"):
        gpu_jobs.plan(["toy_gpu:nothing"], False, tmp_path)
    with pytest.raises(SystemExit, match=r"\['9'\]"):
        gpu_jobs.plan(["toy_gpu:bf16:9"], False, tmp_path)


def test_what_comes_back(tmp_path):
    run = tmp_path / "results" / "toy_gpu" / "train" / "bf16-seed0-abc"
    evaluated = tmp_path / "results" / "toy_gpu" / "eval" / "bf16-seed0-abc-def"
    for folder in (run, evaluated, tmp_path / "log", tmp_path / "results" / "toy_gpu" / "checkpoints" / "x"):
        folder.mkdir(parents=True)
    rows = [{"step": 0, "eval_accuracy": 0.5}, {"step": 1, "reward": 1, "gap_mean": 0.25, "seconds": 2.0},
            {"step": 2, "reward": 1, "gap_mean": 0.75, "seconds": 4.0, "eval_accuracy": 0.875}]  # fmt: skip
    (run / "history.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (run / "result.json").write_text(json.dumps({"delta_weight": {"different": 0}}))
    (run / "train.log").write_text("x" * 100_000)
    (tmp_path / "results" / "toy_gpu" / "checkpoints" / "x" / "model.safetensors").write_text("large")
    (evaluated / "own.jsonl").write_text("{}\n")
    (evaluated / "result.json").write_text(json.dumps({"engines": {"own": {"pass_at_1": 0.9}}}))
    gpu_results.pack(tmp_path, tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "results.tar.gz") as archive:
        sizes = {m.name: m.size for m in archive.getmembers()}
    inside = "results/toy_gpu/train/bf16-seed0-abc"
    assert sizes[f"{inside}/train.log"] == gpu_results.LOG_TAIL
    assert {f"{inside}/history.jsonl", f"{inside}/result.json"} <= sizes.keys()
    assert not any("safetensors" in name for name in sizes)
    with tarfile.open(tmp_path / "out" / "records.tar.xz") as archive:
        assert archive.getnames() == ["results/toy_gpu/eval/bf16-seed0-abc-def/own.jsonl"]
    line = gpu_results.table(tmp_path).splitlines()[1].split()
    assert line == ["toy_gpu/bf16-seed0-abc", "2", "0.500", "0.875", "0.900", "-", "0.5000", "4.00", "0"]


def seen(root: Path, name: str) -> str:
    """Code that notes the GPUs which a job sees, and when it was there."""
    return (
        f"import os, time; a = time.time(); time.sleep(0.3); open({str(root / 'seen.txt')!r}, 'a').write("
        f"'{name} ' + repr(os.environ['CUDA_VISIBLE_DEVICES']) + ' ' + str(a) + ' ' + str(time.time()) + chr(10))"
    )


def test_jobs_spread_over_gpus_and_exclusive_ones_are_alone(tmp_path):
    shares = {"run0": {}, "run1": {}, "alone": {"share": 1.0}, "both": {"gpus": 2, "share": 1.0}, "none": {"gpus": 0}}
    jobs = [job(tmp_path, name, seen(tmp_path, name), **more) for name, more in shares.items()]
    (tmp_path / "log").mkdir()
    gpu_jobs.Scheduler(tmp_path, jobs, 4, 60.0, gpus=2).run()
    rows = [line.split() for line in (tmp_path / "seen.txt").read_text().splitlines()]
    at = {name: (devices.strip("'"), float(a), float(b)) for name, devices, a, b in rows}
    assert {at["run0"][0], at["run1"][0]} == {"0", "1"}
    assert at["both"][0] == "0,1" and at["none"][0] == ""
    for name in ("alone", "both"):
        mine, start, end = at[name]
        for other, (devices, a, b) in at.items():
            shared = set(mine.split(",")) & set(devices.split(",")) - {""}
            assert other == name or not shared or b <= start or a >= end, (name, other)


def test_more_gpus_than_there_are_is_left_out_and_one_gpu_is_not_hidden(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    one, two = job(tmp_path, "one", seen(tmp_path, "one")), job(tmp_path, "two", gpus=2)
    assert schedule(tmp_path, [two, one]) == ["one"]
    assert two.status == "left out" and "'7'" in (tmp_path / "seen.txt").read_text()


def test_jobs_of_a_file(tmp_path):
    listed = tmp_path / "jobs.json"
    listed.write_text(json.dumps([{"name": "a", "command": ["true"], "target": "x/y.json", "needs": ["z"], "gpus": 2}]))
    [found] = gpu_plan.more_jobs(listed, tmp_path)
    assert (found.target, found.needs, found.gpus) == (tmp_path / "x/y.json", (tmp_path / "z",), 2)
    listed.write_text(json.dumps([{"name": "a", "command": ["true"], "target": "x", "gpu": 2}]))
    with pytest.raises(SystemExit, match="unknown \\['gpu'\\]; known: name, command"):
        gpu_plan.more_jobs(listed, tmp_path)


def test_the_plan_of_the_real_size_is_a_list_of_jobs(tmp_path):
    import real_size

    listed = tmp_path / "jobs.json"
    listed.write_text(json.dumps(real_size.plan(tmp_path, tmp_path / "models", 2, 48, 16, 4)))
    jobs = gpu_plan.more_jobs(listed, tmp_path)
    targets = {j.target for j in jobs}
    assert len(targets) == len(jobs) > 10
    assert {need for j in jobs for need in j.needs} <= targets
    assert all(j.gpus == 2 for j in jobs if j.name.startswith("train-"))
    assert {j.name: j.gpus for j in jobs if j.name.startswith("scale-")} == {"scale-1": 1, "scale-2": 2}
    wide = real_size.plan(tmp_path, tmp_path / "models", 6, 48, 48, 4)
    assert [j["gpus"] for j in wide if j["name"].startswith("scale-")] == [1, 2, 4, 6]


def test_the_real_size_script_writes_its_prompts_and_a_list(tmp_path, monkeypatch, capsys):
    import real_size

    monkeypatch.setattr(sys, "argv", ["real_size.py", str(tmp_path), "--gpus", "2", "--only", "preflight"])
    real_size.main()
    jobs = json.loads(capsys.readouterr().out)
    assert [job["name"] for job in jobs] == ["preflight", "preflight-train"]
    rows = [json.loads(line) for line in (tmp_path / real_size.PROMPTS).read_text().splitlines()]
    assert {(len(row["input_ids"]), len(row["response_ids"])) for row in rows} == {(16, 144)} and len(rows) == 8
    assert str(tmp_path / real_size.PROMPTS) in jobs[0]["command"]


def test_every_training_of_the_real_size_is_one_that_starts(tmp_path):
    import argparse

    import real_size

    from quads.bench import real_train

    def folders(name):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
        return tmp_path / name

    model, data = folders("model"), folders("data")
    jobs = [j for j in real_size.plan(tmp_path, tmp_path, 2, 48, 16, 4) if j["name"].startswith(("train-", "scale-"))]
    for job in jobs:
        words = dict(zip(job["command"][3::2], job["command"][4::2], strict=False))
        args = argparse.Namespace(
            experiment=Path(words["--experiment"]),
            arm=words["--arm"],
            model=model,
            data=data,
            steps=int(words["--steps"]) if "--steps" in words else None,
            profile=int(words["--profile"]),
            set=job["command"][job["command"].index("--set") + 1 :],
        )
        run, steps, more = real_train.checked(args)
        assert (run.runtime.gpus_per_node, more) == (job["gpus"], []) and steps >= args.profile


def test_the_options_of_the_real_size_say_what_they_are(monkeypatch, capsys):
    import real_size

    monkeypatch.setattr(sys, "argv", ["real_size.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        real_size.main()
    said = " ".join(capsys.readouterr().out.partition("positional arguments:")[2].split())
    for text in ("--gpus GPUS GPUs of", "--layers LAYERS layers of", "--train-layers TRAIN_LAYERS first layers"):
        assert text in said


def test_the_rollouts_of_the_real_size_leave_nothing_out(tmp_path):
    import real_size

    from quads.bench import rollout, rollout_plan

    experiment = load_experiment("real_size")
    jobs = [j for j in real_size.plan(tmp_path, tmp_path / "models", 2, 48, 16, 4) if j["name"].startswith("rollout-")]
    assert len(jobs) == len(real_size.ENGINES)
    named = {mode for modes, _ in real_size.ENGINES.values() for mode in modes.split(",")} - {"none"}
    assert named == {"bf16", "fp8", "w4a16", "w4a4", *(f"w4a4+rac:{k}" for k in ("12.5", "25", "50", "100"))}
    for job in jobs:
        args = rollout._parser().parse_args(job["command"][3:])
        runtime = rollout_plan.chosen_runtime(experiment, args.backend, args.graphs)
        assert (runtime.rollout_backend, runtime.rollout_graphs) == ("triton", True)
        modes = [] if args.modes == ("none",) else args.modes
        assert rollout_plan.refused(modes, load_arms(experiment, more=True), runtime) == {}
        assert [rollout_plan.shape(word) for word in args.shapes]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "no list of jobs"),
        ("{}", "need a JSON list"),
        ("[1]", "need a JSON list"),
        ('[{"name": "a", "command": ["true"]}]', "job 1 \\('a'\\) lacks target; every job has name, command, target"),
        ('[{"name": "a/b", "command": ["true"], "target": "x"}]', "name='a/b' has to be a text without /"),
        ('[{"name": "a", "command": ["true"], "target": "x", "gpus": "two"}]', "gpus='two'"),
        ('[{"name": "a", "command": ["true"], "target": "x", "share": 1.5}]', "share=1.5 has to be a number above 0"),
        ('[{"name": "a", "command": "true", "target": "x"}]', "command='true' has to be a list"),
        ('[{"name": "a", "command": ["true"], "target": "x", "limit": NaN}]', "limit=nan"),
        ('[{"name": "\\ud800", "command": ["true"], "target": "x"}]', "name="),
        (None, "No such file"),
    ],
)
def test_a_bad_list_of_jobs_is_named(tmp_path, text, why):
    if text is not None:
        (tmp_path / "jobs.json").write_text(text)
    with pytest.raises(SystemExit, match=why):
        gpu_plan.more_jobs(tmp_path / "jobs.json", tmp_path)


@pytest.mark.parametrize("words", [["/no/such/program"], ["echo", "\0"]])
def test_a_program_that_does_not_exist_fails_its_job_alone(tmp_path, words):
    broken, fine = Job("broken", words, tmp_path / "x"), job(tmp_path, "fine")
    assert schedule(tmp_path, [broken, fine]) == ["fine"]
    assert (broken.status, fine.status) == ("failed", "done")


def call(monkeypatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_jobs.py", *map(str, words)])
    return gpu_jobs.main()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["wait", "--seconds", 1, "--out", "{}/out"], "no scheduler was started here"),
        (["stop"], "no scheduler was started here"),
        (["start"], "nothing to do"),
        (["start", "nothing"], "unknown experiment 'nothing'"),
        (["start", "toy_gpu:bf16:x"], r"toy_gpu has no \['x'\]"),
        (["start", "toy_gpu:bf16:0:1"], "give EXPERIMENT"),
        (["start", "--jobs", "{}/none.json"], "No such file"),
    ],
)
def test_words_that_cannot_be_followed_are_one_line(tmp_path, monkeypatch, words, why):
    with pytest.raises(SystemExit, match=why):
        call(monkeypatch, tmp_path / "root", *(str(word).format(tmp_path) for word in words))
    assert not (tmp_path / "root").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("seconds", ["nan", "-1", "x"])
def test_seconds_that_are_none_are_refused(tmp_path, monkeypatch, capsys, seconds):
    with pytest.raises(SystemExit) as caught:
        call(monkeypatch, tmp_path, "wait", f"--seconds={seconds}", "--out", tmp_path / "out")
    assert caught.value.code == 2 and "is no number of seconds" in capsys.readouterr().err


def test_folders_that_cannot_be_used_are_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    listed = tmp_path / "jobs.json"
    listed.write_text('[{"name": "a", "command": ["true"], "target": "x"}]')
    with pytest.raises(SystemExit, match=r"gpu_jobs\.py start: .*Not a directory"):
        call(monkeypatch, tmp_path / "file", "start", "--jobs", listed)
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "scheduler.pid").write_text("no number")
    with pytest.raises(SystemExit, match=r"gpu_jobs\.py wait: .*exists"):
        call(monkeypatch, tmp_path, "wait", "--seconds", 1, "--out", tmp_path / "file")


def test_a_scheduler_that_ended_before_it_said_anything(tmp_path, monkeypatch, capsys):
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "scheduler.pid").write_text("no number")
    (tmp_path / "log" / "machine.csv").touch()  # opened, not yet written
    assert call(monkeypatch, tmp_path, "wait", "--seconds", 1, "--out", tmp_path / "out") == 1
    assert "scheduler.log: it did not get so far" in capsys.readouterr().out
    assert call(monkeypatch, tmp_path, "stop") == 0 and "has ended already" in capsys.readouterr().out


def test_unfinished_and_damaged_results_are_shown_as_such(tmp_path):
    for name, result in (("a-seed0-x", None), ("b-seed0-x", "{")):
        run = tmp_path / "results" / "toy" / "train" / name
        run.mkdir(parents=True)
        (run / "history.jsonl").write_text('{"reward": 1, "gap_mean": null, "seconds": 2.0}\n{"reward": 1, "gap')
        if result is not None:
            (run / "result.json").write_text(result)
    rows = [line.split() for line in gpu_results.table(tmp_path).splitlines()[1:]]
    assert rows == [[f"toy/{name}", "1", "-", "-", "-", "-", "-", "2.00", "-"] for name in ("a-seed0-x", "b-seed0-x")]
    assert "a-seed0:0" in gpu_results.progress(tmp_path)


def test_a_number_that_is_null_shows_no_other_step_in_its_place(tmp_path):
    run = tmp_path / "results" / "toy" / "train" / "a-seed0-x"
    run.mkdir(parents=True)
    steps = [{"eval_accuracy": None}, {"reward": 1, "gap_mean": 0.1, "seconds": 2.0}]
    steps += [{"reward": 1, "gap_mean": None, "seconds": None}, {"eval_accuracy": 0.5}, {"eval_accuracy": 0.9}]
    (run / "history.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    for engines in (None, {"own": None, "bf16": {"pass_at_1": 0.25}}):
        evaluated = tmp_path / "results" / "toy" / "eval" / "a-seed0-x-1"
        evaluated.mkdir(parents=True, exist_ok=True)
        (evaluated / "result.json").write_text(json.dumps({"engines": engines}))
        cells = gpu_results.table(tmp_path).splitlines()[1].split()[1:]
        assert cells == ["2", "-", "0.900", "-", "0.250" if engines else "-", "-", "2.00", "-"]


def test_the_whole_checkpoint_is_trained_where_all_layers_are_asked_for(tmp_path):
    import real_size

    jobs = real_size.plan(tmp_path, tmp_path / "models", 4, 48, 48, 4)
    assert [j["name"] for j in jobs if j["name"].startswith(("model", "preflight"))] == [
        "model", "model-scale", "preflight",
    ]  # fmt: skip
    assert "train-quads" in [j["name"] for j in jobs]


@pytest.mark.parametrize(("train", "scale", "made"), [(16, 16, ["model", "model-train"]), (48, 48, ["model"])])
def test_equal_depths_are_one_checkpoint(tmp_path, train, scale, made):
    import real_size

    jobs = real_size.plan(tmp_path, tmp_path / "models", 2, 48, train, scale)
    assert [j["name"] for j in jobs if j["name"].startswith("model")] == made
    targets = [j["target"] for j in jobs]
    assert len(set(targets)) == len(targets)
