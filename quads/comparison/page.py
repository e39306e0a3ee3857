"""The comparison as one record, and that record as a Markdown page.

Sections: runs, settings that differ, code and machine, end of the curves, weights and collapse, paired tests, MLflow.
Every number of the page is in the record (compare.json) at full precision; the page rounds to four significant digits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quads.comparison.differences import provenance, settings
from quads.comparison.runs import LETTERS, ComparedRun
from quads.comparison.tests import LAST, evaluation_of, paired_tests, tails
from quads.diagnostics.collapse import judge


def build(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Plain values for compare.json."""
    tests, reasons = paired_tests(runs)
    return {
        "runs": [_about(run) for run in runs],
        "settings": settings(runs),
        "provenance": provenance(runs),
        "last_steps": [min(LAST, len(run.steps)) for run in runs],
        "curves": tails(runs),
        "evaluation": evaluation_of(runs),
        "tests": tests,
        "tests_refused": reasons,
        "mlflow": _mlflow(runs),
    }


def _about(run: ComparedRun) -> dict[str, Any]:
    result = run.result
    receipt = result.get("receipt") or {}
    return {
        "run": run.label,
        "folder": str(run.folder),
        "arm": result["run"]["arm"]["name"],
        "title": result["run"]["arm"].get("title", ""),
        "seed": result["run"]["seed"],
        "config_hash": result.get("config_hash"),
        "commit": result["commit"],
        "steps": result["steps"],
        "stopped": result.get("stopped"),
        "engine": receipt.get("mode"),
        "kernel": receipt.get("backend"),
        "delta_weight": result["delta_weight"],
        # results of earlier releases hold no verdict: the same rule, with its default settings, on their curves
        "collapse": result.get("collapse") or judge(run.steps).to_dict(),
    }


def _mlflow(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Markers in the order of the runs; address of MLflow's own comparison below the page that `make ui` opens."""
    known = [r.marker for r in runs if r.marker]
    out: dict[str, Any] = {"runs": [r.marker for r in runs]}
    stores = {m["uri"] for m in known}
    experiments = {str(m["experiment_id"]) for m in known if m.get("experiment_id")}
    if len(known) == len(runs) and len(stores) == len(experiments) == 1:
        ids = ",".join(f'"{m["mlflow_run_id"]}"' for m in known)
        (experiment,) = experiments
        out["compare"] = f'/#/compare-runs?runs=[{ids}]&experiments=["{experiment}"]'
    return out


def render(record: Mapping[str, Any], figure: str | None = None) -> str:
    """The Markdown page; `figure` is the file name of the curves beside it."""
    letters = LETTERS[: len(record["runs"])]
    parts = ["# " + " against ".join(r["run"] for r in record["runs"])]
    parts.append(_runs(record["runs"], letters))
    parts.append("## Settings that differ\n\n" + _columns(record["settings"], letters, "setting", "none: equal runs"))
    parts.append(
        "## Code, versions and machine that differ\n\n" + _columns(record["provenance"], letters, "what", "none")
    )
    parts.append(_curves(record, letters, figure))
    parts.append(_weights(record["runs"], letters))
    parts.append(_tests(record, letters))
    parts.append(_links(record, letters))
    return "\n\n".join(parts) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(c).replace("|", "\\|") for c in line) + " |" for line in lines)


def _columns(rows: Mapping[str, Sequence[str]], letters: str, first: str, empty: str) -> str:
    return _table([first, *letters], [[f"`{k}`", *v] for k, v in rows.items()]) if rows else empty


def _runs(runs: Sequence[Mapping[str, Any]], letters: str) -> str:
    rows = [
        [letter, f"`{r['run']}`", r["title"], str(r["seed"]), r["engine"] or "-", r["kernel"] or "-", _steps(r)]
        for letter, r in zip(letters, runs, strict=True)
    ]
    return _table(["", "run", "arm", "seed", "engine", "kernel", "steps"], rows)


def _steps(run: Mapping[str, Any]) -> str:
    return f"{run['steps']}" + (f" ({run['stopped']})" if run["stopped"] else "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _curves(record: Mapping[str, Any], letters: str, figure: str | None) -> str:
    rows = []
    for key, found in record["curves"].items():
        rows.append([f"`{key}`", *map(_tail, found)])
    shown = f"\n\n![reward and gap against the step]({figure})" if figure else ""
    counts = sorted(set(record["last_steps"]))
    each = ", ".join(f"{letter} {n}" for letter, n in zip(letters, record["last_steps"], strict=True))
    last = f"Last {counts[0]} step{'s' if counts[0] != 1 else ''}" if len(counts) == 1 else f"Last steps ({each})"
    title = f"## {last}: mean ± standard deviation over steps [smallest, largest]"
    return f"{title}\n\n{_table(['curve', *letters], rows)}{shown}"


def _tail(t: Mapping[str, Any] | None) -> str:
    """One cell; says how many of the steps were finite where not all were."""
    if t is None:
        return "-"
    finite = f"{t['steps']} of {t['of']} finite"
    if t["mean"] is None:
        return f"- ({finite})"
    spread = "" if t["sd"] is None else f" ± {_number(t['sd'])}"
    said = f"{_number(t['mean'])}{spread} [{_number(t['low'])}, {_number(t['high'])}]"
    return said if t["steps"] == t["of"] else f"{said} ({finite})"


def _weights(runs: Sequence[Mapping[str, Any]], letters: str) -> str:
    rows = []
    for letter, run in zip(letters, runs, strict=True):
        delta, collapse = run["delta_weight"], run["collapse"]
        weights = f"{delta['different']} of {delta['elements']} (largest {_number(delta['max_abs'])})" if delta else "-"
        rows.append([letter, weights, _verdict(collapse)])
    header = ["", "elements of the weights that differ between trainer and engine", "collapse"]
    return "## Weights and collapse\n\n" + _table(header, rows)


def _verdict(collapse: Mapping[str, Any]) -> str:
    steps = {"alarm at step": collapse.get("alarm_step"), "gap alarm at step": collapse.get("gap_alarm_step")}
    said = ", ".join(f"{name} {step}" for name, step in steps.items() if step is not None)
    return f"{collapse['verdict']}" + (f" ({said})" if said else "")


def _tests(record: Mapping[str, Any], letters: str) -> str:
    rows = [
        [
            " - ".join(letters[i] for i in t["positions"]),
            t["engine"],
            t["benchmark"],
            str(t["problems"]) + ("" if t["problems_verified"] else " (not verified)"),
            f"{100 * t['run_avg']:.2f}",
            f"{100 * t['against_avg']:.2f}",
            f"{100 * t['difference']:+.2f} [{100 * t['low']:+.2f}, {100 * t['high']:+.2f}]",
            f"{t['p']:.4f}" + (" (exact)" if t["exact"] else ""),
            f"{t['p_holm']:.4f}",
        ]
        for t in record["tests"]
    ]
    parts = ["## Paired tests"]
    if rows:
        level = f"{100 * record['tests'][0]['confidence']:g} %"
        header = [
            "pair",
            "engine",
            "benchmark",
            "problems",
            "avg@k",
            "of the first",
            f"difference, {level}",
            "p",
            "Holm",
        ]
        parts.append(_table(header, rows))
        parts.append(
            "Points; the same problems on both sides. p: two-sided sign-flip permutation test. Engine own: each run's "
            f"own rollout mode; bf16: its weights in BF16. Evaluation {record['evaluation']}. One pair of training "
            "runs says nothing about seeds."
        )
    if not all(t["problems_verified"] for t in record["tests"]):
        parts.append(
            "Not verified: an evaluation of the pair recorded no hash of its questions, so only the number of problems "
            "is known to be the same. Evaluate that run again to be sure."
        )
    parts += [f"Not tested: {reason}." for reason in record["tests_refused"]]
    return "\n\n".join(parts)


def _links(record: Mapping[str, Any], letters: str) -> str:
    rows = []
    for letter, marker in zip(letters, record["mlflow"]["runs"], strict=True):
        if marker is None:
            rows.append([letter, "not imported", "-", "-"])
            continue
        model = f"{marker['model']}, version {marker['version']}" if marker.get("model") else "-"
        rows.append([letter, f"`{marker['mlflow_run_id']}`", model, marker.get("uri", "-")])
    text = "## MLflow\n\n" + _table(["", "run", "registered model", "store"], rows)
    if record["mlflow"].get("compare"):
        text += f"\n\nSide by side after `make ui`: `http://127.0.0.1:5000{record['mlflow']['compare']}`"
    return text
