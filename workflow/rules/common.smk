"""Experiments, runs and the functions that rules call. Nothing here starts work or imports torch.

TRAP, config files are not inputs: their content is in the paths (as hashes), so that a comment or another arm in a YAML
file reruns nothing. TRAP, params: Snakemake reruns a finished job when a param changes, except params from functions
that take `output` (it holds those derived from files). So code hashes are plain params, and what only tells a stage
where to look (`experiment`, folders) takes `output`. TRAP, logs: Snakemake deletes a declared log before every attempt,
so the training stage also appends to its own train.log beside its results.
"""

import re
import socket
import sys
from math import ceil
from pathlib import Path
from shlex import quote

from snakemake.exceptions import WorkflowError

from quads import estimate, paths
from quads.config import (
    ConfigError,
    config_hash,
    load_arms,
    load_experiments,
    resolve_run,
)
from quads.config.site import load_site
from quads.data.toy_benchmarks import is_toy
from quads.provenance import code_hash, training_roots

DEFAULT = "toy"


def load():
    """Experiments by name, runs by (name, run id), and the cluster's names: validated before the DAG exists."""
    try:
        experiments = load_experiments(Path("configs"))
        if DEFAULT not in experiments:
            raise ConfigError(
                f"configs: the default experiment {DEFAULT!r} is missing; add configs/{DEFAULT}.yaml"
            )
        runs = {}
        for name, experiment in experiments.items():
            for arm in load_arms(experiment, Path("configs"), more=True):
                for seed in experiment.seeds:
                    run = resolve_run(experiment, arm, seed)
                    runs[name, run.id] = run
        return experiments, runs, load_site()
    except ConfigError as error:
        # SystemExit, not WorkflowError: the message stands alone, without a Snakefile traceback around it.
        sys.exit(f"Configuration error. {error}")


EXPERIMENTS, RUNS, SITE = load()
# Data and models are shared: any experiment with the same settings describes them.
DATA = {paths.data_dir(e).name: name for name, e in reversed(EXPERIMENTS.items())}
BENCHMARKS = {
    paths.benchmarks_dir(e).name: name for name, e in reversed(EXPERIMENTS.items())
}
MODELS = {paths.model_dir(e).name: name for name, e in reversed(EXPERIMENTS.items())}
STORES = {
    paths.tracking_marker(e).stem: name for name, e in reversed(EXPERIMENTS.items())
}


wildcard_constraints:
    experiment="|".join(EXPERIMENTS),
    run="|".join(sorted({run for _, run in RUNS})),
    eval_hash="|".join(sorted({paths.eval_hash(e) for e in EXPERIMENTS.values()})),
    data="|".join(DATA),
    benchmarks="|".join(BENCHMARKS),
    model="|".join(MODELS),
    store="|".join(STORES),


# The limit on this name (profiles/default) packs jobs into one machine's memory. A limit on mem_mb would also cap what
# Slurm is asked for; "local" keeps this one from holding back Slurm jobs.
resource_scopes:
    job_gib="local",


# `python` is the interpreter of this Snakemake even when the environment is not active; unbuffered, so that progress
# lines come through tee at once. The first words are Snakemake's own default prefix, which this call replaces.
shell.prefix(
    f"set -euo pipefail; export PATH={quote(str(Path(sys.executable).parent))}:$PATH PYTHONUNBUFFERED=1; "
)


def experiment_of(wildcards):
    return EXPERIMENTS[wildcards.experiment]


def run_of(wildcards):
    if (wildcards.experiment, wildcards.run) not in RUNS:
        known = ", ".join(run for name, run in RUNS if name == wildcards.experiment)
        raise WorkflowError(
            f"experiment {wildcards.experiment} has no run {wildcards.run}; its runs: {known}"
        )
    return RUNS[wildcards.experiment, wildcards.run]


def config_file(wildcards, output):
    return f"configs/{wildcards.experiment}.yaml"


def folder(wildcards, output):
    return Path(output[0]).parent


def data_manifest(wildcards):
    return paths.data_dir(experiment_of(wildcards)) / "manifest.json"


def benchmark_manifests(wildcards):
    """What is made offline and, for pinned sets, what was fetched."""
    experiment = experiment_of(wildcards)
    pinned = [n for n in experiment.evaluation.benchmarks.names if not is_toy(n)]
    return [
        paths.benchmarks_dir(experiment) / "manifest.json",
        *(f"results/data/{name}/manifest.json" for name in pinned),
    ]


def model_manifest(wildcards):
    return paths.model_dir(experiment_of(wildcards)) / "manifest.json"


def train_result(wildcards):
    return paths.train_dir(experiment_of(wildcards), run_of(wildcards)) / "result.json"


def eval_result(wildcards):
    return paths.eval_dir(experiment_of(wildcards), run_of(wildcards)) / "result.json"


def runs_of(experiment, more=False):
    """Runs of an experiment, arm by arm, seed by seed."""
    names = experiment.arms + (experiment.more_arms if more else ())
    runs = [
        run
        for (name, _), run in RUNS.items()
        if name == experiment.name and run.arm.name in names
    ]
    return sorted(
        runs,
        key=lambda run: (names.index(run.arm.name), experiment.seeds.index(run.seed)),
    )


def targets(name, more=False):
    """What `snakemake NAME` (or NAME_all) makes."""
    experiment = EXPERIMENTS[name]
    tracked = [paths.tracked_file(experiment, run) for run in runs_of(experiment, more)]
    return [
        paths.report_dir(experiment, more=more) / "report.json",
        *(tracked if experiment.tracking.enabled else []),
    ]


def note_host():
    """Machine of the run that holds the lock (workflow/scripts/unlock.py reads it)."""
    Path(".snakemake/quads-host").write_text(socket.gethostname())


def show_tables():
    """Print the table of every report that this call asked for."""
    for name, experiment in EXPERIMENTS.items():
        for more in (False, True):
            table = paths.report_dir(experiment, more=more) / "table.md"
            if str(table) in {
                str(file) for job in workflow.dag.jobs for file in job.output
            }:
                print(f"\n{table}\n\n{table.read_text()}", file=sys.stderr)


def dry_run():
    """Whether this call only plans; workflow.dryrun is not known yet while the file is read."""
    return any(re.fullmatch(r"-[a-z]*n[a-z]*|--dry-?run", word) for word in sys.argv)


def plans_only_or_runs():
    """Whether this call plans or runs jobs itself: no job of a running workflow, no listing, no report."""
    asks = r"--(mode|summary|detailed-summary|list.*|lint|dag|rulegraph|filegraph|report|unlock|archive|cleanup.*)(=.*)?"
    return not any(
        re.fullmatch(asks, word) or word in ("-S", "-D", "-l", "-L")
        for word in sys.argv
    )


def show_estimates():
    """In a dry run: GPU-hours of every named experiment that states rates (quads.estimate)."""
    if not dry_run():
        return
    for target in dict.fromkeys(sys.argv[1:]):
        experiment = EXPERIMENTS.get(target.removesuffix("_all"))
        if experiment is not None and experiment.rates is not None:
            arms = load_arms(experiment, Path("configs"), more=target.endswith("_all"))
            print(
                f"\n{estimate.table(experiment, estimate.estimate(experiment, arms))}",
                file=sys.stderr,
            )


def threads_of(wildcards):
    return experiment_of(wildcards).runtime.threads


def memory_mb(wildcards):
    return int(experiment_of(wildcards).runtime.memory_gib * 1024)


def memory_gib(wildcards):
    return ceil(experiment_of(wildcards).runtime.memory_gib)


def gpus(wildcards):
    runtime = experiment_of(wildcards).runtime
    return runtime.gpus_per_node if runtime.device == "cuda" else 0


def nodes(wildcards):
    return experiment_of(wildcards).runtime.nodes


def engine_gpus(wildcards):
    """An evaluation or a diagnosis runs one engine, however many GPUs training uses."""
    return 1 if experiment_of(wildcards).runtime.device == "cuda" else 0


def gres(wildcards):
    """GPUs of each node of a job on several nodes."""
    return SITE.gres(gpus(wildcards))


def partition(wildcards):
    """Slurm partition by the experiment's device; "" leaves it to the cluster."""
    return SITE.partition(experiment_of(wildcards).runtime.device == "cuda")


def account(wildcards):
    return SITE.account or ""


def training_code(wildcards):
    return code_hash(*training_roots(bool(experiment_of(wildcards).data.sets)))


def checkpoints(wildcards, output):
    return paths.checkpoint_dir(experiment_of(wildcards), run_of(wildcards))


def local_copy(wildcards, output):
    """`--config local=PATH`: hub files that are already here, one folder per set."""
    copy = config.get("local")
    return f"--local {Path(copy) / wildcards.dataset}" if copy else ""
