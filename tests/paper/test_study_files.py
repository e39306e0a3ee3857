"""Studies and benchmarks on disk: absent, broken, of something else; and the intervals over a few seeds."""

import json
import math

import pytest
from made_up_studies import bench_file, k_sweep_rows, write_study

from quads.evaluation.stats import Interval
from quads.files import ResultFileError
from quads.paper.ledger import Ledger
from quads.paper.rollout_bench import ratio, read_benches, read_kernel_bars
from quads.paper.study_files import Moments, over_seeds, paired, read_study, student_quantile, welch


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path)


def test_an_absent_study_is_none_and_leaves_no_source(tmp_path, ledger):
    assert read_study(tmp_path / "diagnose", "k_sweep", "made_up", ledger) is None
    assert ledger.entries() == []


def test_a_study_is_read_with_its_source(tmp_path, ledger):
    write_study(tmp_path / "diagnose-0123456789", "k_sweep", k_sweep_rows())
    study = read_study(tmp_path / "diagnose-0123456789", "k_sweep", "made_up", ledger)
    assert study.by_seed("max_token_abs_d", k=0.5, granularity="channel") == pytest.approx({0: 0.99, 1: 1.0, 2: 1.01})
    (entry,) = ledger.entries()
    assert (entry.key, entry.config_hash, entry.commit) == ("study-k_sweep", "0123456789", "1" * 40)
    assert list(entry.files) == [f"diagnose-0123456789/k_sweep.{kind}" for kind in ("json", "csv")]
    with pytest.raises(ValueError, match="has two rows of seed 0"):
        study.by_seed("max_token_abs_d", k=0.5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"experiment": "toy"}, "is study 'k_sweep' of experiment 'toy', expected 'k_sweep' of 'made_up'"),
        ({"study": "masks"}, "is study 'masks'"),
        ({"rows": 3}, r"39 rows, k_sweep.json says 3"),
    ],
)
def test_a_study_of_something_else_is_refused(tmp_path, ledger, changes, said):
    write_study(tmp_path, "k_sweep", k_sweep_rows(), **changes)
    with pytest.raises(ResultFileError, match=said):
        read_study(tmp_path, "k_sweep", "made_up", ledger)


def test_a_broken_study_is_an_error_not_an_absent_one(tmp_path, ledger):
    write_study(tmp_path, "k_sweep", k_sweep_rows())
    (tmp_path / "k_sweep.csv").unlink()
    with pytest.raises(ResultFileError, match=r"k_sweep\.csv: missing"):
        read_study(tmp_path, "k_sweep", "made_up", ledger)
    (tmp_path / "k_sweep.json").write_text('{"study": ')
    with pytest.raises(ResultFileError, match="truncated or damaged"):
        read_study(tmp_path, "k_sweep", "made_up", ledger)


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (30, 2.04227)])
def test_students_quantile_is_the_tabulated_one(freedom, quantile):
    assert student_quantile(0.975, freedom) == pytest.approx(quantile, rel=1e-5)


def test_intervals_over_seeds():
    found = over_seeds([1.0, 2.0, 3.0], 0.95)
    assert (found.estimate, found.high - found.estimate) == pytest.approx((2.0, 4.30265 / math.sqrt(3)))
    assert over_seeds([1.0], 0.95) == Interval(1.0, -math.inf, math.inf) and over_seeds([], 0.95) is None
    # the same shift for every seed: the paired interval has no width, however far apart the seeds are
    same = paired({0: 1.0, 1: 5.0, 2: 9.0}, {0: 0.5, 1: 4.5, 2: 8.5, 3: 7.0}, 0.95)
    assert (same.low, same.estimate, same.high) == pytest.approx((0.5, 0.5, 0.5))


def test_welch_by_hand():
    # variances 1/3 and 4/3: freedom (5/3)^2 / ((1/9)/2 + (16/9)/2) = 2.94, rounded down to 2
    found = welch(Moments(3.0, 1.0, 3), Moments(1.0, 2.0, 3), 0.95)
    assert found.estimate == 2.0 and found.high - 2.0 == pytest.approx(4.30265 * math.sqrt(5 / 3), rel=1e-5)
    assert math.isinf(welch(Moments(3.0, None, 1), Moments(1.0, 2.0, 3), 0.95).high)


# --- benchmarks --------------------------------------------------------------------------------------------------


def write_bench(folder, said):
    folder.mkdir(exist_ok=True)
    (folder / "card.json").write_text(json.dumps(said))


def test_only_native_rows_make_a_ratio(tmp_path, ledger):
    write_bench(tmp_path / "throughput", bench_file())
    (bench,) = read_benches(tmp_path / "throughput", ledger)
    assert bench.hardware == "1 x Made-up GPU"
    found = ratio([bench.rows], "w4a4+rac", "fp8", "decode", 0.95)
    assert found.estimate == pytest.approx(1.1) and found.low == pytest.approx(1.1)
    assert ratio([bench.rows], "w4a4+rac", "fp8", "prefill", 0.95) is None
    assert ratio([[r for r in bench.rows if r.backend != "native"]], "w4a4+rac", "fp8", "decode", 0.95) is None


def test_a_ratio_never_crosses_files_nor_graphs(tmp_path, ledger):
    """QUADS with CUDA graphs, twice as fast, in one file; eager FP8 and QUADS in another: only those two count."""
    write_bench(tmp_path / "throughput", bench_file())
    (bench,) = read_benches(tmp_path / "throughput", ledger)
    eager = [row.model_copy(update={"rollout_graphs": False}) for row in bench.rows]
    quads = [row for row in eager if row.mode == "w4a4+rac" and row.backend == "native"]
    double = [row.model_copy(update={"rollout_graphs": True, "tokens_per_s": 2 * row.tokens_per_s}) for row in quads]
    other = [row.model_copy(update={"tokens_per_s": 2 * row.tokens_per_s}) for row in quads]
    pair = ("w4a4+rac", "fp8", "decode", 0.95)
    assert ratio([double], *pair) is None
    for files in ([double, eager], [eager, double], [double + eager], [other, eager]):
        assert ratio(files, *pair).estimate == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "quads.rollout_bench/2"}, "schema"),
        ({"remark": 1}, "remark"),
        ({"rows": [{**bench_file()["rows"][0], "tokens_per_s": None}]}, "tokens_per_s is missing"),
        ({"rows": [{**bench_file()["rows"][0], "backend": "guessed"}]}, "backend"),
    ],
)
def test_another_benchmark_file_is_refused(tmp_path, ledger, change, said):
    write_bench(tmp_path / "throughput", bench_file(**change))
    with pytest.raises(ResultFileError, match=said):
        read_benches(tmp_path / "throughput", ledger)


def test_no_folder_no_benchmarks(tmp_path, ledger):
    assert read_benches(tmp_path / "nowhere", ledger) == []


def test_kernel_bars_keep_their_bounds(tmp_path, ledger):
    bar = {
        "number": "8",
        "what": "RAC over plain",
        "value": 1.46,
        "required": 1.45,
        "better": "lower",
        "verdict": "missed",
    }
    said = {
        "bars": [bar],
        "hardware": bench_file()["hardware"],
        "versions": {},
        "commit": "unknown",
        "code_hash": "c0de",
    }
    (tmp_path / "k.json").write_text(json.dumps(said))
    (found,) = read_kernel_bars(tmp_path / "k.json", ledger)
    assert (found.value, found.required, found.verdict) == (1.46, 1.45, "missed")
    (tmp_path / "k.json").write_text(json.dumps({**said, "bars": [{"value": 1.0, "what": "x"}]}))
    with pytest.raises(ResultFileError, match="a bar lacks 'required'"):
        read_kernel_bars(tmp_path / "k.json", Ledger(tmp_path))
