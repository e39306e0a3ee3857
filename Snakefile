"""The whole experiment: data -> warm-up -> GRPO per arm and seed -> pass@1 -> MLflow -> tables and figures.

    snakemake              same as `snakemake toy`
    snakemake NAME         experiment configs/NAME.yaml with its `arms`
    snakemake NAME_all     the same with `more_arms`

Rules lie in workflow/rules, one file per stage; each calls `python -m quads.<stage>`.
"""

from snakemake.utils import min_version

from quads.lifeline import watch_parents

min_version("9.27")

# A SIGKILL of make must end this process too, or it would go on starting jobs for nobody.
watch_parents()


include: "workflow/rules/common.smk"
include: "workflow/rules/functions.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/track.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/benchmarks.smk"
include: "workflow/rules/diagnose.smk"
include: "workflow/rules/preflight.smk"
include: "workflow/rules/export.smk"
include: "workflow/rules/bench.smk"


report: "workflow/report/workflow.rst"


# Seconds each, or they write the tracking store: never worth a cluster job.
localrules:
    all,
    prepare,
    make_benchmarks,
    track_init,
    track_run,
    report_arms,


rule all:
    default_target: True
    input:
        targets(DEFAULT),


for name in EXPERIMENTS:

    rule:
        name:
            name
        input:
            targets(name),

    rule:
        name:
            f"{name}_all"
        input:
            targets(name, more=True),


show_estimates()


onstart:
    note_host()


onsuccess:
    show_tables()
