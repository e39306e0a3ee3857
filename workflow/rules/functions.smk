"""Inputs and parameters that one rule alone asks for, by rule; what several ask for is in common.smk."""

from quads.paper.paper_tables import STUDIES as REPORT_STUDIES, TRAINED

KERNELS = Path("docs/measured/h200_kernels.json")
FORMATS = ("compressed-tensors", "modelopt")


def decontaminated_sets(wildcards):
    """Reports of the pinned sets that a data set is drawn from; none for chains."""
    return [
        f"results/data/decontaminated/{name}/report.json"
        for name in EXPERIMENTS[DATA[wildcards.data]].data.sets
    ]


def warmup_data(wildcards):
    """The data that a warm-up holds out; a pretrained checkpoint needs none."""
    experiment = EXPERIMENTS[MODELS[wildcards.model]]
    if experiment.model.checkpoint is not None:
        return []
    return [paths.data_dir(experiment) / "manifest.json"]


def run_pattern(several):
    """Runs on one node, or on several, as a wildcard constraint."""
    names = {
        run for (name, run) in RUNS if (EXPERIMENTS[name].runtime.nodes > 1) == several
    }
    return "|".join(sorted(names)) or "none"


def launcher(wildcards, output):
    """What stands before the stage: nothing on one node."""
    runtime = experiment_of(wildcards).runtime
    if runtime.nodes == 1:
        return ""
    each = f"--gpus-per-node {runtime.gpus_per_node} --cpus-per-node {max(64, runtime.threads)}"
    return f"python -m quads.cluster {each} --logs {Path(output[0]).parent}/ray -- "


def study_files(wildcards):
    wanted = [
        paths.diagnose_dir(experiment_of(wildcards)) / f"{name}.json"
        for name in (*REPORT_STUDIES, TRAINED)
    ]
    if f"science_{wildcards.experiment}" in sys.argv:
        return wanted
    return [p for p in wanted if p.exists()]


def bench_files(wildcards):
    return sorted(paths.throughput_dir(experiment_of(wildcards)).glob("*.json"))


def exported(name):
    """Reports of all runs that can be exported; separate scales of q, k and v have no place in these formats."""
    experiment = EXPERIMENTS[name]
    return [
        f"results/{name}/export/{run.id}-{form}.json"
        for run in runs_of(experiment)
        for form in FORMATS
        if run.arm.rollout.weight == "nvfp4" and run.arm.weight_scale_group == "fused"
    ]
